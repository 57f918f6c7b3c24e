# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Fields of other methods, fields that decide what tensors there are, and values without effect."""

import copy
import logging
from dataclasses import fields

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import depthmix
from depthmix.families import FAMILIES


SIZES = {
    **{"vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": None},
    **{"bos_token_id": None, "eos_token_id": None},
}
# a value of each field that differs from its default
OTHER_VALUES = {
    **{"depth_stride": 3, "depth_window": 1, "num_loops": 2, "key_norm_position": "after_rope", "depth_gate": True},
    **{"use_qk_norm": False, "attention_output_bias": True, "output_depth_weights": True},
    **{"attnres_variant": "full", "attnres_block_size": 3, "attnres_recency_bias": True, "attnres_scale": "sum"},
    **{"attnres_recency_bias_init": 2.0, "dwa_dilation": 2, "dwa_period": 2, "mhc_num_streams": 2},
    **{"mhc_sinkhorn_iters": 3, "mhc_sinkhorn_order": "rows_first", "mhc_alpha_init": 0.5},
    **{"moda_attn_slots": False, "moda_ffn_slots": False, "moda_attn_depth_proj": True, "moda_depth_window": 3},
    **{
        "moda_depth_key_mode": "reader_norm",
        "moda_norm_style": "pre",
        "moda_gate": True,
        "attnres_routing": "additive",
    },
    **{"value_residual_init": "identity", "value_residual_learnable": False},
}
# one family for each method, and one without the fields of the dense decoder
SOME = ["depth_qwen3", "attnres", "denseformer", "mhc", "moda_olmo2", "value_residual_qwen3", "attnres_olmo2"]
# which belong to one method only
DENSE_FIELDS = ("use_qk_norm", "attention_output_bias", "key_norm_position")


@pytest.fixture(autouse=True)
def seen_by_caplog(monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("depthmix"), "propagate", True)
    # warnings that are given once
    logging.Logger.warning_once.cache_clear()


def config_class(model_type):
    return FAMILIES[model_type].find_class("Config")


def build(model_type, **given):
    torch.manual_seed(0)
    return FAMILIES[model_type].find_class("ForCausalLM")(config_class(model_type)(**SIZES, **given))


def foreign_fields(model_type):
    return [name for name in OTHER_VALUES if name not in config_class(model_type).__dataclass_fields__]


def own_fields(model_type):
    return [name for name in OTHER_VALUES if name in config_class(model_type).__dataclass_fields__]


def test_every_field_is_known():
    for model_type, family in FAMILIES.items():
        stock = {field.name for field in fields(family.backbone.stock_config_class())}
        own = {field.name for field in fields(config_class(model_type))} - stock
        assert own - {"depth_impl", "prefill_chunk_tokens"} <= OTHER_VALUES.keys(), model_type


@pytest.mark.parametrize("model_type", SOME)
def test_a_field_of_another_method_is_refused(model_type, tmp_path):
    made = config_class(model_type)
    config = made(**SIZES)
    build(model_type).save_pretrained(tmp_path)
    assert len(foreign_fields(model_type)) > 10
    for name in foreign_fields(model_type):
        value = OTHER_VALUES[name]
        message = f"^{name}={value!r}: {made.__name__} has no such field, which belongs to .* Its own are .*depth_impl"
        with pytest.raises(ValueError, match=message):
            made(**SIZES, **{name: value})
        with pytest.raises(ValueError, match=message):
            setattr(config, name, value)
        for load in (AutoModelForCausalLM, AutoConfig, FAMILIES[model_type].find_class("ForCausalLM")):
            with pytest.raises(ValueError, match=message):
                load.from_pretrained(tmp_path, **{name: value})


def test_a_field_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"attnres_blocksize=2: AttnResConfig has no such field\. Its own are use_qk"):
        depthmix.AttnResConfig(attnres_blocksize=2)


def tensors(model):
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("model_type", SOME)
def test_fields_that_decide_on_tensors(model_type):
    """Those that are listed are those that do."""
    made, before = config_class(model_type), tensors(build(model_type))
    listed = {*made.shape_fields, *getattr(made, "decoder_shape_fields", ())}
    for name in own_fields(model_type):
        if (model_type, name) != ("moda_olmo2", "moda_attn_slots"):
            assert (tensors(build(model_type, **{name: OTHER_VALUES[name]})) != before) == (name in listed), name


@pytest.mark.parametrize("model_type", SOME)
def test_an_override_with_other_tensors_is_refused(model_type, tmp_path, monkeypatch):
    made = config_class(model_type)
    build(model_type).save_pretrained(tmp_path)
    listed = [*made.shape_fields, *(("use_qk_norm",) if "use_qk_norm" in made.__dataclass_fields__ else ())]
    for name in listed:
        value, before = OTHER_VALUES[name], getattr(made(**SIZES), name)
        message = f"^{name}={value!r}: must be {before!r}, with which .* was saved"
        head = FAMILIES[model_type].find_class("ForCausalLM")
        changed = AutoConfig.from_pretrained(tmp_path, **{name: value})
        for load in (AutoModelForCausalLM, head):
            with pytest.raises(ValueError, match=message):
                load.from_pretrained(tmp_path, **{name: value})
            with pytest.raises(ValueError, match=message):
                load.from_pretrained(tmp_path, config=changed)
            # the value that it has
            load.from_pretrained(tmp_path, **{name: before})
        # a new model of that shape
        assert getattr(AutoModelForCausalLM.from_config(changed).config, name) == value


@pytest.mark.parametrize(("model_type", "field"), [("depth_qwen3", "depth_gate"), ("moda_olmo2", "moda_gate")])
def test_gates_are_not_lost(model_type, field, tmp_path):
    """By another number of sources, or by a configuration that was changed after building and then saved."""
    model = build(model_type, **{field: True})
    model.save_pretrained(tmp_path / "gated")
    if field == "depth_gate":
        with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.depth_gate\.weight, of 3 gates"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "gated", depth_stride=0)
    setattr(model.config, field, False)
    model.save_pretrained(tmp_path / "changed")
    with pytest.raises(ValueError, match="gates that a model with this configuration does not have"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "changed")
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "gated", output_loading_info=True)
    assert not any(found.values())


def test_a_vanilla_checkpoint_has_no_tensors_of_the_method_yet(tmp_path):
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(tmp_path)
    model = depthmix.MHCForCausalLM.from_pretrained(tmp_path, mhc_num_streams=3)
    assert model.config.mhc_num_streams == 3
    with pytest.raises(ValueError, match="use_qk_norm=False: must be True, with which"):
        depthmix.MHCForCausalLM.from_pretrained(tmp_path, use_qk_norm=False)


@pytest.mark.parametrize(
    ("model_type", "given", "remark"),
    [
        ("depth_qwen3", {"depth_stride": 99}, "depth_stride=99: with 4 layers the first is the only source"),
        ("depth_qwen3", {"depth_stride": 0, "depth_window": 2}, "depth_window=2 has no effect"),
        ("attnres", {"attnres_block_size": 100}, "attnres_block_size=100: no block is ever finished in 4 layers"),
        ("attnres", {"attnres_recency_bias_init": 1.0}, "attnres_recency_bias_init=1.0 has no effect"),
        ("mhc", {"mhc_alpha_init": 0}, "mhc_alpha_init=0: in a new model neither"),
        ("denseformer", {"dwa_dilation": 50}, "dwa_dilation=50: with 4 layers no average reads anything but its own"),
        ("denseformer", {"dwa_period": 50}, "dwa_period=50: none of 4 layers has an average"),
        (
            "moda_olmo2",
            {"moda_attn_slots": False, "moda_ffn_slots": False, "moda_depth_window": 5},
            "moda_depth_window=5 has no effect",
        ),
    ],
)
def test_values_without_effect(model_type, given, remark, caplog):
    build(model_type)
    assert caplog.text == ""
    build(model_type, **given)
    assert remark in caplog.text


def test_a_value_without_effect_is_warned_of_once(caplog, tmp_path):
    build("depth_qwen3").save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, depth_stride=99)
    assert caplog.text.count("depth_stride=99") == 1
    # the same model again
    AutoModelForCausalLM.from_pretrained(tmp_path, depth_stride=99)
    assert caplog.text.count("depth_stride=99") == 1
    # without effect for two reasons
    build("attnres").save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, attnres_recency_bias_init=2.0)
    assert caplog.text.count("attnres_recency_bias_init=2.0") == 1


def awake(model_type, **given):
    model = build(model_type, **given).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


IDS = torch.arange(3, 15)[None]


@pytest.mark.parametrize("model_type", SOME)
def test_every_field_acts_on_a_checkpoint_or_is_warned_of(model_type, tmp_path, caplog):
    blocks = {"attnres_recency_bias": True, "attnres_block_size": 4}
    given = blocks if model_type.startswith("attnres") else {}
    model = awake(model_type, **given)
    model.save_pretrained(tmp_path)
    made = config_class(model_type)
    with torch.no_grad():
        before = model(IDS).logits
        for name in own_fields(model_type):
            if name in ("output_depth_weights", *made.shape_fields, *getattr(made, "decoder_shape_fields", ())):
                continue
            caplog.clear()
            try:
                after = AutoModelForCausalLM.from_pretrained(tmp_path, **{name: OTHER_VALUES[name]})(IDS).logits
            except ValueError as error:
                assert name in str(error)
                continue
            said = f"{name}={OTHER_VALUES[name]!r} has no effect: a new model starts with it" in caplog.text
            assert said == (name in made.start_fields), name
            # whether weights are trained is seen in training
            if name != "value_residual_learnable":
                assert torch.equal(before, after) == said, name


def test_a_start_that_comes_too_late(tmp_path, caplog):
    build("mhc").save_pretrained(tmp_path / "ours")
    changed = AutoConfig.from_pretrained(tmp_path / "ours", mhc_alpha_init=0.5)
    said = "mhc_alpha_init=0.5 has no effect: a new model starts with it, and "
    for given in ({"mhc_alpha_init": 0.5}, {"config": changed}):
        caplog.clear()
        AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **given)
        assert caplog.text.count(said) == 1
    caplog.clear()
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours", mhc_alpha_init=0.01)
    # where it is in time
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(tmp_path / "vanilla")
    model = depthmix.MHCForCausalLM.from_pretrained(tmp_path / "vanilla", mhc_alpha_init=0.5)
    assert model.model.layers[1].mlp_connection.alpha_pre.item() == 0.5
    AutoModelForCausalLM.from_config(changed)
    assert "mhc_alpha_init" not in caplog.text


GATED = [("depth_qwen3", {"depth_gate": True}), ("moda_olmo2", {"moda_gate": True})]


@pytest.mark.parametrize(("model_type", "given"), [*((each, {}) for each in SOME), *GATED])
@torch.no_grad()
def test_last_layers_can_be_cut_off(model_type, given, tmp_path):
    """The others mix as before: the model is that which leaves early."""
    model = awake(model_type, **given)
    model.save_pretrained(tmp_path)
    shorter = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=2)
    assert len(shorter.model.layers) == 2
    model.config.num_hidden_layers = 2
    assert torch.equal(shorter(IDS).logits, model(IDS).logits)


def test_layers_that_cannot_be_cut_off_or_added(tmp_path):
    build("depth_qwen3", num_loops=2).save_pretrained(tmp_path / "looped")
    with pytest.raises(ValueError, match=r"^num_hidden_layers=2: must be 4, .* looped model \(num_loops=2\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "looped", num_hidden_layers=2)
    config = config_class("depth_qwen3")(**SIZES, num_loops=2)
    config.num_hidden_layers, config.layer_types = 2, ["full_attention", "full_attention", "sliding_attention"]
    assert config.get_text_config(decoder=True).layer_types == ["full_attention"] * 4
    build("attnres").save_pretrained(tmp_path / "more")
    with pytest.raises(ValueError, match="^layer_types has 4 entries: must have one for each of 6 layers"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "more", num_hidden_layers=6)


@pytest.mark.skipif("attnres_kimi_linear" not in FAMILIES, reason="this version of transformers has no Kimi Linear")
def test_layers_of_kimi_linear_that_cannot_be_cut_off(tmp_path):
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"} | {"num_key_value_heads": 2}
    config = depthmix.AttnResKimiLinearConfig(**sizes, layer_types=["linear_attention", "full_attention"] * 2)
    config.num_hidden_layers = 1
    with pytest.raises(ValueError, match="layer_types has 'linear_attention' only"):
        config.validate_depth_mixing()


@pytest.mark.skipif("attnres_kimi_linear" not in FAMILIES, reason="this version of transformers has no Kimi Linear")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has 'linear_attention' only: must have 'full_attent"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim=0: must be positive"),
        ({"model_max_length": 0}, "model_max_length=0: must be positive"),
    ],
)
def test_fields_of_kimi_linear_have_their_own_names(given, message):
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    with pytest.raises(StrictDataclassError, match=message):
        depthmix.AttnResKimiLinearConfig(**sizes, **given)


@pytest.mark.parametrize("model_type", SOME)
def test_a_change_after_building(model_type, caplog):
    model = build(model_type)
    copied, free = copy.deepcopy(model.config), config_class(model_type)(**SIZES)
    for name in own_fields(model_type):
        setattr(model.config, name, getattr(model.config, name))
        setattr(copied, name, OTHER_VALUES[name])
        setattr(free, name, OTHER_VALUES[name])
    assert caplog.text == ""
    for name in own_fields(model_type):
        setattr(model.config, name, OTHER_VALUES[name])
        said = f"{name}={OTHER_VALUES[name]!r} has no effect on the model" in caplog.text
        assert said == (name != "output_depth_weights"), name
