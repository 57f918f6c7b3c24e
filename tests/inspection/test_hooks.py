# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Forward hooks see and change what flows, also where a fused operation would do the work of the module."""

import pytest
import torch
from torch import nn


def shifted(value):
    """Other numbers, which no norm after them undoes."""
    if isinstance(value, tuple):
        return tuple(shifted(each) for each in value)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value + 0.5 * torch.linspace(-1, 1, value.shape[-1])


def without_effect(model, name):
    """What decides about weights where there is one source, or two that are the same."""
    return "attnres" in model.config.model_type and name.startswith("layers.0.attn_mixer.norm")


def changes_of(model, inputs, names, tolerance=1e-4):
    """The logits with a hook on each of these modules, one at a time; each must be called and make a difference."""
    plain, found = model(**inputs).logits, {}
    for name in names:
        module, seen = model.model.get_submodule(name), []
        hook = module.register_forward_hook(lambda _, args, output, s=seen: s.append(output) or shifted(output))
        found[name] = model(**inputs).logits
        hook.remove()
        passes = getattr(model.config, "num_loops", 1) if name.startswith("layers.") else 1
        # a key norm is called for slots too
        assert len(seen) == passes or (name.endswith("k_norm") and len(seen) > passes), name
        if not without_effect(model, name):
            assert (found[name] - plain).abs().max() > tolerance, name
    assert torch.equal(model(**inputs).logits, plain)
    return found


def called_modules(model):
    """All modules in the base model but those that are lists."""
    return [name for name, module in model.model.named_modules() if name and not isinstance(module, nn.ModuleList)]


# of each method one, and more where its layers have other forms
VARIANTS = (
    "depth_attention-gate",
    "depth_attention-loops",
    "attnres-block",
    "attnres-additive",
    "denseformer",
    "mhc-post_norms",
    "moda",
    "value_residual",
)


@pytest.mark.once
@pytest.mark.parametrize("model", VARIANTS, indirect=True)
@torch.no_grad()
def test_hooks_on_every_module(model, inputs):
    """Those of the model itself and of the second layer, to which others hand something and which hands on."""
    assert model.config.depth_impl == "auto"
    names = [name for name in called_modules(model) if not name.startswith(("layers.0", "layers.2"))]
    kinds = {name.rpartition(".")[2] for name in names}
    assert {"self_attn", "mlp", "norm", "down_proj", "v_proj"} <= kinds and len(names) > 12
    changes_of(model, {"input_ids": inputs["input_ids"][:1, :4]}, names)


@torch.no_grad()
def test_hooks_that_look_only_change_nothing(model, inputs):
    plain, seen = model(**inputs).logits, set()
    for name in called_modules(model):
        model.model.get_submodule(name).register_forward_hook(lambda _, __, ___, name=name: seen.add(name))
    torch.testing.assert_close(model(**inputs).logits, plain, atol=1e-5, rtol=1e-5)
    assert seen == {*called_modules(model)}


# fields, and the modules of a layer that a kernel could bypass, beside its attention, its network and a norm
KERNELS = {
    "depth_qwen3": ({"depth_stride": 1, "depth_gate": True}, ["self_attn.k_norm", "self_attn.depth_gate"]),
    "attnres": ({"attnres_block_size": 2}, ["attn_mixer", "mlp_mixer", "mlp_mixer.norm"]),
    "denseformer": ({}, ["depth_average"]),
    "mhc": ({"mhc_num_streams": 2, "mhc_sinkhorn_iters": 1}, ["mlp_connection"]),
    "moda_qwen3": ({"moda_gate": True}, ["self_attn.q_norm", "self_attn.depth_gate"]),
    "value_residual_qwen3": ({}, ["self_attn.value_mix"]),
}


@pytest.mark.once
@pytest.mark.triton
@pytest.mark.interpreter
@pytest.mark.parametrize(
    "model_type", [pytest.param(each, marks=pytest.mark.exhaustive if each == "mhc" else ()) for each in KERNELS]
)
@torch.no_grad()
def test_hooks_where_kernels_do_the_work(small, inputs, model_type):
    """On a GPU "auto" means these kernels. With each hook the numbers are those of the reference operations."""
    inputs, (fields, own) = {"input_ids": inputs["input_ids"][:1, :3]}, KERNELS[model_type]
    names = [f"layers.1.{name}" for name in ("self_attn", "mlp", "post_attention_layernorm", *own)]
    found, expected = (
        changes_of(small(model_type, depth_impl=impl, num_hidden_layers=2, **fields), inputs, names)
        for impl in ("triton", "reference")
    )
    for name in names:
        torch.testing.assert_close(found[name], expected[name], atol=1e-4, rtol=1e-3, msg=name)
