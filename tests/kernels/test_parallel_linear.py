# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`parallel_linear`: linear maps of one input, with one sum of its gradients."""

import pytest
import torch
from torch.nn.functional import linear

from depthmix.kernels.parallel_linear_op import _run, parallel_linear


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def leaves(dtype=torch.float32, sizes=(5, 7, 3)):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 8), *(torch.randn(size, 8) for size in sizes)]
    return [tensor.to(DEVICE, dtype).requires_grad_() for tensor in tensors]


def plain(hidden_states, weights):
    return [linear(hidden_states, weight) for weight in weights]


def results(function, inputs, read=slice(None)):
    outputs = function(inputs[0], inputs[1:])
    wanted = [x for x in inputs if x.requires_grad]
    loss = sum(x.square().sum() for x in outputs[read])
    return [*outputs, *torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("frozen", [(), (0,), (2,), (1, 2, 3)])
@pytest.mark.parametrize("read", [slice(None), slice(1, 2), slice(2, None)])
def test_equals_plain_torch(frozen, read):
    inputs = [x.requires_grad_(i not in frozen) for i, x in enumerate(x.detach() for x in leaves())]
    if not any(x.requires_grad for x in (inputs[0], *inputs[1:][read])):
        pytest.skip("nothing to differentiate")
    for pair in zip(results(parallel_linear, inputs, read), results(plain, inputs, read), strict=True):
        torch.testing.assert_close(*pair)


def test_gradient_is_rounded_less_often():
    inputs = leaves(torch.bfloat16, sizes=(8,) * 6)
    exact = results(plain, [x.detach().double().requires_grad_() for x in inputs])[6]
    lost = [(results(function, inputs)[6].double() - exact).norm() for function in (parallel_linear, plain)]
    assert lost[0] <= 1.05 * lost[1]


def test_strides():
    """Heads in another order, as attention gives their gradients, and hidden states that are not contiguous."""
    hidden, *weights = leaves()
    hidden = hidden.transpose(0, 1)
    found = []
    for function in (parallel_linear, plain):
        outputs = function(hidden, weights)
        grads = [torch.ones_like(x).transpose(0, 1).contiguous().transpose(0, 1) for x in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, [hidden, *weights], grads)])
    for pair in zip(*found, strict=True):
        torch.testing.assert_close(*pair)


def test_what_is_kept():
    inputs, kept = leaves(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        parallel_linear(inputs[0], inputs[1:])
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in inputs]


def test_no_tokens():
    _, *weights = leaves()
    hidden = torch.empty(0, 8, device=DEVICE, requires_grad=True)
    for pair in zip(*(results(function, [hidden, *weights]) for function in (parallel_linear, plain)), strict=True):
        torch.testing.assert_close(*pair)


def test_second_derivatives_are_refused():
    inputs = leaves()
    grads = torch.autograd.grad(parallel_linear(inputs[0], inputs[1:])[0].pow(3).sum(), inputs[:2], create_graph=True)
    with pytest.raises(RuntimeError, match='ask for impl="reference"'):
        torch.autograd.grad(grads[0].square().sum(), inputs[0])


def test_registered_properly_and_compiled():
    inputs = leaves()
    torch.library.opcheck(_run.typed, (inputs[0], inputs[1:], True))
    compiled = torch.compile(lambda x, weights: parallel_linear(x, weights), fullgraph=True, backend="aot_eager")
    for pair in zip(results(compiled, inputs), results(plain, inputs), strict=True):
        torch.testing.assert_close(*pair)
