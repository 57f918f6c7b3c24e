# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`gated_product` and `gated_linear`: the reference against plain PyTorch, the kernels, on a GPU or else interpreted,
against it, and what they keep for the backward.
"""

import pytest
import torch
from torch.nn import functional as F

from depthmix.kernels import gated_linear, gated_linear_triton, gated_product


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


def leaves(shape, size, dtype=torch.float32, bias=True):
    weight = draw(size, shape[-1], dtype=dtype, seed=2)
    return [
        draw(*shape, dtype=dtype),
        draw(*shape, dtype=dtype, seed=1),
        weight,
        *[draw(size, dtype=dtype, seed=3)] * bias,
    ]


def results(operation, inputs, impl, dtype=None):
    """The output and the gradients of all inputs that have some."""
    inputs = [x.detach().to(dtype or x.dtype).requires_grad_(x.requires_grad) for x in inputs]
    output = operation(*inputs, impl=impl)
    wanted = [x for x in inputs if x.requires_grad]
    grad = draw(*output.shape, dtype=output.dtype, seed=9).detach()
    return [output.detach(), *torch.autograd.grad(output, wanted, grad)]


def errors(actual, exact):
    return [
        ((ours.double() - expected).norm() / (expected.norm() + 1e-6)).item()
        for ours, expected in zip(actual, exact, strict=True)
    ]


@pytest.mark.parametrize("operation", [gated_product, gated_linear])
def test_reference_equals_plain_torch(operation):
    inputs = leaves((2, 3, 5), 4, torch.float64)[: 2 if operation is gated_product else 4]

    def plain(gate, up, *linear, impl):
        product = F.silu(gate) * up
        return F.linear(product, *linear) if linear else product

    for ours, expected in zip(results(operation, inputs, "reference"), results(plain, inputs, None), strict=True):
        torch.testing.assert_close(ours, expected)


# sizes that end inside a program's piece and on its edge
@pytest.mark.triton
@pytest.mark.parametrize("shape", [(1, 1, 5), (2, 3, 100), (2, 512), (3, 1, 700)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_equal_the_reference(shape, dtype):
    # the interpreter truncates where a GPU rounds
    factor = 1.1 if DEVICE == "cuda" or dtype is torch.float32 else 4
    # a few entries may all be rounded the other way
    floor = 1e-6 if dtype is torch.float32 else torch.finfo(dtype).eps / 2
    inputs = leaves(shape, 7, dtype)
    for operation, given in ((gated_product, inputs[:2]), (gated_linear, inputs[:3]), (gated_linear, inputs)):
        exact = results(operation, given, "reference", dtype=torch.float64)
        reference = errors(results(operation, given, "reference"), exact)
        for ours, plain in zip(errors(results(operation, given, "triton"), exact), reference, strict=True):
            assert ours <= factor * plain + floor


@pytest.mark.triton
def test_large_gates():
    """The slope of the activation has neither overflow nor cancellation there."""
    inputs = [draw(4, 8) * 100, draw(4, 8, seed=1), draw(3, 8, seed=2)]
    inputs = [x.detach().requires_grad_() for x in inputs]
    for ours, expected in zip(*(results(gated_linear, inputs, each) for each in ("triton", "reference")), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.triton
def test_strided_inputs():
    """Gate and up as halves of one projection, as columns of a transposed one, a weight that is transposed."""
    both = draw(3, 2, 20)
    cases = [
        (both[..., :10], both[..., 10:], draw(10, 6, seed=2).t(), draw(12, seed=3)[::2]),
        (draw(10, 2, 3).transpose(0, 2), draw(3, 2, 10, seed=1)[..., ::1], draw(6, 20, seed=2)[:, ::2], None),
        (draw(1, 1, 10).expand(3, 2, 10), draw(3, 2, 10), draw(6, 10, seed=2), None),
    ]
    for *inputs, bias in cases:
        inputs = inputs if bias is None else [*inputs, bias]
        found = [
            [output := gated_linear(*inputs, impl=impl), *torch.autograd.grad(output.square().sum(), inputs)]
            for impl in ("triton", "reference")
        ]
        for ours, expected in zip(*found, strict=True):
            torch.testing.assert_close(ours, expected)


@pytest.mark.triton
def test_strided_gradient():
    inputs = leaves((3, 2, 10), 6)
    grad = draw(6, 2, 3, seed=8).detach().transpose(0, 2)
    ours, expected = (
        torch.autograd.grad(gated_linear(*inputs, impl=impl), inputs, grad) for impl in ("triton", "reference")
    )
    for pair in zip(ours, expected, strict=True):
        torch.testing.assert_close(*pair)


@pytest.mark.triton
@pytest.mark.parametrize("frozen", [(2,), (3,), (2, 3), (0, 1)])
def test_only_what_is_wanted(frozen):
    """The weight of a model that trains adapters is frozen, and gets no gradient."""
    inputs = [x.requires_grad_(i not in frozen) for i, x in enumerate(x.detach() for x in leaves((2, 3, 10), 6))]
    for ours, expected in zip(*(results(gated_linear, inputs, each) for each in ("triton", "reference")), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.triton
@pytest.mark.parametrize("with_bias", [False, True])
def test_what_is_kept_for_the_backward(with_bias):
    """Gate, up and weight: neither the activated gate nor the product."""
    inputs, kept = leaves((2, 3, 10), 6, bias=with_bias), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        gated_product(*inputs[:2], impl="triton")
        assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in inputs[:2]]
        kept.clear()
        gated_linear(*inputs, impl="triton")
        assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in inputs[:3]]


@pytest.mark.triton
def test_a_second_backward_is_right():
    """Inputs are not overwritten."""
    inputs = leaves((2, 3, 10), 6)
    before = [x.detach().clone() for x in inputs]
    output = gated_linear(*inputs, impl="triton").square().sum()
    first = torch.autograd.grad(output, inputs, retain_graph=True)
    for pair in zip(torch.autograd.grad(output, inputs), first, strict=True):
        assert torch.equal(*pair)
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))


@pytest.mark.triton
def test_no_tokens():
    inputs = leaves((0, 7), 3)
    output, gate_grad, up_grad, weight_grad, bias_grad = results(gated_linear, inputs, "triton")
    assert output.shape == (0, 3) and gate_grad.shape == up_grad.shape == (0, 7)
    assert not weight_grad.any() and not bias_grad.any()


@pytest.mark.triton
def test_under_autocast():
    """What is given has been cast already; nothing is cast again."""
    inputs = leaves((2, 3, 10), 6, torch.bfloat16)
    expected = results(gated_linear, inputs, "triton")
    with torch.autocast(DEVICE, dtype=torch.float16):
        found = results(gated_linear, inputs, "triton")
        reference = gated_linear(*inputs, impl="reference")
    assert reference.dtype is torch.bfloat16
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.triton
@pytest.mark.parametrize("bias", [True, False])
def test_operations_are_registered_properly(bias):
    inputs = leaves((2, 5), 3, bias=bias)
    torch.library.opcheck(gated_linear_triton.run_gated_product.typed, (*inputs[:2], True))
    inputs = inputs if bias else [*inputs, None]
    torch.library.opcheck(gated_linear_triton.run_gated_linear.typed, (*inputs, True))


@pytest.mark.triton
def test_compiled():
    inputs = leaves((2, 9), 4)
    expected = results(gated_linear, inputs, "triton")
    compiled = torch.compile(gated_linear, fullgraph=True, backend="aot_eager")
    for pair in zip(results(compiled, inputs, "triton"), expected, strict=True):
        torch.testing.assert_close(*pair)


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((ones(2, 3), ones(2, 4)), r"gate has shape \[2, 3\].*up \[2, 4\]"),
        ((ones(2, 3), ones(2, 3, dtype=torch.float16)), "up .* torch.float16: both must be"),
        ((ones(2, 3), ones(2, 3), ones(4, 2)), r"weight has shape \[4, 2\]"),
        ((ones(2, 3), ones(2, 3), ones(3)), r"weight has shape \[3\]"),
        ((ones(2, 3), ones(2, 3), ones(4, 3, dtype=torch.float64)), "weight .* dtype torch.float64"),
        ((ones(2, 3), ones(2, 3), ones(4, 3), ones(3)), r"bias has shape \[3\].*must be \[4\]"),
        ((ones(2, 3), ones(2, 3), ones(4, 3), ones(4, dtype=torch.float16)), "bias .* dtype torch.float16"),
    ],
)
def test_what_does_not_fit(inputs, message):
    with pytest.raises(ValueError, match=message):
        (gated_linear if len(inputs) > 2 else gated_product)(*inputs)


@pytest.mark.triton
def test_explicit_kernel_does_not_fall_back():
    inputs = [ones(2, 3, dtype=torch.float64)] * 2
    with pytest.raises(RuntimeError, match="the kernel of gated_product supports .*not torch.float64"):
        gated_product(*inputs, impl="triton")
    with pytest.raises(RuntimeError, match="the kernel of gated_linear supports .*not torch.float64"):
        gated_linear(*inputs, ones(1, 3, dtype=torch.float64), impl="triton")
    assert gated_product(*inputs).shape == (2, 3)


@pytest.mark.slow
@pytest.mark.triton
def test_kernels_compile_ahead_of_time(compiled_ahead_of_time, gpu_target):
    compiled = compiled_ahead_of_time("ahead_of_time_gated_linear.py")
    assert sorted((entry["kernel"], entry["with_product"]) for entry in compiled) == [
        ("gated_product_bwd_kernel", False),
        ("gated_product_bwd_kernel", True),
        ("gated_product_fwd_kernel", False),
    ]
    assert all(entry["target"] == gpu_target and entry["wide_loads"] and entry["wide_stores"] for entry in compiled)
