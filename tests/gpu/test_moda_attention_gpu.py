# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Mixture-of-Depths Attention where only a CUDA device shows a fault: torch's attentions, sizes, offsets, graphs."""

import pytest
import torch

from depthmix.kernels import DepthStream, moda_attention, moda_attention_over_stream, moda_sequence_attention


DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def draw(*shape, seed=0, dtype=torch.bfloat16, device=DEVICE):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def inputs(batch, kv_heads, group, tokens, length, head_dim, slots, *, dtype=torch.bfloat16, device=DEVICE):
    """As a model lays them out, all requiring gradients."""
    heads, slot = kv_heads * group, (slots, batch, tokens, kv_heads, head_dim)
    shapes = [(batch, tokens, heads, head_dim), *[(batch, length, kv_heads, head_dim)] * 2, slot, slot]
    tensors = [draw(*shape, seed=i, dtype=dtype, device=device) for i, shape in enumerate(shapes)]
    return [x.requires_grad_() for x in (*(x.transpose(1, 2) for x in tensors[:3]), *tensors[3:])]


def run(tensors, impl, dtype=None, call=moda_attention, **options):
    """Output, log-sum-exp and gradients."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
    output, lse = call(*leaves, return_lse=True, impl=impl, **options)
    grad = draw(*output.transpose(1, 2).shape, seed=9).transpose(1, 2).to(output.dtype)
    return [output, lse, *torch.autograd.grad(output, leaves, grad, materialize_grads=True)]


def assert_as_good_as_plain_torch(ours, tensors, **options):
    exact, plain = (run(tensors, "reference", dtype, **options) for dtype in (torch.float64, None))
    for i, tensor in enumerate(exact):
        assert torch.equal(ours[i].isinf(), tensor.isinf()), i
        allowed, error = (
            ((x[i].double() - tensor)[tensor.isfinite()].norm() / (tensor[tensor.isfinite()].norm() + 1e-6))
            for x in (plain, ours)
        )
        # torch's kernels round the probabilities, the reference does not
        assert error <= 2 * allowed + 4 * torch.finfo(tensors[0].dtype).eps, (i, error)


def visible(batch, tokens, length):
    """Causal, with padding on the left, so that some rows see nothing."""
    mask = torch.ones(tokens, length, dtype=torch.bool, device=DEVICE).tril(length - tokens)
    mask = mask.repeat(batch, 1, 1, 1)
    mask[0, ..., : length // 4] = False
    return mask


# batch, key-value heads, group, tokens, length, head dim, slots, dtype, what torch should attend with
CASES = {
    "group of 8": (1, 8, 8, 512, 512, 64, 64, torch.bfloat16, "cudnn"),
    "group of 3, wide heads": (2, 2, 3, 130, 130, 128, 17, torch.bfloat16, "cudnn"),
    "no groups": (2, 16, 1, 130, 130, 128, 30, torch.float16, "cudnn"),
    "group of 5": (1, 2, 5, 129, 129, 80, 9, torch.bfloat16, "cudnn"),
    "group of 7": (1, 1, 7, 129, 129, 96, 9, torch.bfloat16, "cudnn"),
    "group of 32": (1, 2, 32, 128, 128, 64, 19, torch.bfloat16, "cudnn"),
    "blocks of heads": (1, 1, 40, 100, 100, 128, 19, torch.bfloat16, "cudnn"),
    "widest heads": (1, 2, 2, 129, 129, 256, 9, torch.bfloat16, "flash"),
    "later tokens": (2, 2, 2, 64, 200, 64, 17, torch.bfloat16, "flash"),
    "later tokens in fp32": (2, 2, 2, 64, 200, 64, 17, torch.float32, "efficient"),
    "fp32": (1, 2, 3, 129, 129, 64, 17, torch.float32, "efficient"),
    "odd heads": (1, 2, 2, 65, 65, 20, 5, torch.float16, "math"),
    "one token": (2, 2, 2, 1, 77, 64, 5, torch.bfloat16, "flash"),
    "no slots": (2, 2, 2, 128, 128, 64, 0, torch.bfloat16, "cudnn"),
}


@pytest.mark.parametrize("case", CASES)
def test_with_each_attention_of_torch(case):
    *shape, dtype, backend = CASES[case]
    tensors = inputs(*shape, dtype=dtype)
    if torch.cuda.get_device_capability() >= (9, 0):
        assert moda_sequence_attention.sequence_backend(*tensors[:2], None, True) == backend
    assert_as_good_as_plain_torch(run(tensors, "triton"), tensors)


@pytest.mark.parametrize("slots", [0, 17])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masks(dtype, additive, slots):
    tensors, mask = inputs(2, 2, 2, 129, 133, 64, slots, dtype=dtype), visible(2, 129, 133)
    mask = torch.where(mask, 0.25, float("-inf")).to(dtype) if additive else mask
    ours = run(tensors, "triton", attention_mask=mask)
    assert not any(x.isnan().any() for x in ours)
    assert_as_good_as_plain_torch(ours, tensors, attention_mask=mask)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [65, 128])
def test_gradients_of_any_layout(tokens, masked):
    tensors = inputs(2, 2, 3, tokens, tokens, 64, 9)
    output = moda_attention(*tensors, attention_mask=visible(2, tokens, tokens) if masked else None, impl="triton")
    grad = draw(2, tokens, 6, 64, seed=9).transpose(1, 2)
    one = torch.ones((), dtype=grad.dtype, device=DEVICE).expand(grad.shape)
    for given, copied in ((grad, grad.contiguous()), (grad, grad.mT.contiguous().mT), (one.contiguous(), one)):
        results = [torch.autograd.grad(output, tensors, x, retain_graph=True) for x in (given, copied)]
        for actual, expected in zip(*results, strict=True):
            # the order of torch's additions is not fixed
            assert (actual - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("backend", ["flash", "efficient", "math"])
def test_any_backward_follows_any_forward(backend):
    query, key, value, *_ = inputs(2, 2, 3, 65, 65, 64, 0)
    grad, arguments, results = draw(2, 65, 6, 64, seed=9).transpose(1, 2), (None, 0.125, True), []
    for forward, backward in (("math", "math"), ("math", backend), (backend, "math"), (backend, backend)):
        output, lse = moda_sequence_attention.sequence_attention_forward(query, key, value, *arguments, forward)
        tensors = (grad, query, key, value, output, lse)
        grads = moda_sequence_attention.sequence_attention_backward(*tensors, *arguments, backward)
        results.append([output, lse, *grads])
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert (actual - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(4, 8, 2, 1, 3000, 64, 70), (2, 16, 1, 1, 2048, 128, 30), (2, 2, 4, 5, 300, 64, 12), (1, 1, 40, 1, 9, 80, 3)],
)
def test_decoding(shape, masked):
    tensors = [x.detach() for x in inputs(*shape)]
    mask = visible(shape[0], *shape[3:5]) if masked else None
    results = moda_attention(*tensors, attention_mask=mask, return_lse=True, impl="triton")
    exact = moda_attention(*(x.double() for x in tensors), attention_mask=mask, return_lse=True, impl="reference")
    for actual, expected in zip(results, exact, strict=True):
        assert (actual.double() - expected).norm() <= 1e-2 * expected.norm()


def test_offsets_beyond_32_bits():
    """The last tokens come out as they do alone."""
    tokens, last = 2**31 // (64 * 8 * 64) + 16, 32
    tensors = inputs(1, 8, 1, tokens, tokens, 64, 64)
    query, key, value, *slots = tensors
    alone = [query[:, :, -last:], key, value, *(x[:, :, -last:] for x in slots)]
    grad = draw(1, last, 8, 64, seed=9).transpose(1, 2)
    results = []
    for call in (alone, tensors):
        output = moda_attention(*call, impl="triton")
        whole = torch.zeros_like(output)
        whole[:, :, -last:] = grad
        grads = torch.autograd.grad(output, [query, *slots], whole)
        results.append([output[:, :, -last:], grads[0][:, :, -last:], *(x[:, :, -last:].clone() for x in grads[1:])])
    for actual, expected in zip(*results, strict=True):
        assert (actual.double() - expected.double()).norm() <= 1e-2 * expected.double().norm()


def test_stream_adds_up_gradients():
    """Those of a stack of readers, against autograd's sums in fp64, and with equal bits each time."""
    layers, shape = 6, (2, 2, 3, 257, 257, 64, 0)
    queries = [inputs(*shape)[0] for _ in range(layers)]
    slots = [draw(2, 257, 2, 64, seed=20 + i).requires_grad_() for i in range(4 * layers)]

    def grads(impl, dtype=torch.bfloat16):
        wide_queries, wide_slots = ([x.to(dtype) for x in tensors] for tensors in (queries, slots))
        stream = DepthStream(2 * layers, impl=impl)
        handle, total = stream.handle, 0.0
        for i, query in enumerate(wide_queries):
            key, value, *other = wide_slots[4 * i : 4 * i + 4]
            rows = (query, key.transpose(1, 2), value.transpose(1, 2))
            output = moda_attention_over_stream(*rows, stream, handle, start=max(0, 2 * i - 7), stop=2 * i)
            total = total + output.double().square().sum()
            handle = stream.write(handle, key, value)
            handle = stream.write(handle, *other)
        return torch.autograd.grad(total, [*queries, *slots], allow_unused=True)

    exact = grads("reference", torch.float64)
    ours, again = grads("triton"), grads("triton")
    for actual, repeated, expected in zip(ours, again, exact, strict=True):
        if expected is not None:
            assert torch.equal(actual, repeated)
            assert (actual.double() - expected.double()).norm() <= 2e-2 * expected.double().norm()


def test_compiled():
    for masked in (False, True):
        tensors = inputs(2, 2, 3, 65, 65, 64, 9)
        mask = visible(2, 65, 65) if masked else None
        compiled = torch.compile(moda_attention, fullgraph=True)
        results = [run(tensors, "triton", call=call, attention_mask=mask) for call in (moda_attention, compiled)]
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


def test_in_a_cuda_graph():
    for tokens in (1, 64):
        tensors = [x.detach() for x in inputs(2, 2, 2, tokens, 300, 64, 9)]
        expected = moda_attention(*tensors, impl="triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = moda_attention(*tensors, impl="triton")
        graph.replay()
        assert torch.equal(output, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_on_another_device_than_the_current():
    tensors = inputs(1, 2, 2, 65, 65, 64, 9)
    there = [x.detach().to("cuda:1").requires_grad_() for x in tensors]
    for here, other in zip(run(tensors, "triton"), run(there, "triton"), strict=True):
        assert torch.equal(here, other.to(here.device))


@pytest.mark.parametrize("case", ["group of 8", "group of 5", "widest heads", "later tokens", "later tokens in fp32"])
def test_gate(case):
    """The blend by its gradients, and its ends to the last bit; in 16 bits twice the same."""
    *shape, dtype, _ = CASES[case]
    tensors = inputs(*shape, dtype=dtype)
    heads = tensors[0].shape[1]
    gates = torch.linspace(-0.3, 1.0, heads, device=DEVICE)

    def gated(*leaves, impl, **options):
        *leaves, gate = leaves
        # as in a model, where gates stay in fp32
        gate = gate if impl == "reference" and gate.dtype is torch.float64 else gate.float()
        return moda_attention(*leaves, gate=gate, impl=impl, **options)

    leaves = [*tensors, gates.to(dtype)]
    results = [run(leaves, "triton", call=gated) for _ in range(2)]
    # torch's memory-efficient attention, which fp32 takes, adds gradients up in any order
    if dtype is not torch.float32:
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    exact, plain = (run(leaves, "reference", each, call=gated) for each in (torch.float64, None))
    for i, tensor in enumerate(exact):
        allowed, error = (((x[i].double() - tensor).norm() / tensor.norm()) for x in (plain, results[0]))
        assert error <= 2 * allowed + 4 * torch.finfo(dtype).eps, (i, error)

    with torch.no_grad():
        slots = [each[:0] for each in tensors[3:]]
        closed, opened = (moda_attention(*tensors, gate=torch.full_like(gates, g), impl="triton") for g in (0, 1))
        assert torch.equal(closed, moda_attention(*tensors[:3], *slots, impl="triton"))
        assert torch.equal(opened, moda_attention(*tensors, impl="triton"))
