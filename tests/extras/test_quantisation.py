# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Weight-only quantisation by the packages that transformers can call on a CPU.

What mixes layers stays as it is. That quantisation does no more harm than to the vanilla model is judged on retrofits,
which compute the same function; the mixing of a random awake model changes how much any rounding matters.
"""

import pytest
import torch
from family_models import AWAKE_FIELDS, CACHE_NAME, VANILLA_FIELDS, ids_of, new_model, wake
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    HqqConfig,
    QuantizedCache,
    QuantoConfig,
    TorchAoConfig,
)
from wide_models import new_wide_vanilla, relative_error, wide

from depthmix.modeling.mixing_modules import MixingModule


ao = pytest.importorskip("torchao.quantization")
GROUP = ao.PerGroup(32)
CHOICES = {
    "torchao-int8": lambda: TorchAoConfig(ao.Int8WeightOnlyConfig()),
    "torchao-int4": lambda: TorchAoConfig(ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=GROUP)),
    "quanto-int8": lambda: QuantoConfig(weights="int8"),
    "quanto-int4": lambda: QuantoConfig(weights="int4"),
    "bitsandbytes-8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes-4": lambda: BitsAndBytesConfig(load_in_4bit=True),
}


def load(folder, choice, **options):
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CHOICES[choice](), device_map="cpu", **options
    ).eval()


@pytest.mark.parametrize("choice", CHOICES)
def test_no_more_harm_than_to_the_vanilla_model(pair, choice, tmp_path):
    model = new_model(pair, **VANILLA_FIELDS[pair.method] | wide(pair))
    errors = []
    for name, each in (("model", model), ("vanilla", new_wide_vanilla(pair))):
        each.save_pretrained(tmp_path / name)
        errors.append(relative_error(each, load(tmp_path / name, choice, dtype="float32")))
    assert 1e-3 < errors[1] < 1
    assert errors[0] <= 1.05 * errors[1]


@pytest.mark.parametrize("choice", CHOICES)
def test_what_mixes_is_untouched(pair, choice, tmp_path):
    """Also where the rest is loaded in bf16: gates and the like stay fp32 and have the values that were saved."""
    fields = {"depth_attention": {"depth_gate": True}, "moda": {"moda_gate": True}}.get(pair.method, {})
    model = wake(new_model(pair, **AWAKE_FIELDS[pair.method] | fields | wide(pair)))
    model.save_pretrained(tmp_path)
    quantised = load(tmp_path, choice, dtype="bfloat16")
    modules = [name for name, each in model.named_modules() if isinstance(each, MixingModule)]
    assert modules
    for name in modules:
        found = dict(quantised.get_submodule(name).named_parameters())
        for parameter_name, parameter in model.get_submodule(name).named_parameters():
            assert type(found[parameter_name]) is torch.nn.Parameter
            assert found[parameter_name].dtype is torch.float32
            assert torch.equal(found[parameter_name], parameter)
    # the rest is quantised
    assert relative_error(model, quantised) > 1e-3


@pytest.mark.parametrize("choice", ["torchao-int8", "torchao-int4", "quanto-int8"])
def test_greedy_generation(pair, choice, tmp_path):
    """With a cache as without one, where weights alone are quantised; bitsandbytes rounds activations by the call."""
    wake(new_model(pair, **AWAKE_FIELDS[pair.method] | wide(pair))).save_pretrained(tmp_path)
    quantised, ids = load(tmp_path, choice, dtype="float32"), ids_of(1, 7)
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    generated = quantised.generate(ids, **greedy)
    assert generated.shape == (1, 15)
    assert torch.equal(generated, quantised.generate(ids, use_cache=False, **greedy))


@pytest.mark.parametrize(("backend", "axis"), [("quanto", 0), ("hqq", 1)])
@torch.no_grad()
def test_quantised_cache(pair, backend, axis):
    """What a cache in 4 bit adds is what it adds to the vanilla model, of which retrofits have keys and values."""
    options = {"nbits": 4, "axis_key": axis, "axis_value": axis, "q_group_size": 32, "residual_length": 8}
    errors, ids = [], ids_of(2, 48)
    for model in (new_model(pair, **VANILLA_FIELDS[pair.method] | wide(pair)), new_wide_vanilla(pair)):
        cache = QuantizedCache(backend=backend, config=model.config, **options)
        chunks = [model(chunk, use_cache=True, **{CACHE_NAME: cache}).logits for chunk in ids.split(16, dim=1)]
        expected = model(ids, use_cache=False).logits
        errors.append(((torch.cat(chunks, dim=1) - expected)[:, 16:].square().mean().sqrt() / expected.std()).item())
    assert 1e-2 < errors[1] < 1
    assert errors[0] <= 1.05 * errors[1]


def test_hqq_is_refused_by_transformers(pair, tmp_path):
    """For the vanilla model as well."""
    for name, model in (("model", new_model(pair, **wide(pair))), ("vanilla", new_wide_vanilla(pair))):
        model.save_pretrained(tmp_path / name)
        with pytest.raises(NotImplementedError, match="HQQ"):
            AutoModelForCausalLM.from_pretrained(
                tmp_path / name, quantization_config=HqqConfig(nbits=4, group_size=64), device_map="cpu"
            )
