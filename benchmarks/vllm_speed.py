# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`python -m benchmarks.vllm_speed depth_attention attnres` measures decoding by vLLM on this machine's CPU, beside the
stock model through the same Transformers backend, both compiled, as is vLLM's default.

It runs where `make test-vllm` runs. Every process holds one model; those of a method and of its stock model take
turns, so that drift of the machine affects them equally. There are several of each, since processes of one model
differ too.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from .versions import Worker


# on which backbone a method is measured, if not on Qwen3
BACKBONES = {"moda": "olmo2"}
SHAPE = {
    "vocab_size": 32768,
    "num_hidden_layers": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass
class Comparison:
    """
    Decoding steps of a model and of the stock one beside it. Milliseconds are medians of all steps, `low` the fastest
    of any; `ratio` is the median of the rounds' ratios, with the least and the largest. `cpu_ratio` is the same of the
    time that the processor spent on a step, which others that use the machine disturb less. `noise` is the ratio of
    the times of two processes of the same model, the one that is furthest from 1.
    """

    vllm: str
    case: str
    size: str
    model: str
    stock: str
    stock_milliseconds: float
    milliseconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    cpu_ratio: float
    stock_low: float
    low: float
    noise: float


class Server(Worker):
    """A process that serves one folder, and does as it is told, a line of JSON at a time."""

    def __init__(self, folder: Path, caches: Path, threads: int):
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, "--serve", str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def serve(folder: str) -> None:
    """What a process does: orders come on the standard input, answers leave by what was the standard output."""
    answers = os.fdopen(os.dup(1), "w")
    # what libraries print must not come between the answers
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams
    from vllm.config import CompilationMode

    from depthmix.vllm_plugin import register

    register()
    llm = None

    def prepare(backend: str) -> dict[str, str]:
        nonlocal llm
        llm = LLM(folder, model_impl=backend, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512)
        mode = llm.llm_engine.vllm_config.compilation_config.mode
        if mode == CompilationMode.NONE:
            raise RuntimeError("vLLM has not compiled the model.")
        return {"compilation": mode.name, "architecture": llm.llm_engine.model_config.architecture}

    def decode(sequences: int, prompt: int, tokens: int) -> list[tuple[float, float]]:
        """Milliseconds of each step that makes one token of all sequences, and those that the processor spent."""
        engine = llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for i in range(sequences):
            ids = [3 + (7 * i + j) % 1000 for j in range(prompt)]
            engine.add_request(str(i), {"prompt_token_ids": ids}, sampling)
        times = []
        while engine.has_unfinished_requests():
            start, spent = time.perf_counter(), time.process_time()
            engine.step()
            times.append((1000 * (time.perf_counter() - start), 1000 * (time.process_time() - spent)))
        # the prompts, and the last step, after which requests are dropped
        return times[1:-1]

    orders = {"prepare": prepare, "decode": decode}
    for line in sys.stdin:
        order, arguments = json.loads(line)
        try:
            answer = orders[order](**arguments)
        except Exception:
            answer = traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)


def save_models(method: str, hidden: int, folder: Path) -> tuple[Path, Path]:
    """Saves the stock model and that of the method, with random weights, and gives the two folders."""
    import torch

    from depthmix.families import FAMILIES

    backbone = BACKBONES.get(method, "qwen3")
    (family,) = (each for each in FAMILIES.values() if each.method == method and each.backbone.stock_type == backbone)
    stock = family.backbone
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    fields = SHAPE | heads | {"hidden_size": hidden, "intermediate_size": 3 * hidden}
    fields |= {"head_dim": 64} if backbone == "qwen3" else {}
    pairs = {
        folder / f"stock {backbone} {hidden}": (stock.stock_class("ForCausalLM"), stock.stock_class("Config")),
        folder / f"{method} {hidden}": (family.find_class("ForCausalLM"), family.find_class("Config")),
    }
    for path, (model_class, config_class) in pairs.items():
        if not path.exists():
            torch.manual_seed(0)
            model_class(config_class(**fields)).to(torch.bfloat16).save_pretrained(path)
    stock_folder, own_folder = pairs
    return stock_folder, own_folder


def start(folder: Path, caches: Path, threads: int, processes: int) -> list[Server]:
    # vLLM has a Qwen3 of its own, and takes what the plugin registers for such a one
    backend = "transformers" if folder.name.startswith("stock") else "auto"
    servers = []
    for _ in range(processes):
        # one after the other, since the first compiles for all
        servers.append(Server(folder, caches, threads))
        print(f"{folder.name}: {servers[-1].ask('prepare', backend=backend)}", file=sys.stderr, flush=True)
    return servers


def compare(stock: list[Server], own: list[Server], rounds: int, **order) -> dict[str, float]:
    everyone = [server for pair in zip(stock, own, strict=True) for server in pair]
    for server in everyone:
        server.ask("decode", **order)
    times: dict[Server, list[list[tuple[float, float]]]] = {server: [] for server in everyone}
    for i in range(rounds):
        # the order is reversed each time, so that nobody always comes after the same neighbour
        for server in everyone[:: 1 if i % 2 == 0 else -1]:
            times[server].append(server.ask("decode", **order))

    def median_of_round(servers: list[Server], i: int, kind: int) -> float:
        return statistics.median(step[kind] for server in servers for step in times[server][i])

    def ratios(kind: int) -> list[float]:
        return [median_of_round(own, i, kind) / median_of_round(stock, i, kind) for i in range(rounds)]

    def of_all(servers: list[Server]) -> list[float]:
        return [step[0] for server in servers for measured in times[server] for step in measured]

    medians = {server: statistics.median(of_all([server])) for server in everyone}
    noises = [medians[server] / medians[same[0]] for same in (stock, own) for server in same[1:]]
    return {
        "stock_milliseconds": statistics.median(of_all(stock)),
        "milliseconds": statistics.median(of_all(own)),
        "ratio": statistics.median(ratios(0)),
        "ratio_low": min(ratios(0)),
        "ratio_high": max(ratios(0)),
        "cpu_ratio": statistics.median(ratios(1)),
        "stock_low": min(of_all(stock)),
        "low": min(of_all(own)),
        "noise": max(noises, key=lambda ratio: abs(ratio - 1), default=1.0),
    }


def main() -> None:
    import vllm

    from depthmix.families import METHODS

    from .harness import environment, write_results

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_speed", description=__doc__.strip().split("\n\n")[0]
    )
    parser.add_argument("methods", nargs="+", choices=METHODS, metavar="method", help=f"any of: {', '.join(METHODS)}")
    parser.add_argument("--hidden", nargs="+", type=int, default=[1024], help="hidden sizes, multiples of 128")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8], help="how many are decoded at once")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each text")
    parser.add_argument("--rounds", type=int, default=10, help="how often each process has its turn")
    parser.add_argument("--processes", type=int, default=2, help="of each model")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the CSV file")
    parser.add_argument("--name", default="cpu_vllm", help="name of the CSV file")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    print(*(f"{name} {value}" for name, value in environment().items()), sep=", ", flush=True)
    comparisons: list[Comparison] = []
    servers: dict[Path, list[Server]] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = Path(folder) / "caches"

        def started(model: Path) -> list[Server]:
            if model not in servers:
                servers[model] = start(model, caches, arguments.threads, arguments.processes)
            return servers[model]

        def end(model: Path) -> None:
            for server in servers.pop(model, ()):
                server.process.kill()
                server.process.wait()

        try:
            for hidden, method in itertools.product(arguments.hidden, arguments.methods):
                stock, own = save_models(method, hidden, Path(folder))
                for other in [each for each in servers if each != stock]:
                    end(other)
                for sequences in arguments.sequences:
                    order = {"sequences": sequences, "prompt": arguments.prompt, "tokens": arguments.tokens}
                    measured = compare(started(stock), started(own), arguments.rounds, **order)
                    case = f"decode {sequences} at once, {arguments.threads} threads"
                    size = f"{SHAPE['num_hidden_layers']} layers of {hidden}"
                    c = Comparison(
                        vllm.__version__, case, size, method, f"stock {BACKBONES.get(method, 'qwen3')}", **measured
                    )
                    comparisons.append(c)
                    print(
                        f"{c.case:28} {c.size} {c.model:16} {c.stock_milliseconds:8.3f} -> {c.milliseconds:8.3f} ms"
                        f" {c.ratio:6.4f}x ({c.ratio_low:.4f} to {c.ratio_high:.4f}, noise {c.noise:.4f}),"
                        f" cpu {c.cpu_ratio:6.4f}x,"
                        f" fastest {c.stock_low:.3f} -> {c.low:.3f}, {c.low / c.stock_low:.4f}x",
                        flush=True,
                    )
                    # written after every number: a later case may not finish
                    write_results(arguments.output / f"{arguments.name}.csv", comparisons)
        finally:
            for model in [*servers]:
                end(model)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main()
