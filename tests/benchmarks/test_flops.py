# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The formulas of benchmarks/flops.py, against models and torch's counter."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, Olmo2Config, Olmo2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from depthmix import (
    AttnResConfig,
    AttnResForCausalLM,
    DenseFormerConfig,
    DenseFormerForCausalLM,
    DepthQwen3Config,
    DepthQwen3ForCausalLM,
    MHCConfig,
    MHCForCausalLM,
    MoDAOlmo2Config,
    MoDAOlmo2ForCausalLM,
)
from depthmix.modeling.transformers_versions import HOST_CACHE_NAME


# elongated, so that what is counted outweighs what is not
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
TOKENS = 16
MODELS = {
    "vanilla": Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "Depth-Attention": DepthQwen3ForCausalLM(DepthQwen3Config(**SHAPE, depth_stride=1)),
    "looped vanilla": DepthQwen3ForCausalLM(DepthQwen3Config(**SHAPE, depth_stride=0, num_loops=2)),
    "looped Depth-Attention": DepthQwen3ForCausalLM(DepthQwen3Config(**SHAPE, depth_stride=2, num_loops=2)),
    "AttnRes block": AttnResForCausalLM(AttnResConfig(**SHAPE, attnres_block_size=3, attnres_recency_bias=True)),
    "AttnRes full": AttnResForCausalLM(AttnResConfig(**SHAPE, attnres_variant="full")),
    "DenseFormer": DenseFormerForCausalLM(DenseFormerConfig(**SHAPE)),
    "DenseFormer 2x3": DenseFormerForCausalLM(DenseFormerConfig(**SHAPE, dwa_dilation=2, dwa_period=3)),
    "mHC": MHCForCausalLM(MHCConfig(**SHAPE)),
    "vanilla OLMo2": Olmo2ForCausalLM(Olmo2Config(**SHAPE)),
    "MoDA": MoDAOlmo2ForCausalLM(MoDAOlmo2Config(**SHAPE)),
    "MoDA row 5, window": MoDAOlmo2ForCausalLM(
        MoDAOlmo2Config(**SHAPE, moda_attn_depth_proj=True, moda_depth_window=3)
    ),
}


def vanilla_of(name):
    if "looped" in name:
        return MODELS["looped vanilla"]
    return MODELS["vanilla OLMo2" if "MoDA" in name or "OLMo2" in name else "vanilla"]


# what the plain PyTorch forms do more than needed, such as a norm before a dot product in place of a factor after it
SLACK = {"AttnRes block": 1.35, "AttnRes full": 1.25, "mHC": 1.15}


@pytest.fixture(scope="module")
def flops():
    path = Path(__file__).parents[2] / "benchmarks" / "flops.py"
    spec = importlib.util.spec_from_file_location("flops", path)
    module = sys.modules["flops"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def element_wise(operations):
    def count(*shapes, out_shape=None, **kwargs):
        return operations * torch.Size(out_shape).numel()

    return count


def reduction(in_shape, *args, out_shape=None, **kwargs):
    return torch.Size(in_shape).numel() - torch.Size(out_shape).numel()


aten = torch.ops.aten
ELEMENT_WISE = {
    aten.mul: element_wise(1),
    aten.add: element_wise(1),
    aten.pow: element_wise(1),
    aten.addcmul: element_wise(2),
    aten.sum: reduction,
    aten.mean: reduction,
}


@torch.no_grad()
def counted(model, mapping):
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        model(torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    return counter.get_total_flops() / TOKENS


@pytest.mark.parametrize("name", MODELS)
def test_parameters(flops, name):
    model = MODELS[name]
    result = flops.cost(model.config, TOKENS)
    assert result.parameters == model.num_parameters()
    assert result.added_parameters == result.parameters - vanilla_of(name).num_parameters()


@pytest.mark.parametrize("fields", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_parameters_of_other_backbones(flops, fields):
    model = DenseFormerForCausalLM(DenseFormerConfig(**SHAPE, use_qk_norm=False, **fields))
    assert flops.cost(model.config, TOKENS).parameters == model.num_parameters()


def test_vanilla_flops(flops):
    """Matrix products only, so the counter finds them all, and the angles of the rotation on some versions."""
    for name in ("vanilla", "looped vanilla", "vanilla OLMo2"):
        assert flops.cost(MODELS[name].config, TOKENS).flops == pytest.approx(counted(MODELS[name], {}), rel=1e-4)


@pytest.mark.parametrize("name", [name for name in MODELS if "vanilla" not in name])
def test_extra_flops(flops, name):
    """
    Beside the element-wise operations that the plain PyTorch forms do more than the vanilla model. The formulas count
    a sum of n products as n multiplications and n additions, of which the plain forms need one less.
    """
    found = counted(MODELS[name], ELEMENT_WISE) - counted(vanilla_of(name), ELEMENT_WISE)
    costs = [flops.cost(model.config, TOKENS) for model in (MODELS[name], vanilla_of(name))]
    formula = costs[0].flops - costs[1].flops
    assert formula == costs[0].extra_flops - costs[1].extra_flops
    assert 0.88 * formula <= found <= SLACK.get(name, 1.05) * formula


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_state(flops, name):
    """Every layer of every pass has a slot, and nothing else is kept."""
    model = MODELS[name]
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, TOKENS, dtype=torch.long), **{HOST_CACHE_NAME: cache})
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert 2 * kept == TOKENS * flops.cost(model.config, TOKENS).state_bytes


def test_extra_flops_of_the_released_depth_attention(flops):
    shape = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = DepthQwen3Config(**shape, intermediate_size=6912, head_dim=64, vocab_size=50304)
    result = flops.cost(config, 2048)
    assert (result.extra_flops, result.state_bytes, result.parameters) == (335_872, 98_304, 2_747_998_208)


@pytest.mark.parametrize(
    ("config_class", "fields", "added"),
    [
        (DenseFormerConfig, {}, 1224),
        (MHCConfig, {}, 19_663_396),
        (
            AttnResConfig,
            {"attnres_variant": "cumulative", "attnres_recency_bias": True},
            397_409,
        ),
    ],
)
def test_parameters_that_the_releases_add(flops, config_class, fields, added):
    shape = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = config_class(**shape, intermediate_size=6912, head_dim=64, vocab_size=50304, **fields)
    assert flops.cost(config, 2048).added_parameters == added
