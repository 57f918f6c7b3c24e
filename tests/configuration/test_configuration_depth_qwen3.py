# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`DepthQwen3Config`: defaults, source layers, refused values, files."""

import json
import subprocess
import sys

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, Qwen3Config

from depthmix import DepthQwen3Config, DepthQwen3ForCausalLM
from depthmix.configuration import configuration_depth_attention


OWN_FIELDS = {
    "depth_stride": 3,
    "depth_window": 2,
    "key_norm_position": "after_rope",
    "num_loops": 1,
    "depth_gate": True,
    "depth_impl": "reference",
    "output_depth_weights": True,
}


def test_defaults():
    config = DepthQwen3Config(num_hidden_layers=6)
    own = {name: getattr(config, name) for name in OWN_FIELDS}
    assert own == {
        "depth_stride": 3,
        "depth_window": 0,
        "key_norm_position": "before_rope",
        "num_loops": 1,
        "depth_gate": False,
        "depth_impl": "auto",
        "output_depth_weights": False,
    }
    vanilla = Qwen3Config(num_hidden_layers=6)
    differing = {"model_type", *OWN_FIELDS}
    assert {k: v for k, v in config.to_dict().items() if k not in differing} == {
        k: v for k, v in vanilla.to_dict().items() if k not in differing
    }


@pytest.mark.parametrize(("layers", "stride"), [(1, 1), (2, 1), (3, 1), (5, 2), (36, 18)])
def test_unset_stride_is_half_of_the_layers_and_saved(layers, stride, tmp_path):
    config = DepthQwen3Config(num_hidden_layers=layers)
    assert config.depth_stride == stride
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["depth_stride"] == stride


def spans(*spans):
    """`(last layer, sources)` pairs, spelled out layer by layer."""
    table = []
    for last, sources in spans:
        table += [sources] * (last + 1 - len(table))
    return tuple(table)


@pytest.mark.parametrize(
    ("layers", "fields", "sources"),
    [
        (48, {"depth_stride": 24}, spans((0, ()), (24, (0,)), (47, (0, 24)))),
        (48, {}, spans((0, ()), (24, (0,)), (47, (0, 24)))),
        (32, {"depth_stride": 16}, spans((0, ()), (16, (0,)), (31, (0, 16)))),
        (4, {"depth_stride": 2}, ((), (0,), (0,), (0, 2))),
        (4, {"depth_stride": 1}, ((), (0,), (0, 1), (0, 1, 2))),
        (7, {"depth_stride": 3}, ((), (0,), (0,), (0,), (0, 3), (0, 3), (0, 3))),
        # a stride as long as the model, or longer, leaves the first layer
        (4, {"depth_stride": 4}, ((), (0,), (0,), (0,))),
        (4, {"depth_stride": 100}, ((), (0,), (0,), (0,))),
        # the window is counted from the reading layer, and what is in both is one source
        (6, {"depth_stride": 4, "depth_window": 1}, ((), (0,), (0, 1), (0, 2), (0, 3), (0, 4))),
        (6, {"depth_stride": 3, "depth_window": 2}, ((), (0,), (0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4))),
        (4, {"depth_stride": 4, "depth_window": 9}, ((), (0,), (0, 1), (0, 1, 2))),
        (4, {"depth_stride": 1, "depth_window": 2}, ((), (0,), (0, 1), (0, 1, 2))),
        (4, {"depth_stride": 0}, ((), (), (), ())),
        (4, {"depth_stride": 0, "depth_window": 2}, ((), (), (), ())),
        (1, {}, ((),)),
    ],
)
def test_sources(layers, fields, sources):
    assert DepthQwen3Config(num_hidden_layers=layers, **fields).depth_sources == sources


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("depth_stride", -1, "positive number of layers, 0 for no mixing, or None"),
        ("depth_stride", "2", "expected int"),
        ("depth_stride", 2.0, "expected int"),
        ("depth_stride", True, "expected int"),
        ("depth_window", -1, "at least 0"),
        ("depth_window", None, "expected int"),
        ("depth_window", "1", "expected int"),
        ("depth_window", 1.5, "expected int"),
        ("depth_window", True, "expected int"),
        ("key_norm_position", "after", "'before_rope', 'after_rope'"),
        ("key_norm_position", None, "'before_rope', 'after_rope'"),
        ("num_loops", 0, "must be a positive number of passes"),
        ("num_loops", "1", "expected int"),
        ("depth_impl", "cuda", "'auto', 'triton', 'reference'"),
        ("depth_impl", None, "'auto', 'triton', 'reference'"),
        ("output_depth_weights", "yes", "expected bool"),
        ("output_depth_weights", 1, "expected bool"),
        ("num_key_value_heads", 3, "must divide num_attention_heads=4"),
        ("num_key_value_heads", 0, "must divide num_attention_heads=4"),
        ("num_key_value_heads", -2, "must divide num_attention_heads=4"),
    ],
)
def test_error_names_field_value_and_rule(tiny, field, value, rule):
    with pytest.raises(StrictDataclassError) as raised:
        DepthQwen3Config(**(tiny | {field: value}))
    message = str(raised.value)
    assert field in message and str(value) in message and rule in message


@pytest.mark.parametrize(("field", "value"), [("depth_stride", -1), ("depth_window", -2), ("num_loops", 0)])
def test_value_that_is_set_later_is_refused_by_save_and_by_the_model(tiny, field, value, tmp_path):
    config = DepthQwen3Config(**tiny)
    setattr(config, field, value)
    with pytest.raises(StrictDataclassError, match=f"{field}={value}"):
        config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{field}={value}"):
        DepthQwen3ForCausalLM(config)


@pytest.mark.parametrize("field", ["key_norm_position", "depth_impl"])
def test_name_that_is_set_later_is_refused_at_once(tiny, field):
    config = DepthQwen3Config(**tiny)
    with pytest.raises(StrictDataclassError, match=field):
        setattr(config, field, "other")


@pytest.mark.parametrize("own_fields", [OWN_FIELDS, {}], ids=["set", "defaults"])
def test_round_trip(tiny, own_fields, tmp_path):
    config = DepthQwen3Config(**tiny, **own_fields)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "depth_qwen3"
    assert {name: saved[name] for name in OWN_FIELDS} == {name: getattr(config, name) for name in OWN_FIELDS}
    for loaded in (DepthQwen3Config.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is DepthQwen3Config
        assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
        assert loaded.depth_sources == config.depth_sources


def test_vanilla_file_is_read_as_this_class(tiny, tmp_path):
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    vanilla = Qwen3Config(**tiny, **sliding, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    vanilla.save_pretrained(tmp_path)
    config = DepthQwen3Config.from_pretrained(tmp_path)
    assert config.model_type == "depth_qwen3"
    assert "model_type" not in vars(config)
    assert config.depth_stride == 2
    expected = vanilla.to_dict()
    assert {k: v for k, v in config.to_dict().items() if k in expected and k != "model_type"} == {
        k: v for k, v in expected.items() if k != "model_type"
    }


@pytest.mark.parametrize(("given", "stride"), [(1, 1), (0, 0), (3, 3), (None, 2)])
def test_stride_as_an_argument_of_loading(tiny, given, stride, tmp_path):
    """`from_pretrained` sets such fields after the construction."""
    Qwen3Config(**tiny).save_pretrained(tmp_path)
    config = DepthQwen3Config.from_pretrained(tmp_path, depth_stride=given)
    assert config.depth_sources == DepthQwen3Config(**tiny, depth_stride=stride).depth_sources
    config.save_pretrained(tmp_path)
    assert DepthQwen3Config.from_pretrained(tmp_path).depth_stride == stride


def test_wrong_stride_as_an_argument_of_loading(tiny, tmp_path):
    Qwen3Config(**tiny).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="depth_stride=-1: must be a positive number"):
        DepthQwen3ForCausalLM(DepthQwen3Config.from_pretrained(tmp_path, depth_stride=-1))
    with pytest.raises(StrictDataclassError, match="depth_stride"):
        DepthQwen3Config.from_pretrained(tmp_path, depth_stride="1")


def test_pipeline_plan_is_not_inherited():
    assert Qwen3Config.base_model_pp_plan
    assert DepthQwen3Config.base_model_pp_plan is None
    assert DepthQwen3Config.base_model_tp_plan == Qwen3Config.base_model_tp_plan


WITHOUT_TORCH = """
import importlib, os, sys, types
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.split(".")[0] == "torch" else find_spec(name, *rest)

package = sys.modules["saved"] = types.ModuleType("saved")
package.__path__ = [os.path.dirname(sys.argv[1])]
module = importlib.import_module("saved.configuration_depth_attention")
config = module.DepthQwen3Config(num_hidden_layers=4)
config.save_pretrained(sys.argv[2])
assert module.DepthQwen3Config.from_pretrained(sys.argv[2]).to_dict() == config.to_dict()
assert "torch" not in sys.modules
print(config.depth_sources)
"""


def test_file_works_without_torch(tmp_path):
    """As it is loaded from a saved model; the package itself imports the models, which need torch."""
    path = configuration_depth_attention.__file__
    command = [sys.executable, "-c", WITHOUT_TORCH, path, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "((), (0,), (0,), (0, 2))"
