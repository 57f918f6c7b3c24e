# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`MoDAOlmo2Config`: defaults, slots, refused values, files."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, LlamaConfig, Olmo2Config

from depthmix import MoDAOlmo2Config, MoDAOlmo2ForCausalLM


OWN_FIELDS = {
    "moda_attn_slots": True,
    "moda_ffn_slots": False,
    "moda_attn_depth_proj": True,
    "moda_depth_key_mode": "reader_norm",
    "moda_norm_style": "post",
    "moda_depth_window": 5,
    "moda_gate": True,
    "depth_impl": "reference",
    "prefill_chunk_tokens": 512,
}


def test_defaults():
    config = MoDAOlmo2Config()
    assert {name: getattr(config, name) for name in OWN_FIELDS} == {
        "moda_attn_slots": True,
        "moda_ffn_slots": True,
        "moda_attn_depth_proj": False,
        "moda_depth_key_mode": "sequence",
        "moda_norm_style": "olmo2",
        "moda_depth_window": None,
        "moda_gate": False,
        "depth_impl": "auto",
        "prefill_chunk_tokens": "auto",
    }
    differing = {"model_type", *OWN_FIELDS}
    assert {k: v for k, v in config.to_dict().items() if k not in differing} == {
        k: v for k, v in Olmo2Config().to_dict().items() if k not in differing
    }


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({}, ((0, 0), (0, 2), (0, 4), (0, 6))),
        ({"moda_attn_depth_proj": True}, ((0, 0), (0, 2), (0, 4), (0, 6))),
        ({"moda_ffn_slots": False}, ((0, 0), (0, 1), (0, 2), (0, 3))),
        ({"moda_attn_slots": False}, ((0, 0), (0, 1), (0, 2), (0, 3))),
        ({"moda_attn_slots": False, "moda_ffn_slots": False, "moda_depth_window": 1}, ((0, 0),) * 4),
        ({"moda_depth_window": 2}, ((0, 0), (0, 2), (2, 4), (4, 6))),
        ({"moda_depth_window": 3}, ((0, 0), (0, 2), (1, 4), (3, 6))),
        ({"moda_depth_window": 6}, ((0, 0), (0, 2), (0, 4), (0, 6))),
        ({"moda_ffn_slots": False, "moda_depth_window": 1}, ((0, 0), (0, 1), (1, 2), (2, 3))),
    ],
)
def test_slots(fields, slots):
    assert MoDAOlmo2Config(num_hidden_layers=4, **fields).depth_slots == slots


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"moda_attn_slots": 1}, "expected bool"),
        ({"moda_ffn_slots": None}, "expected bool"),
        ({"moda_attn_depth_proj": "yes"}, "expected bool"),
        ({"moda_attn_depth_proj": True, "moda_attn_slots": False}, "must be False with moda_attn_slots=False"),
        ({"moda_depth_key_mode": "raw"}, "'sequence', 'reader_norm'"),
        ({"moda_norm_style": "sandwich"}, "'olmo2', 'pre', 'post'"),
        ({"moda_depth_window": 0}, "must be None or at least 2"),
        ({"moda_depth_window": 1}, "must be None or at least 2"),
        ({"moda_depth_window": 0, "moda_ffn_slots": False}, "must be None or at least 1"),
        ({"moda_depth_window": -1, "moda_ffn_slots": False, "moda_attn_slots": False}, "must be None or at least 1"),
        ({"moda_depth_window": 2.0}, "expected int"),
        ({"depth_impl": "cuda"}, "'auto', 'triton', 'reference'"),
        ({"num_key_value_heads": 3}, "must divide num_attention_heads=4"),
        ({"attention_dropout": 0.1}, "must be 0 with depth slots"),
        ({"sliding_window": 8}, "must not be set, since OLMo2 attends to all earlier tokens"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "must not be set"),
    ],
)
def test_error_names_field_value_and_rule(tiny, fields, rule):
    with pytest.raises(StrictDataclassError) as raised:
        MoDAOlmo2Config(**(tiny | fields))
    message = str(raised.value)
    field, value = next(iter(fields.items()))
    values = value if isinstance(value, list) else [value]
    assert field in message and all(str(value) in message for value in values) and rule in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moda_depth_window": 1}, "moda_depth_window=1"),
        ({"moda_attn_depth_proj": True, "moda_attn_slots": False}, "moda_attn_depth_proj=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ],
)
def test_value_that_is_set_later_is_refused_by_save_and_by_the_model(tiny, fields, message, tmp_path):
    config = MoDAOlmo2Config(**tiny)
    for field, value in fields.items():
        setattr(config, field, value)
    with pytest.raises(StrictDataclassError, match=message):
        config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        MoDAOlmo2ForCausalLM(config)


@pytest.mark.parametrize("own_fields", [OWN_FIELDS, {}], ids=["set", "defaults"])
def test_round_trip(tiny, own_fields, tmp_path):
    config = MoDAOlmo2Config(**tiny, **own_fields)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "moda_olmo2"
    assert {name: saved[name] for name in OWN_FIELDS} == {name: getattr(config, name) for name in OWN_FIELDS}
    assert not {"base_model_tp_plan", "depth_slots"} & saved.keys()
    for loaded in (MoDAOlmo2Config.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is MoDAOlmo2Config
        assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
        assert loaded.depth_slots == config.depth_slots


def test_vanilla_file_is_read_as_this_class(tiny, tmp_path):
    vanilla = Olmo2Config(**tiny)
    vanilla.save_pretrained(tmp_path)
    config = MoDAOlmo2Config.from_pretrained(tmp_path, moda_ffn_slots=False)
    assert config.model_type == "moda_olmo2" and "model_type" not in vars(config)
    assert config.depth_slots == ((0, 0), (0, 1), (0, 2), (0, 3))
    expected = vanilla.to_dict()
    assert {k: v for k, v in config.to_dict().items() if k in expected and k != "model_type"} == {
        k: v for k, v in expected.items() if k != "model_type"
    }


def test_other_backbones_are_refused():
    with pytest.raises(ValueError, match="model_type='llama'.* of its own and of Olmo2.*--to moda_olmo2"):
        MoDAOlmo2Config.from_dict(LlamaConfig().to_dict())


def test_plans():
    assert Olmo2Config.base_model_pp_plan and MoDAOlmo2Config().base_model_pp_plan is None
    for fields, added in (
        ({}, {"mlp_depth_kv_proj"}),
        ({"moda_attn_depth_proj": True, "moda_ffn_slots": False}, {"attn_depth_kv_proj"}),
        ({"moda_attn_slots": False, "moda_ffn_slots": False}, set()),
    ):
        plan = MoDAOlmo2Config(**fields).base_model_tp_plan
        assert {name.split(".")[-1] for name in plan.keys() - Olmo2Config.base_model_tp_plan.keys()} == added
        assert plan | Olmo2Config.base_model_tp_plan == plan
