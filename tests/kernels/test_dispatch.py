# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Which implementation `impl="auto"` means."""

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
