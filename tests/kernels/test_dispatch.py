# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Who does the work of an operation."""

import pytest
import torch

from depthmix.kernels import depth_dispatch


@pytest.mark.parametrize(
    ("impl", "shape", "with_gradients", "compiled", "expected"),
    [
        ("auto", (2, 1, 8), False, True, True),
        ("auto", (2, 5, 8), False, True, False),
        ("auto", (8,), False, True, False),
        ("auto", (2, 1, 8), True, True, False),
        ("auto", (2, 1, 8), False, False, False),
        ("triton", (2, 1, 8), False, True, False),
        ("reference", (2, 1, 8), False, True, False),
    ],
)
def test_what_is_left_to_a_compiler(impl, shape, with_gradients, compiled, expected):
    def function(x):
        return x + depth_dispatch.left_to_compiler(impl, x)

    torch.compiler.reset()
    if compiled:
        function = torch.compile(function, backend="eager", fullgraph=True)
    with torch.set_grad_enabled(with_gradients):
        assert function(torch.zeros(shape)).sum() == expected * torch.zeros(shape).numel()


@pytest.mark.parametrize("is_interpreted", [False, True])
@pytest.mark.parametrize("obstacle", [None, "is not for these"])
@pytest.mark.parametrize("impl", depth_dispatch.IMPLEMENTATIONS)
def test_route(impl, obstacle, is_interpreted, monkeypatch):
    monkeypatch.setattr(depth_dispatch, "INTERPRETED", is_interpreted)
    monkeypatch.setattr(depth_dispatch, "triton", object())
    monkeypatch.setattr(depth_dispatch, "in_compiled_decoding", lambda hidden_states: hidden_states.shape[-2] == 1)
    token, tokens = torch.zeros(2, 1, 8), torch.zeros(2, 5, 8)
    if impl == "triton" and obstacle is not None:
        with pytest.raises(RuntimeError, match="impl='triton': the kernel of this operation is not for these"):
            depth_dispatch.route(impl, "this operation", obstacle)
        return
    has_kernel = impl == "triton" or (impl == "auto" and obstacle is None and not is_interpreted)
    kernel = depth_dispatch.Route.KERNEL if has_kernel else depth_dispatch.Route.STOCK
    assert depth_dispatch.route(impl, "this operation", obstacle) is kernel
    assert depth_dispatch.route(impl, "this operation", obstacle, tokens) is kernel
    # who asks for the kernel gets it
    small = depth_dispatch.Route.COMPILER if has_kernel and impl == "auto" else kernel
    assert depth_dispatch.route(impl, "this operation", obstacle, token) is small


def test_what_cannot_be_asked_for(monkeypatch):
    with pytest.raises(ValueError, match="impl='cuda': must be one of auto, triton, reference"):
        depth_dispatch.route("cuda", "this operation", None)
    monkeypatch.setattr(depth_dispatch, "triton", None)
    with pytest.raises(RuntimeError, match="this operation needs the package triton, which is not installed"):
        depth_dispatch.route("triton", "this operation", None)
