# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The parameters by which layers are mixed are fp32 in every model of low precision, however it became one."""

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import local_torch_dtype

from depthmix.families import FAMILIES
from depthmix.modeling.mixing_modules import MixingModule


# what of the host takes part is the same in both versions
pytestmark = pytest.mark.once
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
# the first backbone of each method that has such parameters: Depth-Attention has none, those of MoDA are projections
METHODS = {pair.method: pair for pair in reversed(FAMILIES.values()) if pair.method not in ("depth_attention", "moda")}


def half(model, folder):
    return model.half()


def to_dtype(model, folder):
    return model.to(torch.bfloat16)


def to_device_and_dtype(model, folder):
    return model.to("cpu", torch.float16)


def by_default_dtype(model, folder):
    torch.set_default_dtype(torch.bfloat16)
    try:
        built = type(model)(model.config)
    finally:
        torch.set_default_dtype(torch.float32)
    built.load_state_dict(model.state_dict())
    return built


def by_the_host_on_construction(model, folder):
    with local_torch_dtype(torch.bfloat16, type(model).__name__):
        built = type(model)(model.config)
    built.load_state_dict(model.state_dict())
    return built


def from_config(model, folder):
    built = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    built.load_state_dict(model.state_dict())
    return built


def loaded(model, folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def loaded_by_device_map(model, folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": "cpu"})


def offloaded(model, folder):
    device_map = {"model": "cpu", "lm_head": "disk"}
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=device_map, offload_folder=folder / "offload"
    )


def dispatched(model, folder):
    with init_empty_weights():
        empty = type(model)(model.config)
    return load_checkpoint_and_dispatch(empty, folder, device_map={"": "cpu"}).to(torch.bfloat16)


def materialised(model, folder):
    with torch.device("meta"):
        empty = type(model)(model.config).to(torch.bfloat16)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    return empty


WAYS = [half, to_dtype, to_device_and_dtype, by_default_dtype, by_the_host_on_construction, from_config]
WAYS += [loaded, loaded_by_device_map, offloaded, dispatched, materialised]


@pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("pair", METHODS.values(), ids=METHODS)
def test_mixing_parameters_stay_fp32(pair, make, tmp_path):
    torch.manual_seed(0)
    model = pair.find_class("ForCausalLM")(pair.find_class("Config")(**SIZES))
    names = {
        f"{name}.{own}"
        for name, module in model.named_modules()
        if isinstance(module, MixingModule)
        for own, _ in module.named_parameters()
    }
    assert names
    with torch.no_grad():
        for name in names:
            # values that bf16 and fp16 do not have
            model.get_parameter(name).add_(0.3 * torch.rand_like(model.get_parameter(name)))
    expected = {name: model.get_parameter(name).detach().clone() for name in names}
    model.save_pretrained(tmp_path)
    low = make(model, tmp_path)
    assert {name for name, parameter in low.named_parameters() if parameter.dtype is torch.float32} == names
    assert all(torch.equal(low.get_parameter(name), tensor) for name, tensor in expected.items())
    assert low(torch.tensor([[3, 4, 5]])).logits.isfinite().all()
