# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`examples/pretrain.py` in several processes: ten steps as in one, and checkpoints from which any number goes on.

Launching is that of `launcher.py`. What accelerate does with GPUs it is made to do with processes on a CPU, over gloo.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

import depthmix  # noqa: F401  (registers its model types)


# four processes, after four others, on a machine that does much else
pytestmark = pytest.mark.timeout(1500)

ROWS = 4
METHODS = {
    "depth_qwen3": ["--field", "depth_stride=1"],
    "attnres": ["--field", "attnres_block_size=3"],
    "denseformer": [],
    "mhc": ["--field", "mhc_sinkhorn_iters=2"],
    "moda_olmo2": [],
    "value_residual_qwen3": [],
}


def options_of(model_type: str, processes_with_data: int) -> list[str]:
    """Of a run whose steps have the same rows, over however many processes they are dealt."""
    return ["--model-type", model_type, *METHODS[model_type], "--batch-size", str(ROWS // processes_with_data)]


def start_of(output) -> dict[str, torch.Tensor]:
    """The weights before training, which the seed and the configuration say."""
    set_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(output / "model")).state_dict()


def weights_of(output) -> dict[str, torch.Tensor]:
    """Of the trained model, as it is loaded: an FSDP2 save has a tied head twice."""
    stored = load_file(output / "model" / "model.safetensors")
    if "lm_head.weight" in stored:
        assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    return AutoModelForCausalLM.from_pretrained(output / "model", dtype=torch.float32).state_dict()


@pytest.fixture(scope="module")
def one_process(launch, tmp_path_factory):
    """`one_process(model_type)` gives losses, norms of gradients and the trained weights; each runs once."""
    known = {}

    def one_process(model_type):
        if model_type not in known:
            output = tmp_path_factory.mktemp("one") / "out"
            (found,) = launch(1, None, output, *options_of(model_type, 1))
            known[model_type] = found | {"weights": weights_of(output)}
        return known[model_type]

    return one_process


@pytest.fixture(scope="module")
def straight(launch, tmp_path_factory):
    """`straight(processes, config)` gives the folder of ten steps with a checkpoint after five, and what was found."""
    known = {}

    def straight(processes, config):
        if (processes, config) not in known:
            output = tmp_path_factory.mktemp("straight") / "out"
            options = [*options_of("depth_qwen3", processes), "--save-every", "5"]
            known[processes, config] = output, launch(processes, config, output, *options)
        return known[processes, config]

    return straight


def assert_same_run(found: dict, expected: dict) -> None:
    """Up to rounding: a loss that is divided by the number of another process's tokens is off by a hundredth."""
    assert len(found["losses"]) == len(expected["losses"]) == 10
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-3)


def assert_same_weights(folder, expected: dict, tolerance: float) -> None:
    """Each tensor has moved as it should have, up to a part of the way."""
    found, start = weights_of(folder), start_of(folder)
    assert found.keys() == expected.keys() == start.keys()
    for name, tensor in expected.items():
        # the first connection of mHC has equal streams: gradients of rounding only, of which Adam makes whole steps
        if ".0.attn_connection.residual_logits" not in name:
            assert (found[name] - tensor).norm() <= tolerance * (tensor - start[name]).norm(), name


@pytest.mark.parametrize("config", [pytest.param("ddp", marks=pytest.mark.exhaustive), "fsdp2"])
def test_two_processes_train_as_one(config, straight, one_process):
    output, found = straight(2, config)
    expected = one_process("depth_qwen3")
    for each in found:
        assert_same_run(each, expected)
    assert_same_weights(output, expected["weights"], 1e-2)
    parts = {"ddp": 1, "fsdp2": 2}[config]
    assert all(each["held"] == expected["held"] / parts for each in found)


EVERY_METHOD = [
    (2, "fsdp2_activation_checkpointing", []),
    (4, None, ["--tensor-parallel", "2", "--shards", "2"]),
]
ONE_METHOD = [
    (2, "fsdp2_full_checkpoints", []),
    (4, "ddp", []),
    (4, "fsdp2", []),
    (2, None, ["--shards", "2"]),
    (2, None, ["--tensor-parallel", "2"]),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model_type", "processes", "config", "split"),
    [(model_type, *way) for model_type in METHODS for way in EVERY_METHOD]
    + [("value_residual_qwen3", *way) for way in ONE_METHOD],
    ids=str,
)
def test_others_train_as_one(model_type, processes, config, split, launch, one_process, tmp_path):
    with_data = processes // 2 if "--tensor-parallel" in split else processes
    found = launch(processes, config, tmp_path / "out", *options_of(model_type, with_data), *split)
    expected = one_process(model_type)
    for each in found:
        assert_same_run(each, expected)
        if config == "fsdp2_activation_checkpointing":
            assert each["modules"].count("FSDPCheckpointWrapper") == 4
        if config != "ddp":
            assert each["held"] < 0.6 * expected["held"]
    assert_same_weights(tmp_path / "out", expected["weights"], 1e-2)


def go_on(launch, folder, processes, config, tmp_path):
    """From the checkpoint after five steps alone, in a folder of its own."""
    shutil.copytree(folder / "checkpoint-5", tmp_path / "out" / "checkpoint-5")
    options = [*options_of("depth_qwen3", processes), "--save-every", "5", "--resume"]
    return launch(processes, config, tmp_path / "out", *options)


@pytest.mark.parametrize(
    "config",
    [
        "fsdp2",
        pytest.param("ddp", marks=pytest.mark.exhaustive),
        pytest.param("fsdp2_full_checkpoints", marks=pytest.mark.exhaustive),
        pytest.param("fsdp2_activation_checkpointing", marks=pytest.mark.exhaustive),
    ],
)
def test_going_on_is_exact(config, launch, straight, tmp_path):
    folder, expected = straight(2, config)
    found = go_on(launch, folder, 2, config, tmp_path)
    for each, straight_on in zip(found, expected, strict=True):
        assert each["losses"] == straight_on["losses"]
        assert each["norms"] == straight_on["norms"]
    assert_same_weights(tmp_path / "out", weights_of(folder), 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("config", "written", "read"),
    [("ddp", 2, 1), ("fsdp2", 2, 1), ("fsdp2", 2, 4), ("fsdp2", 4, 2), ("fsdp2_full_checkpoints", 2, 4)],
)
def test_a_checkpoint_of_some_is_read_by_others(config, written, read, launch, straight, tmp_path):
    folder, expected = straight(written, config)
    for each in go_on(launch, folder, read, config, tmp_path):
        assert_same_run(each, expected[0])
    assert_same_weights(tmp_path / "out", weights_of(folder), 1e-2)
