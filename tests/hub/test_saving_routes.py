# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Every way to save a model gives a folder, or a commit, that loads where depthmix is not installed."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


MANIFEST = "depthmix_code.json"
LORA_TARGETS = ["q_proj", "v_proj", "down_proj"]


def logits(model, ids):
    model.eval()
    with torch.no_grad():
        return model(ids).logits


def train(model, ids, folder) -> None:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    trainer.save_model()


def train_and_save(load, ids, folder):
    """Saves by the Trainer and after merging an adapter; returns folders and the logits that they must give."""
    from peft import LoraConfig, get_peft_model

    folder = Path(folder)
    model = load()
    before = logits(model, ids)
    train(model, ids, folder / "trainer")
    expected = {"trainer": logits(model, ids), "trainer/checkpoint-2": logits(model, ids)}
    assert not torch.allclose(before, expected["trainer"], atol=1e-2)

    lora = get_peft_model(load(), LoraConfig(r=4, target_modules=LORA_TARGETS, init_lora_weights=False))
    train(lora, ids, folder / "adapter")
    merged = lora.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    expected["merged"] = logits(merged, ids)
    assert not torch.allclose(before, expected["merged"], atol=1e-2)
    return {str(folder / name): values for name, values in expected.items()}


def push_by_every_route(model, folder) -> dict[str, list[str]]:
    """File names of the commit that each way to push makes."""
    there = {"push_to_hub": True, "repo_id": "org/name"}
    pushes = {
        "save_pretrained": lambda: model.save_pretrained(folder, **there),
        "save_pretrained over an earlier save": lambda: model.save_pretrained(folder, **there),
        "push_to_hub": lambda: model.push_to_hub("org/name"),
        "configuration's push_to_hub": lambda: model.config.push_to_hub("org/name"),
        "configuration's save_pretrained": lambda: model.config.save_pretrained(f"{folder}-config", **there),
    }
    pushed = {}
    with (
        mock.patch.object(HfApi, "create_repo", return_value=mock.Mock(repo_id="org/name")),
        mock.patch.object(HfApi, "create_commit") as create_commit,
        mock.patch.object(ModelCard, "load", side_effect=EntryNotFoundError("404")),
    ):
        for route, push in pushes.items():
            push()
            pushed[route] = sorted(operation.path_in_repo for operation in create_commit.call_args[1]["operations"])
    assert create_commit.call_count == len(pushes)
    return pushed


def use_remote_class(saved, ids, folder):
    def load():
        return AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)

    return {"trained": train_and_save(load, ids, folder), "pushed": push_by_every_route(load(), f"{folder}/pushed")}


def load_all(folders, ids):
    return [logits(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True), ids) for folder in folders]


@pytest.fixture
def assert_all_pushed(build, tmp_path):
    """`assert_all_pushed(pushed)` compares commits with what a save of the same model writes."""
    build().save_pretrained(tmp_path / "expected")
    code = {file.name for file in (tmp_path / "expected").glob("*.py")}

    def assert_all_pushed(pushed):
        for route, files in pushed.items():
            weights = set() if "config" in route else {"model.safetensors", "generation_config.json"}
            assert set(files) - {"README.md", MANIFEST} == code | weights | {"config.json"}, route

    return assert_all_pushed


# ways to save differ in what the host library calls, not in what a family has
@pytest.mark.sampled(1)
@pytest.mark.sampled_peer(0)
@pytest.mark.two_families
def test_trainer_adapter_and_remote_class(
    clean_python, family, build, token_ids, assert_awake, assert_complete, assert_all_pushed, tmp_path
):
    assert_awake(build())
    ids = token_ids(4, 12)
    build().save_pretrained(tmp_path / "saved")

    expected = train_and_save(build, ids, tmp_path / "package")
    remote = clean_python(use_remote_class, str(tmp_path / "saved"), ids, str(tmp_path / "remote"))
    expected |= remote["trained"]

    for folder in expected:
        assert_complete(folder)
    for loaded, values in zip(clean_python(load_all, list(expected), ids), expected.values(), strict=True):
        torch.testing.assert_close(loaded, values, rtol=0, atol=2e-5)

    assert_all_pushed(remote["pushed"])


def test_push_to_hub(build, assert_all_pushed, tmp_path):
    assert_all_pushed(push_by_every_route(build(), tmp_path / "pushed"))
