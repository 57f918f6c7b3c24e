# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Names of tensors, there and back."""

from depthmix.conversion import weight_maps
from depthmix.conversion.weight_maps import RELEASED_LLAMA, WeightMap


RENAMING = WeightMap(
    renames=(
        ("model.layers.{layer}.attn_res.query", "model.layers.{layer}.depth_mixer.attention.query"),
        ("model.final.weight", "model.depth_mixer.weight"),
        ("blocks.{rest}", "model.blocks.{rest}"),
    ),
    dropped=("unused.weight", "model.layers.{layer}.unused"),
)


def test_renames_go_both_ways():
    pairs = {
        "model.layers.0.attn_res.query": "model.layers.0.depth_mixer.attention.query",
        "model.layers.17.attn_res.query": "model.layers.17.depth_mixer.attention.query",
        "model.final.weight": "model.depth_mixer.weight",
        "model.norm.weight": "model.norm.weight",
        "blocks.3.mlp.weight": "model.blocks.3.mlp.weight",
        # dots are dots, and a name matches as a whole
        "model.layers.0.attn_resXquery": "model.layers.0.attn_resXquery",
        "model.layers.x.attn_res.query": "model.layers.x.attn_res.query",
        "base.model.final.weight": "base.model.final.weight",
    }
    assert {name: RENAMING.to_target(name) for name in pairs} == pairs
    assert {RENAMING.to_source(target): target for target in pairs.values()} == pairs


def test_dropped_names_have_no_target():
    assert RENAMING.to_target("unused.weight") is RENAMING.to_target("model.layers.12.unused") is None
    assert RENAMING.to_target("unusedXweight") == "unusedXweight"
    assert RELEASED_LLAMA.to_target("lm_head_layernorm.weight") is None


def test_every_map_is_reversible(released_tensors):
    maps = [value for value in vars(weight_maps).values() if isinstance(value, WeightMap)]
    assert len(maps) >= 3
    targets = released_tensors.keys() - {"lm_head_layernorm.weight"}
    assert len(targets) == 47
    for weight_map in maps:
        sources = {target: weight_map.to_source(target) for target in targets}
        assert len(set(sources.values())) == 47
        assert all(weight_map.to_target(source) == target for target, source in sources.items())
