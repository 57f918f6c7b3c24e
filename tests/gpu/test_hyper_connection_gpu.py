# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The kernels of hyper-connections where only a CUDA device shows a fault: products, offsets, placement, graphs."""

import pytest
import torch

from depthmix.kernels import hyper_connection_read, hyper_connection_write


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def draw(*shape, seed=0, dtype=torch.bfloat16, device="cuda"):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype).requires_grad_()


def connection(tokens, streams, size, dtype=torch.bfloat16, parameter_dtype=None):
    """Streams, what a sub-layer adds to its input, and the parameters."""
    entries, wide = streams * (streams + 2), parameter_dtype or dtype
    tensors = [draw(tokens, streams, size, dtype=dtype), draw(tokens, size, seed=1, dtype=dtype)]
    tensors += [draw(streams * size, seed=2, dtype=wide), draw(entries, streams * size, seed=3, dtype=wide)]
    with torch.no_grad():
        tensors[-1].mul_((streams * size) ** -0.5)
    shapes = [(1,)] * 3 + [(streams,), (streams,), (streams, streams)]
    return tensors + [draw(*shape, seed=4 + i, dtype=wide) for i, shape in enumerate(shapes)]


def forward(tensors, impl, **options):
    streams, added, norm_weight, projection, *rest = tensors
    mixed, residual, post, streams = hyper_connection_read(
        streams, norm_weight, projection, rest[:3], rest[3:], eps=1e-6, impl=impl, **options
    )
    written = hyper_connection_write(streams, added + mixed.roll(1, -1), residual, post, impl=impl)
    return mixed, residual, post, written


def run(tensors, impl, **options):
    """Outputs and gradients."""
    outputs = forward(tensors, impl, **options)
    return [*outputs, *torch.autograd.grad(outputs, tensors, grads_of(outputs))]


def grads_of(outputs):
    return [draw(*output.shape, seed=20 + i).to(output.dtype) for i, output in enumerate(outputs)]


def distances(found, exact):
    return [((x.double() - y).norm() / (y.norm() + 1e-9)).item() for x, y in zip(found, exact, strict=True)]


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, None), (torch.bfloat16, torch.float32), (torch.float16, None)])
@pytest.mark.parametrize(
    ("streams", "size", "order"),
    [(4, 2048, "columns_first"), (4, 1536, "rows_first"), (2, 2304, "columns_first"), (5, 100, "rows_first")],
)
def test_every_size(streams, size, order, dtypes):
    tensors = connection(1037, streams, size, *dtypes)
    exact = run([x.detach().double().requires_grad_() for x in tensors], "reference", order=order)
    plain, ours = (distances(run(tensors, impl, order=order), exact) for impl in ("reference", "triton"))
    for i, (allowed, error) in enumerate(zip(plain, ours, strict=True)):
        assert error <= 1.5 * allowed + 2 * torch.finfo(dtypes[0]).eps, i
    # of the maps nothing is lost to the rounding of weights
    assert max(ours[1:3]) < 2e-5


def test_fp32():
    tensors = connection(301, 4, 1536, torch.float32)
    exact = run([x.detach().double().requires_grad_() for x in tensors], "reference")
    plain, ours = (distances(run(tensors, impl), exact) for impl in ("reference", "triton"))
    for i, (allowed, error) in enumerate(zip(plain, ours, strict=True)):
        assert error <= 2 * allowed + 2e-5, i


def test_many_tokens_have_the_numbers_of_few():
    tensors = connection(33000, 4, 512)
    few = [tensors[0][-700:], tensors[1][-700:], *tensors[2:]]
    with torch.no_grad():
        for many, alone in zip(forward(tensors, "triton"), forward(few, "triton"), strict=True):
            assert torch.equal(many[-700:], alone)


def test_offsets_beyond_32_bits():
    """The last tokens of large streams come out as they do alone."""
    size, last = 4096, 512
    tensors = connection(2**31 // (4 * size) + 600, 4, size)

    def last_rows(tensors):
        outputs = forward(tensors, "triton")
        grads = torch.autograd.grad(outputs[3], tensors[:2], outputs[3].detach())
        return [x[-last:].clone() for x in (*outputs, *grads)]

    expected = last_rows([*(x.detach()[-last:].requires_grad_() for x in tensors[:2]), *tensors[2:]])
    assert all(torch.equal(*pair) for pair in zip(last_rows(tensors), expected, strict=True))


def test_equal_bits_from_equal_inputs():
    tensors = connection(4099, 4, 2048)
    first, second = run(tensors, "triton"), run(tensors, "triton")
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_compiled():
    tensors = connection(65, 4, 256)
    expected = run(tensors, "triton")
    compiled = torch.compile(lambda *tensors: forward(tensors, "triton"), fullgraph=True)
    outputs = compiled(*tensors)
    found = [*outputs, *torch.autograd.grad(outputs, tensors, grads_of(outputs))]
    assert max(distances(found, [x.double() for x in expected])) < 2e-2


def test_in_a_cuda_graph():
    tensors = connection(64, 4, 512)
    with torch.no_grad():
        expected = forward(tensors, "triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = forward(tensors, "triton")
        graph.replay()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_on_another_device_than_the_current():
    tensors = connection(33, 4, 256)
    there = [x.detach().to("cuda:1").requires_grad_() for x in tensors]
    outputs, others = forward(tensors, "triton"), forward(there, "triton")
    assert all(torch.equal(here, other.to(here.device)) for here, other in zip(outputs, others, strict=True))
