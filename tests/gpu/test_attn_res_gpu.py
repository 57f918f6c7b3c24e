# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The kernels of Attention Residuals where only a CUDA device shows a fault: sizes, offsets, placement, graphs."""

import pytest
import torch

from depthmix.kernels import attn_res, attn_res_phase_1, attn_res_phase_2


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

EPS = 1e-6


def draw(*shape, seed=0, dtype=torch.bfloat16, device="cuda"):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype).requires_grad_()


def run(sources, queries, gains, norms, impl, recompute=False):
    """Outputs and gradients of a block whose sub-layers shift the features."""
    leaves = [*sources, *queries, *gains, *norms]
    outputs, log_sum_exps, sources = attn_res_phase_1(sources, queries, gains, eps=EPS, impl=impl)
    partial, update, mixes = None, outputs[0].roll(1, -1), []
    for site in range(1, len(queries)):
        partial, mixed = attn_res_phase_2(
            *(outputs[site], log_sum_exps[site], partial, update, queries[site], gains[site]),
            eps=EPS,
            num_sources=len(sources) + 1,
            output_norm_weight=norms[site],
            sources=sources if recompute else None,
            impl=impl,
        )
        update = mixed.roll(1, -1)
        mixes.append(mixed)
    last = attn_res([*sources, partial + update], queries[0], gains[0], eps=EPS, impl=impl)
    return [*mixes, last, *torch.autograd.grad(last, leaves, torch.ones_like(last), allow_unused=True)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sources", [1, 3, 8])
@pytest.mark.parametrize("hidden_size", [48, 100, 1536, 2048, 2304, 4096, 7168])
def test_every_size(hidden_size, sources, recompute):
    values = [draw(37, hidden_size, seed=i) for i in range(sources)]
    queries, gains, norms = ([draw(hidden_size, seed=10 * k + i) for i in range(3)] for k in (1, 2, 3))
    with torch.no_grad():
        for query in queries:
            query.mul_(hidden_size**-0.5)
    tensors = (values, queries, gains, norms)
    exact = [[x.detach().double().requires_grad_() for x in group] for group in tensors]
    exact = run(*exact, "reference")
    plain, ours = run(*tensors, "reference"), run(*tensors, "triton", recompute)
    for i, tensor in enumerate(exact):
        if tensor is None:
            continue
        allowed, error = ((x[i].double() - tensor).norm() / tensor.norm() for x in (plain, ours))
        assert error <= 2 * allowed + 2 * torch.finfo(torch.bfloat16).eps, i


def test_offsets_beyond_32_bits():
    """The last tokens of a large tensor come out as they do alone."""
    tokens, hidden_size, last = 2**31 // 4096 + 16, 4096, 512
    large = [draw(tokens, hidden_size, seed=i) for i in range(2)]
    query, gain = draw(hidden_size, seed=5), draw(hidden_size, seed=6)

    def last_rows(sources):
        (output,), (log_sum_exp,), _ = attn_res_phase_1(sources[:1], [query], [gain], eps=EPS, impl="triton")
        partial, mixed = attn_res_phase_2(
            output, log_sum_exp, sources[0], sources[1], query, gain, eps=EPS, num_sources=2, impl="triton"
        )
        single = attn_res(sources, query, gain, eps=EPS, impl="triton")
        grads = torch.autograd.grad([mixed, single], sources, [mixed.detach(), single.detach()])
        return [x[-last:].clone() for x in (partial, mixed, single, *grads)]

    expected = last_rows([x.detach()[-last:].requires_grad_() for x in large])
    assert all(torch.equal(*pair) for pair in zip(last_rows(large), expected, strict=True))


def test_equal_bits_from_equal_inputs():
    tensors = [[draw(4099, 2048, seed=i) for i in range(3)]]
    tensors += [[draw(2048, seed=10 * k + i) for i in range(3)] for k in (1, 2, 3)]
    first, second = run(*tensors, "triton"), run(*tensors, "triton")
    assert all(a is b or torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled(recompute):
    tensors = [[draw(65, 256, seed=i) for i in range(3)]]
    tensors += [[draw(256, seed=10 * k + i) for i in range(3)] for k in (1, 2, 3)]

    def block(sources, queries, gains, norms):
        outputs, log_sum_exps, sources = attn_res_phase_1(sources, queries, gains, eps=EPS, impl="triton")
        partial, mixed = attn_res_phase_2(
            *(outputs[1], log_sum_exps[1], None, outputs[0], queries[1], gains[1]),
            eps=EPS,
            num_sources=4,
            output_norm_weight=norms[1],
            sources=sources if recompute else None,
            impl="triton",
        )
        return attn_res([*sources, partial + mixed], queries[0], gains[0], eps=EPS, impl="triton")

    leaves = [*tensors[0], *tensors[1][:2], *tensors[2][:2], tensors[3][1]]
    results = []
    for function in (block, torch.compile(block, fullgraph=True)):
        output = function(*tensors)
        results.append([output, *torch.autograd.grad(output, leaves, torch.ones_like(output))])
    for ours, expected in zip(*results, strict=True):
        assert (ours.float() - expected.float()).norm() <= 1e-2 * expected.float().norm()


def test_in_a_cuda_graph():
    sources, query = [draw(64, 512, seed=i) for i in range(3)], draw(512, seed=5)
    with torch.no_grad():
        expected = attn_res(sources, query, eps=EPS, impl="triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mixed = attn_res(sources, query, eps=EPS, impl="triton")
        graph.replay()
    assert torch.equal(mixed, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_on_another_device_than_the_current():
    tensors = [[draw(33, 256, seed=i) for i in range(3)]]
    tensors += [[draw(256, seed=10 * k + i) for i in range(3)] for k in (1, 2, 3)]
    there = [[x.detach().to("cuda:1").requires_grad_() for x in group] for group in tensors]
    for here, other in zip(run(*tensors, "triton"), run(*there, "triton"), strict=True):
        assert here is other or torch.equal(here, other.to(here.device))
