# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`DenseFormerConfig`, `MHCConfig`, and what all configurations refuse to read."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen3Config

from depthmix import (
    AttnResConfig,
    AttnResForCausalLM,
    DenseFormerConfig,
    DenseFormerForCausalLM,
    DepthQwen3ForCausalLM,
    MHCConfig,
    MHCForCausalLM,
)


OWN_FIELDS = {
    DenseFormerConfig: {"dwa_dilation": 4, "dwa_period": 5},
    MHCConfig: {
        "mhc_num_streams": 3,
        "mhc_sinkhorn_iters": 5,
        "mhc_sinkhorn_order": "rows_first",
        "mhc_alpha_init": 0.5,
    },
}
DEFAULTS = {DenseFormerConfig: [1, 1], MHCConfig: [4, 20, "columns_first", 0.01]}
EACH = pytest.mark.parametrize("config_class", OWN_FIELDS)


@EACH
def test_defaults(config_class):
    config = config_class()
    assert [getattr(config, name) for name in OWN_FIELDS[config_class]] == DEFAULTS[config_class]
    assert config.base_model_pp_plan is None and config.depth_impl == "auto"


@EACH
@pytest.mark.parametrize("given", [True, False])
def test_round_trip(config_class, given, tiny, tmp_path):
    config = config_class(**tiny, **(OWN_FIELDS[config_class] if given else {}))
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == config_class.model_type
    assert all(saved[name] == getattr(config, name) for name in OWN_FIELDS[config_class])
    for loaded in (config_class.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is config_class
        assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()


@pytest.mark.parametrize("config_class", [AttnResConfig, *OWN_FIELDS])
@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_key_value_heads", 3, "must divide num_attention_heads=4"),
        ("num_key_value_heads", 0, "must divide num_attention_heads=4"),
        ("num_hidden_layers", 0, "must be positive"),
        ("hidden_size", -1, "must be positive"),
    ],
)
def test_shapes_of_no_decoder(config_class, field, value, rule, tiny):
    with pytest.raises(StrictDataclassError) as caught:
        config_class(**tiny | {"num_attention_heads": 4, field: value})
    assert f"{field}={value}: {rule}" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("layers", "dilation", "period", "sources"),
    [
        (2, 1, 1, ((0, 1), (0, 1, 2))),
        (4, 2, 1, ((1,), (0, 2), (1, 3), (0, 2, 4))),
        (6, 2, 3, ((), (), (1, 3), (), (), (0, 2, 4, 6))),
        (3, 9, 1, ((1,), (2,), (3,))),
        (2, 1, 9, ((), ())),
    ],
)
def test_sources(layers, dilation, period, sources):
    config = DenseFormerConfig(num_hidden_layers=layers, dwa_dilation=dilation, dwa_period=period)
    assert config.average_sources == sources


REFUSED = [
    (DenseFormerConfig, {"dwa_dilation": 0}, "must be a positive number of layers"),
    (DenseFormerConfig, {"dwa_period": -1}, "must be a positive number of layers"),
    (DenseFormerConfig, {"dwa_period": 1.0}, "expected int"),
    (MHCConfig, {"mhc_num_streams": 1}, "must be at least 2"),
    (MHCConfig, {"mhc_num_streams": "4"}, "expected int"),
    (MHCConfig, {"mhc_sinkhorn_iters": 0}, "must be a positive number of iterations"),
    (MHCConfig, {"mhc_sinkhorn_order": "rows"}, "'columns_first', 'rows_first'"),
    (MHCConfig, {"mhc_alpha_init": "0.1"}, "expected float"),
]


@pytest.mark.parametrize(("config_class", "fields", "rule"), REFUSED)
def test_error_names_field_value_and_rule(config_class, fields, rule, tiny):
    with pytest.raises(StrictDataclassError) as raised:
        config_class(**tiny, **fields)
    ((field, value),) = fields.items()
    assert field in str(raised.value) and str(value) in str(raised.value) and rule in str(raised.value)


@pytest.mark.parametrize(
    ("model_class", "fields"),
    [
        (DenseFormerForCausalLM, {"dwa_dilation": 0}),
        (MHCForCausalLM, {"mhc_num_streams": 1}),
        (MHCForCausalLM, {"mhc_sinkhorn_iters": 0}),
    ],
)
def test_value_that_is_set_later_is_refused_by_save_and_by_the_model(model_class, fields, tiny, tmp_path):
    config = model_class.config_class(**tiny)
    ((field, value),) = fields.items()
    setattr(config, field, value)
    with pytest.raises(StrictDataclassError, match=f"{field}={value}"):
        config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{field}={value}"):
        model_class(config)


@pytest.mark.parametrize(
    "model_class", [AttnResForCausalLM, DenseFormerForCausalLM, DepthQwen3ForCausalLM, MHCForCausalLM]
)
class TestOtherCheckpoints:
    """With the defaults of another backbone a model would invent q/k norms or lose biases."""

    def test_are_refused(self, model_class, tiny, tmp_path):
        LlamaForCausalLM(LlamaConfig(**tiny)).save_pretrained(tmp_path)
        to = model_class.config_class.model_type
        with pytest.raises(ValueError, match=f"model_type='llama': .* depthmix convert SOURCE DEST --to {to}"):
            model_class.from_pretrained(tmp_path)

    @pytest.mark.parametrize("stock_class", [Qwen2Config, LlamaConfig])
    def test_configurations_are_refused(self, model_class, stock_class, tmp_path):
        stock_class().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"model_type='{stock_class.model_type}'"):
            model_class.config_class.from_pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"model_type='{stock_class.model_type}'"):
            model_class.config_class.from_dict(stock_class().to_dict())

    def test_other_families_are_refused(self, model_class, tmp_path):
        other = MHCConfig if model_class is AttnResForCausalLM else AttnResConfig
        other().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"model_type='{other.model_type}'"):
            model_class.config_class.from_pretrained(tmp_path)

    def test_qwen3_is_read(self, model_class, tiny, tmp_path):
        Qwen3Config(**tiny, attention_bias=True).save_pretrained(tmp_path)
        config = model_class.config_class.from_pretrained(tmp_path)
        assert config.model_type == model_class.config_class.model_type and "model_type" not in vars(config)
        assert config.attention_bias and getattr(config, "use_qk_norm", True)
