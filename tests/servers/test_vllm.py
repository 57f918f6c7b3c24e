# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
vLLM's Transformers backend, on a CPU, with its defaults: compiled, prefixes cached, prompts in chunks. Its texts are
those of `generate`.

`make test-vllm` runs this in an environment in which depthmix is not installed: it comes from a folder of links, and
the processes that serve get that folder only where a test says so. They take a minute each, most of it compiling.
"""

import configparser
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from depthmix import AttnResConfig
from depthmix.conversion import convert
from depthmix.modeling.modeling_attnres import AttnResMixer


pytestmark = pytest.mark.timeout(1200)

VOCABULARY = 320
# the narrowest heads of vLLM's attention on a CPU
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
METHODS = {
    "depth_attention": {"depth_stride": 1},
    "attnres": {"attnres_block_size": 3},
    "denseformer": {},
    # the time to compile grows with the iterations
    "mhc": {"mhc_num_streams": 3, "mhc_sinkhorn_iters": 3},
    "value_residual": {},
}
# longer ones than a step takes, and one that is a prefix of another
LENGTHS = [
    1,
    2,
    3,
    5,
    8,
    13,
    21,
    34,
    55,
    89,
    144,
    7,
    47,
    48,
    49,
    96,
    97,
    150,
    16,
    17,
    31,
    32,
    33,
    64,
    65,
    4,
    6,
    10,
    20,
]
CHUNKED = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True, "enable_prefix_caching": True}
UNCOMPILED = {"enforce_eager": True}


def random_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    longest = max(prompts, key=len)
    return [*prompts, longest[:40], longest[:100], [*longest[:80], 5]]


def wake(model):
    """Moves what starts at zero or one, so that a lost mixing would be noticed."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """
    `checkpoint(method, **shape)` converts a small random Qwen3, or another parent, wakes the mixing and gives the
    saved folder.
    """
    made = {}

    def checkpoint(method: str, retrofit: bool = True, parent: str = "qwen3", **shape) -> Path:
        key = method, retrofit, parent, *shape.items()
        if key not in made:
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(method)
            fields = {name: shape.pop(name) for name in ("num_loops",) if name in shape}
            config = AutoConfig.for_model(parent, **SHAPE | shape)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / "vanilla")
            convert(folder / "vanilla", folder / "fresh", to=method, retrofit=retrofit, **METHODS.get(method, {}))
            model = AutoModelForCausalLM.from_pretrained(folder / "fresh", **fields)
            wake(model).save_pretrained(folder / "saved")
            made[key] = folder / "saved"
        return made[key]

    return checkpoint


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Of processes that serve: nothing of what tests set for themselves, and no code compiled before."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PYTHON", "TRITON_"))}
    home = tmp_path_factory.mktemp("home")
    return kept | {
        "HF_HOME": str(home / "huggingface"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "VLLM_CACHE_ROOT": str(home / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture
def run_vllm(tmp_path, environment):
    """`run_vllm(folder, **options)` gives the worker's answer, or None and what it printed if it failed."""

    def run_vllm(
        folder,
        prompts=((5, 6, 7),),
        max_tokens=16,
        rounds=1,
        import_depthmix=False,
        python_path=None,
        threads=None,
        **options,
    ):
        order = {"folder": str(folder), "prompts": list(prompts), "max_tokens": max_tokens, "rounds": rounds}
        order |= {"options": options, "import_depthmix": import_depthmix}
        (tmp_path / "order").write_text(json.dumps(order))
        settings = dict(environment)
        if import_depthmix:
            python_path = os.environ["PYTHONPATH"]
        if python_path is not None:
            settings["PYTHONPATH"] = python_path
        if threads is not None:
            settings["VLLM_CPU_OMP_THREADS_BIND"] = threads
        worker = str(Path(__file__).with_name("vllm_worker.py"))
        command = [sys.executable, worker, str(tmp_path / "order"), str(tmp_path / "answer")]
        done = subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, text=True)
        log = done.stdout + done.stderr
        return (json.loads((tmp_path / "answer").read_text()) if done.returncode == 0 else None), log

    return run_vllm


@torch.no_grad()
def generated(folder, prompts, max_tokens=16) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    greedy = {"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": None}
    return [model.generate(torch.tensor([each]), **greedy)[0, len(each) :].tolist() for each in prompts]


@pytest.mark.parametrize("method", METHODS)
def test_compiled(method, checkpoint, run_vllm):
    """As vLLM does it by default, from the folder's own code: depthmix is not installed there."""
    folder, prompts = checkpoint(method), random_prompts()
    assert len(prompts) == 32
    answer, log = run_vllm(folder, prompts, rounds=2, block_size=32, **CHUNKED)
    assert answer is not None, log[-4000:]
    expected = generated(folder, prompts)
    assert len({tuple(text) for text in expected}) > 20
    assert answer["texts"] == [expected, expected]
    assert answer["cached_tokens"] > 500
    assert not answer["has_depthmix"]


@pytest.mark.parametrize("method", ["depth_attention", "attnres"])
def test_with_depthmix(method, checkpoint, run_vllm):
    """The classes of an imported package come before the folder's own."""
    folder, prompts = checkpoint(method), random_prompts()
    answer, log = run_vllm(folder, prompts, import_depthmix=True, **CHUNKED, **UNCOMPILED)
    assert answer is not None, log[-4000:]
    assert answer["has_depthmix"]
    assert answer["texts"] == [generated(folder, prompts)]


@pytest.fixture
def installed(tmp_path) -> str:
    """A path from which depthmix is imported as if it were installed, with its plugin."""
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    group = "vllm.general_plugins"
    metadata = tmp_path / "installed" / "depthmix-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: depthmix\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]{setup['options.entry_points'][group]}\n")
    return os.pathsep.join([str(metadata.parent), os.environ["PYTHONPATH"]])


def test_as_an_installed_plugin(checkpoint, run_vllm, installed, tmp_path):
    """Compiled, without `trust_remote_code`, and without the code of the folder."""
    folder, prompts = checkpoint("attnres"), random_prompts()
    copy = tmp_path / "without_code"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.py"))
    config = json.loads((copy / "config.json").read_text())
    del config["auto_map"]
    (copy / "config.json").write_text(json.dumps(config))
    answer, log = run_vllm(copy, prompts, python_path=installed, trust_remote_code=False, **CHUNKED)
    assert answer is not None, log[-4000:]
    assert answer["texts"] == [generated(folder, prompts)]


@pytest.mark.parametrize("fields", [{}, {"attnres_scale": "sum"}, {"attnres_recency_bias": True}], ids=str)
@torch.no_grad()
def test_mixer_of_compiled_models(fields):
    """What the plugin gives compilers in place of the usual operations."""
    from depthmix.vllm_models import CompiledMixer

    torch.manual_seed(0)
    mixer, plain = (kind(AttnResConfig(**SHAPE, **fields)) for kind in (CompiledMixer, AttnResMixer))
    plain.load_state_dict(wake(mixer).state_dict())
    partial, update, *sources = torch.randn(5, 2, 7, 128)
    for given in ((partial, update), (partial, None), (None, update)):
        found, expected = mixer(*given, sources), plain(*given, sources)
        torch.testing.assert_close(found, expected)
    assert mixer(partial, None, ())[1].equal(partial)
    # where weights are asked for, or a norm is taken along, the usual operations work
    asked = {"output_norm_weight": torch.ones(128), "output_depth_weights": True}
    torch.testing.assert_close(mixer(partial, update, sources, **asked), plain(partial, update, sources, **asked))


@pytest.mark.parametrize("retrofit", [False, True], ids=["published", "gated"])
def test_moda_by_the_plugin(retrofit, checkpoint, run_vllm, installed):
    """Compiled; slots are merged by a log-sum-exp that an attention sink tells."""
    folder, prompts = checkpoint("moda", retrofit=retrofit), random_prompts()
    answer, log = run_vllm(folder, prompts, python_path=installed, trust_remote_code=False, **CHUNKED)
    assert answer is not None, log[-4000:]
    assert answer["texts"] == [generated(folder, prompts)]


@pytest.mark.parametrize("loops", [2, 3])
def test_looped_by_the_plugin(loops, checkpoint, run_vllm, installed):
    """Compiled; each pass has a cache of its own."""
    folder, prompts = checkpoint("depth_attention", num_loops=loops), random_prompts()
    options = {"python_path": installed, "trust_remote_code": False, "block_size": 32, "rounds": 2}
    answer, log = run_vllm(folder, prompts, **options, **CHUNKED)
    assert answer is not None, log[-4000:]
    expected = generated(folder, prompts)
    assert answer["texts"] == [expected, expected]
    assert answer["cached_tokens"] > 500


needs_two_cores = pytest.mark.skipif(os.cpu_count() < 2, reason="each rank wants a core of its own")


@needs_two_cores
def test_two_ranks(checkpoint, run_vllm):
    """The mean of the queries of a key-value head is taken where the head is."""
    folder, prompts = checkpoint("depth_attention", retrofit=False), random_prompts()
    answer, log = run_vllm(folder, prompts, tensor_parallel_size=2, threads="0|1", **UNCOMPILED)
    assert answer is not None, log[-4000:]
    assert answer["texts"] == [generated(folder, prompts)]


@needs_two_cores
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("depth_attention", {}),
        ("depth_attention", {"num_loops": 2}),
        ("depth_attention", {"parent": "olmo2"}),
        ("moda", {}),
        ("moda", {"retrofit": False}),
        ("moda", {"retrofit": False, "parent": "olmo2"}),
    ],
    ids=str,
)
def test_two_ranks_by_the_plugin(method, options, checkpoint, run_vllm, installed):
    """Its gate and its part of a slot are where a head is. OLMo2's norms go over all heads."""
    folder, prompts = checkpoint(method, **options), random_prompts()
    settings = {"python_path": installed, "trust_remote_code": False, "tensor_parallel_size": 2, "threads": "0|1"}
    answer, log = run_vllm(folder, prompts, **settings, **CHUNKED, **UNCOMPILED)
    assert answer is not None, log[-4000:]
    assert answer["texts"] == [generated(folder, prompts)]


@needs_two_cores
@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({"num_key_value_heads": 1}, {"tensor_parallel_size": 2}, "must divide num_key_value_heads=1"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: must be 1 with depth mixing"),
    ],
    ids=["heads", "stages"],
)
def test_what_cannot_be_divided_is_refused(options, sizes, message, checkpoint, run_vllm, installed):
    settings = {"python_path": installed, "trust_remote_code": False, "threads": "0|1"}
    answer, log = run_vllm(checkpoint("depth_attention", **options), **settings, **sizes, **UNCOMPILED)
    assert answer is None
    assert message in log


@needs_two_cores
def test_gates_on_two_ranks_are_refused(checkpoint, run_vllm):
    """Without the plugin, each device would need to know which of the heads it has."""
    answer, log = run_vllm(checkpoint("depth_attention"), tensor_parallel_size=2, threads="0|1", **UNCOMPILED)
    assert answer is None
    assert "depth_gate=True" in log and "tensor parallelism" in log


@needs_two_cores
def test_more_ranks_than_heads_are_refused(checkpoint, run_vllm):
    folder = checkpoint("depth_attention", retrofit=False, num_key_value_heads=1)
    answer, log = run_vllm(folder, tensor_parallel_size=2, threads="0|1", **UNCOMPILED)
    assert answer is None
    assert "num_key_value_heads=1: must be a multiple of the number of devices" in log


def test_looped_models_are_refused(checkpoint, run_vllm):
    answer, log = run_vllm(checkpoint("depth_attention", num_loops=2), **UNCOMPILED)
    assert answer is None
    assert "num_loops=2: must be 1 with attn_implementation='vllm'" in log


def test_moda_is_refused(checkpoint, run_vllm):
    answer, log = run_vllm(checkpoint("moda"), **UNCOMPILED)
    assert answer is None
    assert "attn_implementation='vllm': must be one of sdpa, eager" in log and "depth slots" in log


@pytest.fixture
def openai_server(environment, tmp_path):
    """`openai_server(folder)` starts vLLM's server and gives its address."""
    processes = []

    def openai_server(folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        options = ["--trust-remote-code", "--enforce-eager", "--dtype", "float32", "--max-model-len", "256"]
        address = ["--host", "127.0.0.1", "--port", str(port)]
        with open(tmp_path / "log", "w") as log:
            processes.append(
                subprocess.Popen(program + options + address, stdout=log, stderr=log, env=environment, cwd=tmp_path)
            )
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                return f"http://127.0.0.1:{port}/v1"
            except (urllib.error.URLError, OSError):
                assert processes[-1].poll() is None, (tmp_path / "log").read_text()[-4000:]
                time.sleep(1)
        raise AssertionError((tmp_path / "log").read_text()[-4000:])

    yield openai_server
    for process in processes:
        process.terminate()
        process.wait()


def post(url, **body) -> str:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.read().decode()


def test_openai_server(checkpoint, openai_server):
    folder = checkpoint("attnres")
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    expected = tokenizer.decode(generated(folder, [[5, 80, 7]], max_tokens=8)[0])

    address = openai_server(folder)
    settings = {"model": str(folder), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = json.loads(post(f"{address}/completions", prompt="w5 w80 w7", **settings))
    assert answer["choices"][0]["text"].split() == expected.split()
    messages = [{"role": "user", "content": "w5 w80 w7"}]
    answer = json.loads(post(f"{address}/chat/completions", messages=messages, **settings))
    assert answer["choices"][0]["message"]["content"].split() == expected.split()
    stream = post(f"{address}/chat/completions", messages=messages, stream=True, **settings)
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text.split() == expected.split()
