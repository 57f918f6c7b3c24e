# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`depth_average`: the reference against plain sums, the kernels, on a GPU or else interpreted, against it."""

import pytest
import torch

from depthmix.kernels import depth_average, depth_average_triton


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


def results(impl, sources, weight, grad, dtype=None):
    """The average and the gradients of weight and sources."""
    leaves = [leaf.detach().to(dtype or leaf.dtype).requires_grad_() for leaf in (weight, *sources)]
    average = depth_average(leaves[1:], leaves[0], impl=impl)
    return [average.detach(), *torch.autograd.grad(average, leaves, grad.to(average.dtype))]


def errors(actual, exact):
    return [
        ((ours.double() - expected).norm() / (expected.norm() + 1e-6)).item()
        for ours, expected in zip(actual, exact, strict=True)
    ]


def test_reference_equals_plain_sums():
    sources, weight, grad = [draw(2, 3, 5, dtype=torch.float64, seed=i) for i in range(4)], draw(4), draw(2, 3, 5)
    average, weight_grad, *source_grads = results("reference", sources, weight.double(), grad.double())
    torch.testing.assert_close(average, sum(w * x for w, x in zip(weight.double(), sources, strict=True)).detach())
    torch.testing.assert_close(weight_grad, torch.stack([(grad * x).sum() for x in sources]).detach())
    for w, source_grad in zip(weight.double(), source_grads, strict=True):
        torch.testing.assert_close(source_grad, (w * grad.double()).detach())


# sizes that end inside a piece and on its edge; numbers of sources around those that kernels are compiled for and that
# fill groups or do not
@pytest.mark.triton
@pytest.mark.parametrize(
    ("shape", "number"),
    [
        ((1, 1, 5), 1),
        ((2, 3, 100), 4),
        ((1, 2, 2048), 5),
        ((4097,), 16),
        ((1, 1, 700), 12),
        ((1, 3, 1536), 17),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_equal_the_reference(shape, number, dtype):
    sources, weight = [draw(*shape, dtype=dtype, seed=i) for i in range(number)], draw(number, dtype=dtype, seed=500)
    grad = draw(*shape, dtype=dtype, seed=600).detach()
    exact = results("reference", sources, weight, grad, dtype=torch.float64)
    reference = errors(results("reference", sources, weight, grad), exact)
    # the interpreter truncates where a GPU rounds
    factor = 1.1 if DEVICE == "cuda" or dtype is torch.float32 else 4
    for ours, plain in zip(errors(results("triton", sources, weight, grad), exact), reference, strict=True):
        assert ours <= factor * plain + 1e-6


@pytest.mark.triton
def test_as_many_sources_as_there_may_be():
    sources, weight, grad = [draw(2, 4, seed=i) for i in range(128)], draw(128), draw(2, 4).detach()
    for ours, expected in zip(
        *(results(impl, sources, weight, grad) for impl in ("triton", "reference")), strict=True
    ):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.triton
def test_strided_inputs():
    wide = [draw(3, 2, 20, seed=i) for i in range(3)]
    sources = [
        wide[0].transpose(0, 1),
        wide[1][:, :, ::2].repeat(1, 1, 2).transpose(0, 1),
        wide[2][:1].expand(3, 2, 20),
    ]
    sources[2] = sources[2].transpose(0, 1)
    weight, grad = draw(6)[::2], draw(3, 2, 20, seed=9).detach().transpose(0, 1)
    for ours, expected in zip(
        *(results(impl, sources, weight, grad) for impl in ("triton", "reference")), strict=True
    ):
        torch.testing.assert_close(ours, expected)


@pytest.mark.triton
def test_addresses_that_wide_loads_cannot_read():
    sources, weight = [draw(1 + 32, seed=i)[1:] for i in range(2)], draw(2)
    grad = draw(1 + 32, seed=9).detach()[1:]
    for ours, expected in zip(
        *(results(impl, sources, weight, grad) for impl in ("triton", "reference")), strict=True
    ):
        torch.testing.assert_close(ours, expected)


@pytest.mark.triton
def test_fp32_weight_of_low_precision_sources():
    """As under autocast with a cast stream."""
    sources, weight, grad = [draw(2, 9, dtype=torch.bfloat16, seed=i) for i in range(3)], draw(3), draw(2, 9).detach()
    ours, expected = (results(impl, sources, weight, grad) for impl in ("triton", "reference"))
    assert [x.dtype for x in ours] == [x.dtype for x in expected]
    assert ours[1].dtype is torch.float32
    assert max(errors(ours, [x.double() for x in expected])) < 2e-2


@pytest.mark.triton
def test_no_tokens():
    sources = [draw(0, 7), draw(0, 7)]
    average, weight_grad, *source_grads = results("triton", sources, draw(2), torch.ones(0, 7, device=DEVICE))
    assert average.shape == (0, 7) and not weight_grad.any() and len(source_grads) == 2


@pytest.mark.triton
def test_operation_is_registered_properly():
    sources, weight = [draw(2, 5, seed=i) for i in range(3)], draw(3)
    torch.library.opcheck(depth_average_triton.run_depth_average.typed, (sources, weight, True))


@pytest.mark.triton
def test_compiled():
    sources, weight, grad = [draw(2, 9, seed=i) for i in range(3)], draw(3), draw(2, 9).detach()
    expected = results("triton", sources, weight, grad)
    compiled = torch.compile(lambda *x: depth_average(x[1:], x[0], impl="triton"), fullgraph=True, backend="aot_eager")
    average = compiled(weight, *sources)
    found = [average.detach(), *torch.autograd.grad(average, [weight, *sources], grad)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.triton
@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([torch.ones(2)] * 129, "takes up to 128 sources, not 129"),
        ([torch.ones(2), torch.ones(2).half()], "needs sources of one dtype"),
        ([torch.ones(2).double()], "not torch.float64"),
    ],
)
def test_explicit_kernel_does_not_fall_back(sources, message):
    weight = torch.ones(len(sources))
    with pytest.raises(RuntimeError, match=f"impl='triton': .*{message}"):
        depth_average(sources, weight, impl="triton")
    assert depth_average(sources, weight).shape == (2,)


def test_unknown_implementation():
    with pytest.raises(ValueError, match="impl='cuda': must be one of"):
        depth_average([torch.ones(2)], torch.ones(1), impl="cuda")


@pytest.mark.slow
@pytest.mark.triton
def test_kernels_compile_ahead_of_time(compiled_ahead_of_time, gpu_target):
    compiled = compiled_ahead_of_time("ahead_of_time_depth_average.py")
    assert {(entry["kernel"], entry["target"]) for entry in compiled} == {
        (f"depth_average_{direction}_kernel", gpu_target) for direction in ("fwd", "bwd")
    }
    assert all(entry["shared_memory"] <= entry["shared_memory_limit"] for entry in compiled)
    assert all(entry["wide_loads"] and entry["wide_stores"] for entry in compiled)
