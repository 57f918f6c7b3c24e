# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`python -m benchmarks.conversion` compares `depthmix convert` with `cp`, on a checkpoint that it makes and removes.

Both write to the disk in turn, round after round: `cp` is followed by `sync` of the files, as the command flushes what
it writes. Python and the libraries take their time at whatever size, so the command is also counted from where it has
parsed its arguments' module. This process imports no torch, since a new one is counted with the memory of its parent.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


# bytes that must be free for each byte of the checkpoint: it, a copy, a conversion, and some room
ROOM = 3.2
SHARDS = 3
FIELDS = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@dataclass
class Run:
    """A process: seconds from its start to its end, and before it can begin with its work."""

    seconds: float
    start_seconds: float
    cpu_seconds: float
    peak_mib: float


@dataclass
class Comparison:
    """
    Medians over the rounds for one way of writing `gigabytes`. `speed` is that of `cp` in the same round divided into
    this way's, without the start of Python and the imports, and `speed_with_start` with them; `low` and `high` are the
    slowest and the fastest round of `speed`.
    """

    way: str
    gigabytes: float
    rounds: int
    seconds: float
    start_seconds: float
    cpu_seconds: float
    peak_mib: float
    speed: float
    low: float
    high: float
    speed_with_start: float


def make_source(folder: str, gigabytes: float) -> None:
    """A vanilla Qwen3 checkpoint in bf16, in as many layers as give it that size, in several files."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        sizes = [
            Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=count, **FIELDS)).num_parameters() * 2 for count in (1, 2)
        ]
    layers = max(1, round((1e9 * gigabytes - sizes[0]) / (sizes[1] - sizes[0])) + 1)
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=layers, **FIELDS))
    model.save_pretrained(folder, max_shard_size=int(1e9 * gigabytes / SHARDS * 1.1))


def convert(source: str, dest: str, begun: str, answer: str) -> None:
    """The command in a process that was started at `begun`; writes how long that took to the file `answer`."""
    from depthmix.late_import import import_late

    import_late("torch")
    from depthmix.__main__ import USUAL_ACTIVATIONS

    import_late("transformers.activations", ACT2FN=USUAL_ACTIVATIONS)
    from depthmix.conversion.cli import main

    Path(answer).write_text(json.dumps(time.monotonic() - float(begun)))
    sys.argv = ["depthmix", "convert", source, dest, "--to", "depth_attention"]
    main()


def run(command: list[str], environment: dict[str, str] | None = None) -> Run:
    begun = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}.")
    return Run(seconds, 0.0, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def run_convert(source: Path, dest: Path, answer: Path, environment: dict[str, str]) -> Run:
    code = "import sys; from benchmarks.conversion import convert; convert(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(source), str(dest), str(time.monotonic()), str(answer)]
    result = run(command, environment)
    result.start_seconds = json.loads(answer.read_text())
    return result


def run_copy(source: Path, dest: Path, environment: dict[str, str]) -> Run:
    return run(["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/* "$1"', str(source), str(dest)], environment)


def compare(rounds: int, gigabytes: float, folder: Path) -> list[Comparison]:
    source, dest = folder / "source", folder / "dest"
    code = "import sys; from benchmarks.conversion import make_source; make_source(sys.argv[1], float(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", code, str(source), str(gigabytes)], check=True)
    # compiled code is read from here from the second run on, as it is where users have installed the package
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(folder / "pycache"), "TRANSFORMERS_VERBOSITY": "error"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    ways = {
        "cp": lambda: run_copy(source, dest, environment),
        "convert": lambda: run_convert(source, dest, folder / "answer", environment),
    }
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    for i in range(rounds + 1):
        # the order is reversed each time, so that neither always comes after the same neighbour
        for way in list(ways)[:: 1 if i % 2 == 0 else -1]:
            shutil.rmtree(dest, ignore_errors=True)
            os.sync()
            result = ways[way]()
            # the first round only warms up
            if i > 0:
                runs[way].append(result)
                print(f"{way:8} {result}", flush=True)
    size = sum(path.stat().st_size for path in source.iterdir()) / 1e9
    comparisons = []
    for way, results in runs.items():
        pairs = list(zip(runs["cp"], results, strict=True))
        speeds = [copied.seconds / (own.seconds - own.start_seconds) for copied, own in pairs]
        medians = {
            name: statistics.median(getattr(each, name) for each in results) for name in Run.__dataclass_fields__
        }
        with_start = statistics.median(copied.seconds / own.seconds for copied, own in pairs)
        spread = {"low": min(speeds), "high": max(speeds), "speed_with_start": with_start}
        comparisons.append(Comparison(way, size, rounds, **medians, speed=statistics.median(speeds), **spread))
    return comparisons


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conversion", description=__doc__.strip().splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=2.5, help="size of the checkpoint")
    parser.add_argument("--folder", type=Path, help="where it is made, a temporary folder by default")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the CSV file")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.gigabytes <= 0:
        parser.error(f"--rounds {arguments.rounds}, --gigabytes {arguments.gigabytes}: must be above 0")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        free, needed = shutil.disk_usage(name).free / 1e9, ROOM * arguments.gigabytes
        if free < needed:
            parser.error(f"--gigabytes {arguments.gigabytes}: {needed:.1f} GB have to be free, and {free:.1f} are")
        comparisons = compare(arguments.rounds, arguments.gigabytes, Path(name))
    from .harness import write_results

    arguments.output.mkdir(parents=True, exist_ok=True)
    write_results(arguments.output / "cpu_conversion.csv", comparisons)
    for each in comparisons:
        print(each)


if __name__ == "__main__":
    main()
