# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Other people's repositories whose model type is the name of one of ours, after `import depthmix`."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from depthmix.auto import AUTO_MAPS, auto_classes, register
from depthmix.conversion import inspect_checkpoint
from depthmix.conversion.cli import main


CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel


class {config}(PreTrainedConfig):
    model_type = "{model_type}"
    hidden_size = 4


class ForeignModel(PreTrainedModel):
    config_class = {config}

    def __init__(self, config):
        super().__init__(config)
        self.theirs = torch.nn.Linear(4, 4, bias=False)
        self.post_init()
"""


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """`foreign(model_type, module)` writes such a repository, whose configuration's code is in that module."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))

    def foreign(model_type, module="modeling_foreign", config="ForeignConfig", *, with_config=True):
        folder = tmp_path / "foreign"
        folder.mkdir()
        (folder / f"{module}.py").write_text(CODE.format(config=config, model_type=model_type))
        auto_map = {"AutoModel": f"{module}.ForeignModel", "AutoModelForCausalLM": f"{module}.ForeignModel"}
        if with_config:
            auto_map = {"AutoConfig": f"{module}.{config}"} | auto_map
        content = {"model_type": model_type, "auto_map": auto_map, "hidden_size": 4, "architectures": ["ForeignModel"]}
        (folder / "config.json").write_text(json.dumps(content))
        save_file({"theirs.weight": torch.eye(4)}, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return foreign


@pytest.mark.parametrize("model_type", AUTO_MAPS)
def test_they_are_refused_and_the_message_says_how_to_load_them(model_type, foreign):
    folder = foreign(model_type)
    for auto_class in (AutoConfig, AutoModel, AutoModelForCausalLM):
        for flag in ({}, {"trust_remote_code": True}):
            with pytest.raises(ValueError, match="does not load it. Load it in a process that does not") as refusal:
                auto_class.from_pretrained(folder, **flag)
            assert "modeling_foreign.ForeignConfig" in str(refusal.value)
    # as the message says
    model_class = get_class_from_dynamic_module("modeling_foreign.ForeignModel", str(folder))
    assert torch.equal(model_class.from_pretrained(folder).theirs.weight, torch.eye(4))


@pytest.mark.parametrize("model_type", AUTO_MAPS)
@pytest.mark.parametrize("case", ["equal names", "no configuration", "on the Hub"])
def test_siblings(model_type, case, foreign, edit_json):
    module, config = AUTO_MAPS[model_type]["AutoConfig"].split(".")
    if case == "equal names":
        folder = foreign(model_type, module, config)
    else:
        folder = foreign(model_type, with_config=case != "no configuration")
    if case == "on the Hub":
        edit_json(folder / "config.json", auto_map={"AutoConfig": "acme/repo--modeling_foreign.ForeignConfig"})
    with pytest.raises(ValueError, match="this is another model"):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture
def edit_json():
    def edit_json(path, **fields):
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit_json


def test_bundle_adds_nothing_to_them(foreign):
    folder = foreign("mhc")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SystemExit) as end:
        main(["bundle", str(folder)])
    assert "this is another model" in end.value.code
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_their_tokenizer_is_theirs(foreign):
    folder = foreign("mhc")
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["modeling_foreign.Slow", null]}}')
    (folder / "modeling_foreign.py").write_text("class Slow:\n    pass\n")
    with pytest.raises(AttributeError, match="register_for_auto_class"):
        AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@pytest.mark.two_families
def test_no_tensor_of_ours_is_an_error(family, build, tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    classes = auto_classes(model.config.model_type)
    head, base, classifier = family.head, classes["AutoModel"], family.classifier
    for loaded in (base, classifier, head):
        assert isinstance(loaded.from_pretrained(tmp_path), loaded)
    _, info = head.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    # a part is missing, as in a checkpoint of the base model
    base.from_pretrained(tmp_path).save_pretrained(tmp_path / "base")
    head.from_pretrained(tmp_path / "base")

    save_file({"theirs\x1b[2J": torch.eye(4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for loaded in (base, classifier, head):
        with pytest.raises(ValueError, match="It is the checkpoint of another model") as refusal:
            loaded.from_pretrained(tmp_path)
        assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("model_type", "extra", "reason"),
    [
        ("mhc", "model.layers.0.their_mixing", "layers.0.attn_connection.norm_weight, of"),
        ("denseformer", "dwa.alphas", "depth_average.weight, of 2"),
        # a method without tensors of its own
        ("depth_qwen3", "model.layers.1.extra.weight", "no depth_impl, which DepthQwen3Config is saved with"),
    ],
)
def test_models_with_some_of_our_tensors(model_type, extra, reason, tmp_path, edit_json):
    """Without `auto_map`, as those of a package that is to be imported. Most names of tensors are those of a Llama."""
    sizes = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "mlp_bias": False}
    vanilla = Qwen3Config(**sizes)
    AutoModelForCausalLM.from_config(vanilla).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    # what a vanilla checkpoint has too much is the host library's business
    edit_json(tmp_path / "config.json", model_type=model_type, architectures=["TheirModel"])
    classes = auto_classes(model_type)
    model = classes["AutoModelForCausalLM"].from_pretrained(tmp_path)
    save_file(load_file(path) | {extra: torch.ones(2)}, path, metadata={"format": "pt"})
    for loaded in (AutoModelForCausalLM, AutoModel, classes["AutoModelForSequenceClassification"]):
        with pytest.raises(ValueError, match="It is the checkpoint of another model") as refusal:
            loaded.from_pretrained(tmp_path)
        assert reason in str(refusal.value)
    for command in (["bundle"], ["verify"]):
        with pytest.raises(SystemExit) as end:
            main([*command, str(tmp_path)])
        assert "no depth_impl, which these are saved with: this is another model" in end.value.code
    description = inspect_checkpoint(tmp_path)
    assert description.layout == "unknown" and "without depth_impl" in description.evidence[0]

    # ours, with something beside it
    model.save_pretrained(tmp_path)
    save_file(load_file(path) | {extra: torch.ones(2)}, path, metadata={"format": "pt"})
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_what_is_ours_or_a_users_loads(tmp_path):
    config_class = auto_classes("mhc")["AutoConfig"]
    for auto_map in (
        {},
        AUTO_MAPS["mhc"],
        {name: f"acme/copy--{reference}" for name, reference in AUTO_MAPS["mhc"].items()},
        AUTO_MAPS["mhc"] | {"AutoModelForCausalLM": "my_model.MyModel"},
    ):
        content = config_class().to_dict() | {"auto_map": auto_map}
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert type(AutoConfig.from_pretrained(tmp_path)) is config_class


def test_a_type_that_another_package_has_registered(caplog):
    class Theirs(Qwen3Config):
        model_type = "mhc"

    ours = auto_classes("mhc")["AutoConfig"]
    AutoConfig.register("mhc", Theirs, exist_ok=True)
    with caplog.at_level(logging.WARNING):
        register()
    assert "The model type 'mhc' was that of" in caplog.text and "Theirs" in caplog.text
    assert type(AutoConfig.for_model("mhc")) is ours
    caplog.clear()
    register()
    assert not caplog.records
