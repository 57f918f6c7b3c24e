# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The Auto classes after `import depthmix`: they know its models, and the stock names mean what they meant."""

import importlib
import sys

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import depthmix
import depthmix.auto
import depthmix.hub
from depthmix.auto import AUTO_MAPS, auto_classes, register


AUTO_MODELS = (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification)


@pytest.mark.parametrize("model_type", AUTO_MAPS)
def test_auto_maps(model_type):
    # configuration first and the base model too: servers look for it instead of a head
    assert list(AUTO_MAPS[model_type])[:3] == ["AutoConfig", "AutoModel", "AutoModelForCausalLM"]
    assert model_type not in CONFIG_MAPPING_NAMES
    classes = auto_classes(model_type)
    config_class = classes.pop("AutoConfig")
    assert config_class.model_type == model_type
    assert AutoConfig.for_model(model_type).__class__ is config_class
    for auto_class, model_class in classes.items():
        assert model_class.config_class is config_class
        assert getattr(transformers, auto_class)._model_mapping[config_class] is model_class
        assert model_class.__name__ in dir(depthmix)


def from_config_types(config):
    return [type(auto_class.from_config(config)) for auto_class in AUTO_MODELS]


@pytest.mark.parametrize("stock_name", ["Qwen3", "Olmo2"])
def test_stock_names_keep_their_meaning(family, stock_name, build, tiny, tmp_path):
    tiny |= {"num_hidden_layers": 1}
    stock = getattr(transformers, f"{stock_name}ForCausalLM")(getattr(transformers, f"{stock_name}Config")(**tiny))
    stock.save_pretrained(tmp_path / "stock")
    build().save_pretrained(tmp_path / "ours")
    for _ in range(2):
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")) is family.head
        for flag in ({}, {"trust_remote_code": True}):
            assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "stock", **flag)) is type(stock)
    assert not list((tmp_path / "stock").glob("*.py"))
    assert "auto_map" not in stock.config.to_dict()


def test_registering_again(build, assert_complete, tmp_path):
    config = build().config
    before = from_config_types(config)
    save = type(config).to_json_file
    register()
    for module in (depthmix.hub, depthmix.auto, depthmix):
        assert importlib.reload(module) is sys.modules[module.__name__]
    assert from_config_types(config) == before == list(auto_classes(config.model_type).values())[1:]
    # the hook is not stacked on itself
    assert type(config).to_json_file is save
    build().save_pretrained(tmp_path)
    assert_complete(tmp_path)


@pytest.mark.usefixtures("own_remote_code")
def test_package_and_remote_code_in_one_process(build, token_ids, assert_awake, assert_complete, tmp_path):
    model = build()
    assert_awake(model)
    model.save_pretrained(tmp_path / "saved")
    reference = AUTO_MAPS[model.config.model_type]["AutoModelForCausalLM"]
    remote_class = get_class_from_dynamic_module(reference, tmp_path / "saved")
    assert remote_class is not type(model)
    remote = remote_class.from_pretrained(tmp_path / "saved")
    assert type(remote.config) is not type(model.config)

    ids = token_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(remote(ids).logits, model(ids).logits)
        assert torch.equal(remote.generate(ids, max_new_tokens=5), model.generate(ids, max_new_tokens=5))

    remote_class.register_for_auto_class("AutoModelForCausalLM")
    remote.save_pretrained(tmp_path / "resaved")
    assert_complete(tmp_path / "resaved")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "resaved")) is type(model)
    assert type(AutoModelForCausalLM.from_config(model.config)) is type(model)
