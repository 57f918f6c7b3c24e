# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`examples/finetune.py`: adapters and the mixing are trained, completions alone count, and what is saved is whole."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import depthmix
from depthmix.families import METHODS


pytest.importorskip("peft")

# what docs/train.md lists for retrofits
SAVED = {
    "depth_attention": ["depth_gate"],
    "attnres": ["attn_mixer", "mlp_mixer", "output_mixer"],
    "denseformer": ["depth_average"],
    "mhc": ["attn_connection", "mlp_connection", "stream_readout"],
    "moda": ["depth_gate", "mlp_depth_kv_proj"],
    "value_residual": ["value_mix"],
}


@pytest.fixture(scope="module")
def finetune(example):
    return example("finetune")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A file of small pairs, of which the second for each number is learned easily."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"prompt": f"def add_{i}(a):\n", "completion": f"    return a + {i}\n"} for i in range(40)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


# in every run one with gates alone, and one that adds projections, which are no mixing parameters
QUICK = ("depth_attention", "moda")


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in METHODS]
)
def test_adapters_and_mixing_are_trained(method, finetune, pairs, tmp_path):
    """Any method, from a vanilla checkpoint to a model that is merged, in which both have moved, and nothing else."""
    options = ["--output", str(tmp_path), "--data", pairs, "--to", method, "--steps", "4", "--batch-size", "2"]
    trainer = finetune.main([*options, "--learning-rate", "1e-3", "--mixing-rate", "1e-2"])
    assert trainer.model.peft_config["default"].modules_to_save == SAVED[method]
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {1e-3, 1e-2}
    base, tuned = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("base", "model")
    )
    before, after = base.state_dict(), tuned.state_dict()
    assert before.keys() == after.keys()
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    mixing = {name for name in before if any(f".{module}." in f".{name}" for module in SAVED[method])}
    projections = {name for name in before if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "o_proj")}
    assert moved <= mixing | projections and moved & mixing and moved & projections == projections
    # what is saved computes what was trained
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "model")("def add_3(a):\n")["input_ids"]])
    with torch.no_grad():
        trained, saved = trainer.model.eval()(ids).logits, tuned(ids).logits
    # adapters are merged into weights that are stored in bf16
    assert (trained - saved).abs().max() < 0.1
    assert not torch.allclose(saved, base(ids).logits, atol=0.1)


def test_going_on_is_exact(finetune, pairs, tmp_path):
    options = ["--data", pairs, "--steps", "4", "--save-every", "2"]
    straight = finetune.main(["--output", str(tmp_path / "straight"), *options])
    for name in ("base", "checkpoint-2"):
        shutil.copytree(tmp_path / "straight" / name, tmp_path / "resumed" / name)
    resumed = finetune.main(["--output", str(tmp_path / "resumed"), *options, "--resume"])
    assert straight.state.global_step == resumed.state.global_step == 4
    for name in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        weights, others = (load_file(tmp_path / run / name) for run in ("straight", "resumed"))
        assert weights.keys() == others.keys()
        assert all(torch.equal(tensor, others[key]) for key, tensor in weights.items())


def test_a_model_of_ours_is_taken_as_it_is(finetune, pairs, tmp_path):
    depthmix.convert(finetune.SMALL_MODEL, tmp_path / "own", to="denseformer", progress=False)
    finetune.main(
        ["--output", str(tmp_path / "out"), "--model", str(tmp_path / "own"), "--data", pairs, "--steps", "1"]
    )
    assert not (tmp_path / "out" / "base").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").config.model_type == "denseformer"


def test_completions_alone_are_learned(finetune):
    tokenizer = AutoTokenizer.from_pretrained(finetune.SMALL_MODEL)
    pairs = [{"prompt": "def a():\n", "completion": "    return 1\n"}, {"prompt": "x = 1\n" * 20, "completion": "y"}]
    (row,) = finetune.encode(pairs, tokenizer, 12)
    learned = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    assert tokenizer.decode(row["input_ids"]) == "def a():\n    return 1\n<|endoftext|>"
    assert tokenizer.decode(learned) == "    return 1\n<|endoftext|>"
    assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))


def test_prompts_and_bodies_make_up_the_function(finetune):
    source = 'x = 1\n\n\ndef f(a):\n    """Adds one."""\n    b = a\n    return b + 1\n\n\ndef g(): return 2\n'
    (row,) = finetune.functions_of(source)
    assert row == {"prompt": 'def f(a):\n    """Adds one."""\n', "completion": "    b = a\n    return b + 1\n"}


def test_trl_is_optional(finetune, pairs, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "trl", None)
    with pytest.raises(SystemExit, match="TRL is not installed"):
        finetune.main(["--output", str(tmp_path / "out"), "--data", pairs, "--trl"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", ["ddp", "fsdp2", "fsdp2_full_checkpoints"])
def test_two_processes_train_as_one(config, launch, tmp_path):
    runs = {}
    for processes, name in ((1, None), (2, config)):
        options = ["--length", "64", "--batch-size", str(4 // processes), "--save-every", "5"]
        runs[processes] = launch(processes, name, tmp_path / str(processes), *options, example="finetune")
    for found in runs[2]:
        assert found["losses"] == pytest.approx(runs[1][0]["losses"], rel=1e-5)
    weights, others = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in "12")
    assert weights.keys() == others.keys() and any("depth_gate" in name for name in weights)
    for name, tensor in weights.items():
        assert (tensor - others[name]).norm() <= 1e-2 * tensor.norm(), name


@pytest.mark.exhaustive
def test_wrapped_layers_are_refused(launch, tmp_path):
    """Before training, since PEFT would fail when the first checkpoint is written."""
    with pytest.raises(AssertionError, match=r"fsdp_activation_checkpointing: PEFT cannot save"):
        launch(2, "fsdp2_activation_checkpointing", tmp_path / "out", "--length", "64", example="finetune")
    options = ["--length", "64", "--activation-checkpointing", "--batch-size", "2", "--steps", "2"]
    launch(2, "fsdp2", tmp_path / "other", *options, example="finetune")
