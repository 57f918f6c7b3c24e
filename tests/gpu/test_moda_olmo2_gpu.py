# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""MoDAOlmo2 on a CUDA device: kernels, shared slots, caches, autocast, compilation, placement."""

import itertools
import warnings

import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM, StaticCache

from depthmix import MoDAOlmo2ForCausalLM


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# full-size heads, so that every attention backend accepts them
FIELDS = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
VARIANTS = [
    {},
    {"moda_attn_depth_proj": True, "moda_depth_key_mode": "reader_norm"},
    {"moda_depth_window": 3, "moda_norm_style": "pre"},
]


@pytest.fixture(autouse=True)
def exact_fp32():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture
def build(build):
    # less of the wide initialisation, since the model is wider
    return lambda **fields: build(model_class=MoDAOlmo2ForCausalLM, **FIELDS | {"initializer_range": 0.06} | fields)


@pytest.fixture
def ids(token_ids):
    return token_ids(2, 24).cuda()


def gradients(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("fields", VARIANTS)
def test_kernels_are_the_same_function(build, ids, fields):
    """Loss and gradients, in fp32 and, next to what plain PyTorch loses there, in bf16."""
    found = {}
    for impl, dtype in itertools.product(("reference", "triton"), (torch.float32, torch.bfloat16)):
        found[impl, dtype] = gradients(build(**fields, depth_impl=impl).cuda().train().to(dtype), ids)
    loss, exact = found["reference", torch.float32]
    assert abs(found["triton", torch.float32][0] - loss) < 1e-4
    for name, gradient in exact.items():
        assert relative_error(found["triton", torch.float32][1][name], gradient) < 1e-3, name
        allowed, error = (
            relative_error(found[impl, torch.bfloat16][1][name], gradient) for impl in ("reference", "triton")
        )
        assert error <= 2 * allowed + 0.02, name


@torch.no_grad()
def test_without_slots_and_kernels_it_is_vanilla(build, ids):
    model = build(moda_attn_slots=False, moda_ffn_slots=False, depth_impl="reference").cuda().bfloat16()
    names = Olmo2Config.__dataclass_fields__.keys() & model.config.to_dict().keys()
    stock = Olmo2ForCausalLM(Olmo2Config(**{name: getattr(model.config, name) for name in names}))
    stock.load_state_dict(model.state_dict())
    assert torch.equal(model(ids).logits, stock.cuda().bfloat16().eval()(ids).logits)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(build, ids, use_reentrant):
    model = build(depth_impl="triton").cuda().train()
    loss, expected = gradients(model, ids)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    again, found = gradients(model, ids)
    assert again == loss
    assert max(relative_error(found[name], gradient) for name, gradient in expected.items()) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("fields", VARIANTS)
def test_caches(build, ids, fields, padded):
    """Prompt, chunk and single tokens, with either cache, are the full forward."""
    model = build(**fields).cuda()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for cache in (None, StaticCache(config=model.config, max_cache_len=64)):
        logits, start = [], 0
        for stop in (12, 13, 20, *range(21, 25)):
            outputs = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(outputs.logits)
            cache, start = outputs.get("cache") or outputs.get("past_key_values"), stop
        real = mask.bool()
        assert (torch.cat(logits, 1)[real] - expected[real]).abs().max() < 1e-4
    assert expected.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(build, ids, dtype):
    model = build().cuda().train()
    _, exact = gradients(model, ids)
    with torch.autocast("cuda", dtype):
        loss = model(ids, labels=ids, use_cache=False).loss
    model.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype is torch.float32
        assert relative_error(parameter.grad, exact[name]) < 0.1, name


@torch.no_grad()
def test_compiled_decoding(build, ids):
    model = build().cuda()
    expected = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=64)
    model(ids[:, :12], past_key_values=cache)
    forward = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for i in range(12, 24):
        torch.compiler.cudagraph_mark_step_begin()
        position = torch.full((2, 1), i, device="cuda")
        logits = forward(ids[:, i : i + 1], position_ids=position, past_key_values=cache).logits
        assert (logits[:, 0] - expected[:, i]).abs().max() < 1e-3


def test_compiled_training(build, ids):
    model = build(num_hidden_layers=3).cuda().train()
    loss, expected = gradients(model, ids)
    model.compile(fullgraph=True)
    again, found = gradients(model, ids)
    assert abs(again - loss) < 1e-4
    assert max(relative_error(found[name], gradient) for name, gradient in expected.items()) < 1e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_on_two_devices(build, ids, impl, tmp_path):
    """Slots follow to the device of their reader, and their gradients back, with another device current."""
    model = build(depth_impl=impl)
    model.save_pretrained(tmp_path)
    model = model.cuda().train()
    loss, expected = gradients(model, ids)
    tokens = model.eval().generate(ids, max_new_tokens=16, do_sample=False)
    device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 0, "model.layers.2": 1}
    device_map |= {"model.layers.3": 1, "model.norm": 1, "model.rotary_emb": 0, "lm_head": 1}
    split = MoDAOlmo2ForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    assert torch.equal(split.eval().generate(ids, max_new_tokens=16, do_sample=False), tokens)
    again, found = gradients(split.train(), ids)
    assert abs(again - loss) < 1e-4
    assert max(relative_error(found[name].cuda(0), gradient) for name, gradient in expected.items()) < 1e-3
