# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`AttnResConfig` and the backbone's fields: defaults, sources, refused values, files."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, Qwen3Config

from depthmix import AttnResConfig, AttnResForCausalLM


OWN_FIELDS = {
    "use_qk_norm": False,
    "key_norm_position": "after_rope",
    "attention_output_bias": True,
    "mlp_bias": True,
    "attnres_variant": "cumulative",
    "attnres_routing": "additive",
    "attnres_block_size": 6,
    "attnres_recency_bias": True,
    "attnres_recency_bias_init": 2.5,
    "attnres_scale": "mean",
    "depth_impl": "reference",
    "prefill_chunk_tokens": 512,
    "output_depth_weights": True,
}


def test_defaults():
    config = AttnResConfig(num_hidden_layers=16)
    assert {name: getattr(config, name) for name in OWN_FIELDS} == {
        "use_qk_norm": True,
        "key_norm_position": "before_rope",
        "attention_output_bias": False,
        "mlp_bias": False,
        "attnres_variant": "block",
        "attnres_routing": "replace",
        "attnres_block_size": 4,
        "attnres_recency_bias": False,
        "attnres_recency_bias_init": None,
        "attnres_scale": "mean",
        "depth_impl": "auto",
        "prefill_chunk_tokens": "auto",
        "output_depth_weights": False,
    }
    vanilla = Qwen3Config(num_hidden_layers=16)
    differing = {"model_type", *OWN_FIELDS}
    assert {k: v for k, v in config.to_dict().items() if k not in differing} == {
        k: v for k, v in vanilla.to_dict().items() if k not in differing
    }


@pytest.mark.parametrize(
    ("layers", "variant", "size"),
    [
        (48, "block", 12),
        (27, "block", 7),
        (36, "block", 9),
        (4, "block", 1),
        (1, "block", 1),
        (48, "full", 1),
        (48, "cumulative", 12),
        (36, "cumulative", 10),
        (1, "cumulative", 2),
    ],
)
def test_unset_size_is_that_of_eight_blocks_and_saved(layers, variant, size, tmp_path):
    config = AttnResConfig(num_hidden_layers=layers, attnres_variant=variant)
    assert config.attnres_block_size == size
    assert variant == "full" or config.num_finished_sources[-1] <= 9
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attnres_block_size"] == size


@pytest.mark.parametrize("bias", [True, False])
def test_unset_output_bias_is_that_of_the_other_projections(bias):
    assert AttnResConfig(attention_bias=bias).attention_output_bias is bias
    assert AttnResConfig(attention_bias=bias, attention_output_bias=False).attention_output_bias is False


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({}, 0.0),
        ({"attnres_variant": "cumulative"}, 3.0),
        ({"attnres_variant": "cumulative", "attnres_recency_bias_init": 1}, 1.0),
        ({"attnres_recency_bias_init": 0.5}, 0.5),
    ],
)
def test_start_of_the_recency_bias(fields, start):
    assert AttnResConfig(**fields).recency_bias_start == start


@pytest.mark.parametrize(
    ("layers", "fields", "counts"),
    [
        # the paper's 27 layers in blocks of 6 sub-layers: 9 blocks and the embedding before the last mix
        (27, {"attnres_block_size": 6}, (0, *(n for n in range(1, 10) for _ in range(6)))),
        (2, {"attnres_block_size": 2}, (0, 1, 1, 2, 2)),
        (3, {"attnres_block_size": 4}, (0, 1, 1, 1, 1, 2, 2)),
        # blocks that end inside a layer, and a last one that is short
        (2, {"attnres_block_size": 3}, (0, 1, 1, 1, 2)),
        (2, {"attnres_block_size": 100}, (0, 1, 1, 1, 1)),
        (2, {"attnres_block_size": 1}, (0, 1, 2, 3, 4)),
        (2, {"attnres_variant": "full"}, (0, 1, 2, 3, 4)),
        # the embedding is a source from the start, and the stream after the last layer may be one too
        (4, {"attnres_variant": "cumulative", "attnres_block_size": 4}, (1, 1, 1, 1, 2, 2, 2, 2, 3)),
        (3, {"attnres_variant": "cumulative", "attnres_block_size": 4}, (1, 1, 1, 1, 2, 2, 2)),
        (2, {"attnres_variant": "cumulative", "attnres_block_size": 2}, (1, 1, 2, 2, 3)),
    ],
)
def test_sources(layers, fields, counts):
    assert AttnResConfig(num_hidden_layers=layers, **fields).num_finished_sources == counts


def test_sources_of_the_released_shape():
    counts = AttnResConfig(
        num_hidden_layers=48, attnres_variant="cumulative", attnres_block_size=12
    ).num_finished_sources
    assert (counts[0], counts[11], counts[12], counts[95], counts[96]) == (1, 1, 2, 8, 9)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"attnres_variant": "blocks"}, "'block', 'full', 'cumulative'"),
        ({"attnres_block_size": 0}, "must be a positive number of sub-layers"),
        ({"attnres_block_size": -2}, "must be a positive number of sub-layers"),
        ({"attnres_block_size": "2"}, "expected int"),
        ({"attnres_block_size": 2.0}, "expected int"),
        ({"attnres_block_size": True}, "expected int"),
        ({"attnres_block_size": 2, "attnres_variant": "full"}, "must be 1 or None with attnres_variant='full'"),
        ({"attnres_block_size": 3, "attnres_variant": "cumulative"}, "must be even"),
        ({"attnres_scale": "sum", "attnres_variant": "cumulative"}, "must be 'mean'"),
        ({"attnres_scale": "max"}, "'mean', 'sum'"),
        ({"attnres_recency_bias": 1}, "expected bool"),
        ({"attnres_recency_bias_init": "3"}, "expected float"),
        ({"depth_impl": "cuda"}, "'auto', 'triton', 'reference'"),
        ({"output_depth_weights": "yes"}, "expected bool"),
        ({"use_qk_norm": None}, "expected bool"),
        ({"key_norm_position": "after"}, "'before_rope', 'after_rope'"),
        ({"attention_output_bias": 0}, "bool"),
        ({"mlp_bias": 1}, "expected bool"),
    ],
)
def test_error_names_field_value_and_rule(tiny, fields, rule):
    with pytest.raises(StrictDataclassError) as raised:
        AttnResConfig(**(tiny | fields))
    message = str(raised.value)
    field, value = next(iter(fields.items()))
    assert field in message and str(value) in message and rule in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attnres_block_size": 0}, "attnres_block_size=0"),
        ({"attnres_block_size": 4, "attnres_variant": "full"}, "attnres_block_size=4"),
        ({"attnres_scale": "sum", "attnres_variant": "cumulative", "attnres_block_size": 2}, "attnres_scale='sum'"),
    ],
)
def test_value_that_is_set_later_is_refused_by_save_and_by_the_model(tiny, fields, message, tmp_path):
    config = AttnResConfig(**tiny)
    for field, value in fields.items():
        setattr(config, field, value)
    with pytest.raises(StrictDataclassError, match=message):
        config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        AttnResForCausalLM(config)


@pytest.mark.parametrize("own_fields", [OWN_FIELDS, {}], ids=["set", "defaults"])
def test_round_trip(tiny, own_fields, tmp_path):
    config = AttnResConfig(**tiny, **own_fields)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "attnres"
    assert {name: saved[name] for name in OWN_FIELDS} == {name: getattr(config, name) for name in OWN_FIELDS}
    for loaded in (AttnResConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is AttnResConfig
        assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
        assert loaded.num_finished_sources == config.num_finished_sources


def test_vanilla_file_is_read_as_this_class(tiny, tmp_path):
    vanilla = Qwen3Config(**tiny, use_sliding_window=True, sliding_window=8, max_window_layers=2)
    vanilla.save_pretrained(tmp_path)
    config = AttnResConfig.from_pretrained(tmp_path, attnres_block_size=4)
    assert config.model_type == "attnres" and "model_type" not in vars(config)
    assert config.num_finished_sources == (0, 1, 1, 1, 1, 2, 2, 2, 2)
    expected = vanilla.to_dict()
    assert {k: v for k, v in config.to_dict().items() if k in expected and k != "model_type"} == {
        k: v for k, v in expected.items() if k != "model_type"
    }


def test_plans():
    config = AttnResConfig()
    assert Qwen3Config.base_model_pp_plan and config.base_model_pp_plan is None
    assert config.base_model_tp_plan == Qwen3Config.base_model_tp_plan
    without = AttnResConfig(use_qk_norm=False).base_model_tp_plan
    assert Qwen3Config.base_model_tp_plan.keys() - without.keys() == {
        "layers.*.self_attn.q_norm",
        "layers.*.self_attn.k_norm",
    }
