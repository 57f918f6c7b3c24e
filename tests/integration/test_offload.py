# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Accelerate's placement hooks: they move and rebuild what a layer takes and gives."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model, infer_auto_device_map
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM


def generate(model, ids):
    return model.generate(ids, max_new_tokens=6, do_sample=False)


# the host library and accelerate move modules, whatever these mix
pytestmark = pytest.mark.long


@pytest.fixture
def mixed_device_map():
    """Half of the layers on disk; `cpu` is where everything runs."""

    def mixed_device_map(model):
        placed = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(len(model.model.layers))}
        others = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
        return placed | dict.fromkeys([*others, "lm_head"], "cpu")

    return mixed_device_map


def test_cpu_offload(family, pattern, build_awake, token_ids, logits_of):
    model = build_awake(family, **pattern)
    ids = token_ids(2, 9)
    logits, tokens = logits_of(model, ids), generate(model, ids)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.v_proj.weight.is_meta
    assert torch.equal(logits_of(model, ids), logits)
    assert torch.equal(generate(model, ids), tokens)


@pytest.mark.densest
def test_dispatch_to_disk(family, pattern, build_awake, token_ids, logits_of, mixed_device_map, tmp_path):
    model = build_awake(family, **pattern)
    ids = token_ids(2, 9)
    logits, tokens = logits_of(model, ids), generate(model, ids)
    model = dispatch_model(model, mixed_device_map(model), main_device="cpu", offload_dir=tmp_path)
    assert model.model.layers[1].self_attn.v_proj.weight.is_meta
    assert torch.equal(logits_of(model, ids), logits)
    assert torch.equal(generate(model, ids), tokens)


def test_automatic_device_map(family, build_awake, token_ids, logits_of, tmp_path):
    model = build_awake(family)
    model.save_pretrained(tmp_path / "model")
    size = sum(parameter.nbytes for parameter in model.parameters())
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": size // 2}, offload_folder=tmp_path / "offload"
    )
    assert set(loaded.hf_device_map.values()) == {"cpu", "disk"}
    ids = token_ids(2, 9)
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


@pytest.mark.densest
def test_loading_with_an_offload_folder(
    family, pattern, build_awake, token_ids, logits_of, mixed_device_map, tmp_path
):
    model = build_awake(family, **pattern)
    ids = token_ids(2, 9)
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=mixed_device_map(model), offload_folder=tmp_path / "offload"
    )
    assert type(loaded) is family.head
    assert loaded.model.layers[1].self_attn.v_proj.weight.is_meta
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    assert torch.equal(generate(loaded, ids), generate(model, ids))


def test_automatic_device_map_keeps_layers_whole(family, build_awake):
    model = build_awake(family)
    layer_size = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    device_map = infer_auto_device_map(
        model,
        max_memory={"cpu": int(2.5 * layer_size), "disk": 10**9},
        no_split_module_classes=model._no_split_modules,
    )
    assert set(device_map.values()) == {"cpu", "disk"}
    assert [name for name in device_map if name.startswith("model.layers.") and name.count(".") > 2] == []


def test_sources_follow_to_the_device_of_their_reader(family, pattern, build_awake, token_ids):
    """The meta device plays a second one: a tensor that a hook did not move raises there."""
    model = build_awake(family, **pattern)
    here = ("embed_tokens", "rotary_emb", "layers")
    after = [module for name, module in model.model.named_children() if name not in here]
    away = [*model.model.layers[2:], *after, model.lm_head]
    for module in away:
        module.to("meta")
        add_hook_to_module(module, AlignDevicesHook(execution_device="meta"))
    with torch.no_grad():
        outputs = model(token_ids(2, 9), use_cache=False)
    assert outputs.logits.is_meta
