# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""GPTQ by llm-compressor, which calibrates on calls of the whole model. `make test-calibration` installs it."""

import pytest
import torch
from datasets import Dataset
from family_models import AWAKE_FIELDS, VANILLA_FIELDS, ids_of, new_model, wake
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM
from wide_models import new_wide_vanilla, relative_error, wide

from depthmix.modeling.mixing_modules import MixingModule


WEIGHTS = {"num_bits": 4, "group_size": 32, "symmetric": True, "strategy": "group"}
OPTIONS = {"config_groups": {"all": {"targets": ["Linear"], "weights": WEIGHTS}}, "ignore": ["lm_head"]}


@pytest.fixture
def quantise(tokenizer, tmp_path):
    """`quantise(model)` quantises a copy of it from a folder, which the tool wants, on a batch of 64 rows."""

    def quantise(model, modifier=GPTQModifier, pipeline="basic"):
        model.save_pretrained(tmp_path / "source")
        copy = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype="auto").eval()
        ids = ids_of(64, 64, seed=3)
        rows = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
        oneshot(
            model=copy,
            processor=tokenizer,
            dataset=Dataset.from_dict(rows),
            recipe=[modifier(**OPTIONS)],
            pipeline=pipeline,
            num_calibration_samples=len(ids),
            max_seq_length=ids.shape[1],
        )
        return copy

    return quantise


def test_no_more_harm_than_to_the_vanilla_model(pair, quantise):
    """Retrofits compute what the vanilla model does, and are calibrated on the same data."""
    models = (new_model(pair, **VANILLA_FIELDS[pair.method] | wide(pair)), new_wide_vanilla(pair))
    errors = [relative_error(model, quantise(model)) for model in models]
    assert 1e-3 < errors[1] < 1
    assert errors[0] <= 1.2 * errors[1]


def test_calibration_pays_with_mixing(pair, quantise):
    """Inputs of other than the model's own calls would make worse weights than plain rounding."""
    model = wake(new_model(pair, **AWAKE_FIELDS[pair.method] | wide(pair)))
    errors = [relative_error(model, quantise(model, modifier)) for modifier in (GPTQModifier, QuantizationModifier)]
    assert errors[0] < 0.9 * errors[1]


@torch.no_grad()
def test_saved_and_loaded(pair, quantise, tmp_path):
    """What mixes keeps its dtype and its values, and a saved folder gives the same logits."""
    fields = {"depth_attention": {"depth_gate": True}, "moda": {"moda_gate": True}}.get(pair.method, {})
    model = wake(new_model(pair, **AWAKE_FIELDS[pair.method] | fields | wide(pair)))
    quantised = quantise(model)
    quantised.save_pretrained(tmp_path / "quantised", save_compressed=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", dtype="auto").eval()
    ids = ids_of(2, 48)
    logits = quantised(ids).logits
    assert torch.equal(loaded(ids).logits, logits)
    modules = [name for name, each in model.named_modules() if isinstance(each, MixingModule)]
    assert modules
    for each in (quantised, loaded):
        for name in modules:
            found = dict(each.get_submodule(name).named_parameters())
            for parameter_name, parameter in model.get_submodule(name).named_parameters():
                assert found[parameter_name].dtype is parameter.dtype
                assert torch.equal(found[parameter_name], parameter)
    assert not torch.equal(logits, model(ids).logits)


def test_going_from_layer_to_layer_is_refused(pair, quantise):
    """The tool's default cuts a traced model between its layers. It cannot trace one that mixes them, and stops."""
    with pytest.raises(RuntimeError, match="Autowrapped"):
        quantise(new_model(pair, **AWAKE_FIELDS[pair.method] | wide(pair)), pipeline="sequential")
