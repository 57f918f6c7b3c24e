# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`attn_res` beside the reference that fla-core ships (extra `parity`)."""

import pytest
import torch

from depthmix.kernels import attn_res, attn_res_weights, depth_dispatch


naive = pytest.importorskip("fla.ops.attnres.naive", reason="needs fla-core")

needs_triton = pytest.mark.skipif(depth_dispatch.triton is None, reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("sources", [2, 5])
@pytest.mark.parametrize("normed", [False, True])
def test_equals_fla_core(impl, sources, normed):
    torch.manual_seed(sources)
    shapes = [(2, 7, 96)] * sources + [(96,)] * 3
    leaves = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    *values, query, gain, norm = leaves
    if not normed:
        leaves.pop()
    output_norm = norm if normed else None
    results = [
        attn_res(values, query, gain, eps=1e-6, output_norm_weight=output_norm, impl=impl),
        naive.naive_attnres(query, values, gain, output_norm, rms_eps=1e-6),
    ]
    grad = torch.randn_like(results[0])
    results = [[result, *torch.autograd.grad(result, leaves, grad)] for result in results]
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    _, weights = naive.naive_attnres(query, values, gain, rms_eps=1e-6, return_weights=True)
    torch.testing.assert_close(attn_res_weights(values, query, gain, eps=1e-6).movedim(-1, 0), weights)
