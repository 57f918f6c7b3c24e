# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Depth-Attention on a CUDA device: attention backends, caches, autocast, compilation, placement."""

import inspect
import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, StaticCache

from depthmix import DepthQwen3ForCausalLM


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# full-size heads, so that every attention backend accepts them
FIELDS = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128, "depth_stride": 1}


@pytest.fixture(autouse=True)
def exact_fp32():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture
def model(build, assert_awake):
    model = build(**FIELDS)
    assert_awake(model)
    return model.cuda()


@pytest.fixture
def ids(token_ids):
    return token_ids(2, 24).cuda()


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@torch.no_grad()
def test_logits_equal_those_of_the_cpu(build, model, ids):
    expected = build(**FIELDS)(ids.cpu()).logits
    assert (model(ids).logits.cpu() - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    "fields",
    [
        {"depth_stride": 1},
        {"depth_stride": 2, "key_norm_position": "after_rope"},
        {"depth_stride": 1, "depth_gate": True},
    ],
)
def test_kernels_are_the_same_function(build, ids, fields):
    """Loss and gradients, in fp32 and, next to what plain PyTorch loses there, in bf16."""
    losses, grads = {}, {}
    for impl, dtype in itertools.product(("reference", "triton"), (torch.float32, torch.bfloat16)):
        model = build(**FIELDS | fields, depth_impl=impl).cuda().train().to(dtype)
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses[impl, dtype], grads[impl, dtype] = loss.item(), gradients(model)
    exact = grads["reference", torch.float32]
    assert abs(losses["triton", torch.float32] - losses["reference", torch.float32]) < 1e-5
    for name in exact:
        assert relative_error(grads["triton", torch.float32][name], exact[name]) < 1e-4, name
        plain = relative_error(grads["reference", torch.bfloat16][name], exact[name])
        assert relative_error(grads["triton", torch.bfloat16][name], exact[name]) < 1.5 * plain + 1e-2, name


@pytest.mark.parametrize("gate", [False, True])
def test_training_is_deterministic(build, ids, gate):
    model = build(**FIELDS, depth_impl="triton", depth_gate=gate).cuda().train().bfloat16()
    results = []
    for _ in range(2):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        results.append({name: grad for name, grad in gradients(model).items() if "embed" not in name})
    assert all(torch.equal(grad, results[1][name]) for name, grad in results[0].items())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ends_of_the_gate(build, token_ids, dtype):
    """Closed gates give the model without mixing and open ones that without gates, bit for bit, kernels and all."""
    ids = token_ids(2, 200).cuda()
    logits = {}
    for name, fields, gate in (
        ("closed", {"depth_gate": True}, 0),
        ("open", {"depth_gate": True}, 1),
        ("no mixing", {"depth_stride": 0}, None),
        ("no gates", {}, None),
    ):
        model = build(**FIELDS | fields)
        state = build(**FIELDS).state_dict()
        model.load_state_dict(state, strict=False)
        for key, parameter in model.named_parameters():
            if "depth_gate" in key:
                parameter.fill_(gate)
        logits[name] = model.cuda().to(dtype)(ids).logits
    assert torch.equal(logits["closed"], logits["no mixing"]) and torch.equal(logits["open"], logits["no gates"])
    assert (logits["open"] - logits["closed"]).abs().max() > 0.05


@torch.no_grad()
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH])
def test_sdpa_backends_agree_in_bf16(model, ids, backend):
    expected = model.double()(ids).logits
    model.bfloat16()
    model.set_attn_implementation("eager")
    eager_error = relative_error(model(ids).logits, expected)
    model.set_attn_implementation("sdpa")
    with sdpa_kernel(backend):
        assert relative_error(model(ids).logits, expected) < 2 * eager_error


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:_compile flag:DeprecationWarning")
def test_flex_attention_with_left_padding(model, ids):
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    model.set_attn_implementation("flex_attention")
    assert relative_error(model(ids, attention_mask=mask).logits[mask.bool()], expected) < 1e-3


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded"])
def test_generate_with_each_cache(model, ids, cache):
    if cache == "offloaded" and "self.prefetch_stream.wait_stream" not in inspect.getsource(Cache.update):
        pytest.skip("this version of transformers reads prefetched layers before they have been copied")
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, cache_implementation=cache, **options), expected)


@torch.no_grad()
def test_compiled_decoding_with_cuda_graphs(model, token_ids):
    decode = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for prompt_length in (5, 9):
        ids = token_ids(2, prompt_length + 16, seed=prompt_length).cuda()
        expected = model(ids, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=64)
        model(ids[:, :prompt_length], past_key_values=cache)
        steps = []
        for position in range(prompt_length, ids.shape[1]):
            torch.compiler.cudagraph_mark_step_begin()
            output = decode(
                ids[:, position : position + 1],
                past_key_values=cache,
                position_ids=torch.full((2, 1), position, device="cuda"),
            )
            steps.append(output.logits.clone())
        assert (torch.cat(steps, 1) - expected[:, prompt_length:]).abs().max() < 1e-3


@pytest.mark.parametrize("parameters, autocast", [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", None)])
def test_low_precision_training(build, ids, parameters, autocast):
    model = build(**FIELDS).cuda().train()
    model(ids, labels=ids).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    model.to(getattr(torch, parameters))
    with torch.autocast("cuda", getattr(torch, autocast or "bfloat16"), enabled=autocast is not None):
        loss = model(ids, labels=ids).loss
    loss.backward()
    for name, gradient in gradients(model).items():
        assert gradient.dtype == getattr(torch, parameters)
        assert relative_error(gradient, expected[name]) < 0.15, name


@pytest.mark.parametrize(("impl", "checkpointing"), [("triton", False), ("triton", True), ("reference", False)])
def test_compiled_training(build, token_ids, impl, checkpointing):
    model = build(**FIELDS, depth_impl=impl).cuda().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    compiled = torch.compile(model, fullgraph=True)
    for length in (33, 64, 100):
        ids = token_ids(2, length).cuda()
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        expected = gradients(model)
        model.zero_grad()
        compiled(ids, labels=ids, use_cache=False).loss.backward()
        for name, gradient in gradients(model).items():
            assert relative_error(gradient, expected[name]) < 1e-3, name


@torch.no_grad()
def test_offload_to_cpu(model, ids, tmp_path):
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    offloaded = DepthQwen3ForCausalLM.from_pretrained(
        tmp_path, device_map="auto", max_memory={0: size // 2, "cpu": size}
    )
    assert "cpu" in offloaded.hf_device_map.values()
    # the norms of an offloaded layer have hooks, so that they run by themselves
    assert (offloaded(ids).logits - expected).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_layers_on_two_devices(model, ids, tmp_path):
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    expected, expected_tokens = model(ids).logits, model.generate(ids, **options)
    model.save_pretrained(tmp_path)
    device_map = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    device_map |= {f"model.layers.{i}": int(i > 1) for i in range(4)}
    split = DepthQwen3ForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    torch.cuda.set_device(0)
    assert {parameter.device.index for parameter in split.parameters()} == {0, 1}
    assert (split(ids).logits.to(0) - expected).abs().max() < 1e-4
    assert torch.equal(split.generate(ids, **options), expected_tokens)
