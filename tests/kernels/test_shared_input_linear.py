# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`shared_input_linear`: the reference against products, the kernel, on a GPU or else interpreted, against it."""

import pytest
import torch

from depthmix.kernels import shared_input_linear, shared_input_linear_triton


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def test_reference_equals_products():
    x, weights = draw(2, 3, 5, dtype=torch.float64), [draw(n, 5, dtype=torch.float64, seed=n) for n in (4, 1)]
    for ours, weight in zip(shared_input_linear(x, weights, impl="reference"), weights, strict=True):
        torch.testing.assert_close(ours, torch.einsum("btd,ed->bte", x, weight))


@pytest.mark.triton
@pytest.mark.parametrize(("size", "sizes"), [(1536, (8, 3, 5)), (24, (1,)), (513, (9, 4)), (1024, (2, 2, 2, 6))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_equals_the_reference(size, sizes, dtype):
    x = draw(1, 1, size, dtype=dtype)
    # the first one is strided, the second transposed
    weights = [draw(n, size, dtype=dtype, seed=1 + i) for i, n in enumerate(sizes)]
    weights[0] = draw(2 * sizes[0], size + 3, dtype=dtype)[::2, :size]
    weights[1:2] = [weight.t().contiguous().t() for weight in weights[1:2]]
    ours = shared_input_linear(x, weights, impl="triton")
    wide = [shared_input_linear(x.double(), [w.double() for w in weights], impl="reference")]
    for actual, exact in zip(ours, *wide, strict=True):
        assert actual.dtype is dtype and actual.shape == exact.shape
        # rounded once, by the interpreter towards zero
        error = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
        assert (actual.double() - exact).norm() <= error * exact.norm()


@pytest.mark.triton
def test_operation_is_registered_properly():
    inputs = (draw(1, 1, 5), [draw(3, 5), draw(2, 5)])
    torch.library.opcheck(shared_input_linear_triton.run_shared_input_linear.typed, inputs)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(2, 4), torch.ones(3, 4), r"works on one row of hidden states, not on shape \[2, 4\]"),
        (torch.ones(1, 4), torch.ones(3, 4, requires_grad=True), "has no gradient"),
        (torch.ones(4).double(), torch.ones(3, 4).double(), "not torch.float64"),
    ],
)
def test_explicit_kernel_does_not_fall_back(x, weight, message):
    with pytest.raises(RuntimeError, match=f"impl='triton': .*{message}"):
        shared_input_linear(x, [weight], impl="triton")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([torch.ones(3, 5)], r"weights\[0\] has shape \[3, 5\] .*must be \[D_i, D\] .* have shape \[1, 4\]"),
        ([torch.ones(3, 4), torch.ones(3, 4).half()], r"weights\[1\] .* dtype torch.float16"),
        ([], "there must be at least one"),
    ],
)
def test_what_does_not_fit_together_is_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        shared_input_linear(torch.ones(1, 4), weights)


@pytest.mark.triton
def test_kernel_compiles_ahead_of_time(compiled_ahead_of_time, gpu_target):
    compiled = compiled_ahead_of_time("ahead_of_time_shared_input_linear.py")
    assert {entry["target"] for entry in compiled} == {gpu_target}
    for entry in compiled:
        assert entry["shared_memory"] <= entry["shared_memory_limit"], entry
        assert entry["wide_loads"], entry
