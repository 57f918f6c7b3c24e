# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Names of tensors, there and back."""

from depthmix.conversion import weight_maps
from depthmix.conversion.weight_maps import RELEASED_LLAMA_TO_DEPTH_QWEN3, WeightMap


RENAMING = WeightMap(
    renames=(
        ("model.layers.{layer}.attn_res.query", "model.layers.{layer}.depth_mixer.attention.query"),
        ("model.final.weight", "model.depth_mixer.weight"),
    ),
    dropped=("unused.weight",),
)


def test_renames_go_both_ways():
    pairs = {
        "model.layers.0.attn_res.query": "model.layers.0.depth_mixer.attention.query",
        "model.layers.17.attn_res.query": "model.layers.17.depth_mixer.attention.query",
        "model.final.weight": "model.depth_mixer.weight",
        "model.norm.weight": "model.norm.weight",
        # dots are dots, and a name matches as a whole
        "model.layers.0.attn_resXquery": "model.layers.0.attn_resXquery",
        "model.layers.x.attn_res.query": "model.layers.x.attn_res.query",
        "base.model.final.weight": "base.model.final.weight",
    }
    assert {name: RENAMING.to_target(name) for name in pairs} == pairs
    assert {RENAMING.to_source(target): target for target in pairs.values()} == pairs


def test_dropped_names_have_no_target():
    assert RENAMING.to_target("unused.weight") is None
    assert RELEASED_LLAMA_TO_DEPTH_QWEN3.to_target("lm_head_layernorm.weight") is None


def test_every_map_is_reversible(released_tensors):
    maps = [value for value in vars(weight_maps).values() if isinstance(value, WeightMap)]
    assert len(maps) >= 2
    for weight_map in maps:
        kept = {name: weight_map.to_target(name) for name in released_tensors}
        kept = {name: target for name, target in kept.items() if target is not None}
        assert len(set(kept.values())) == len(kept) >= 47
        assert all(weight_map.to_source(target) == name for name, target in kept.items())
