# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Typed operations, which a compiler sees, that run without the dispatcher where nothing needs it."""

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .depth_dispatch import PLAIN_TENSORS


def is_recorded() -> bool:
    """Whether something looks at the operations that run, which would not see a kernel launched outside of one."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0


def _is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether nothing watches or replaces these tensors, so that the dispatcher, which takes time, may be left out."""
    return not is_recorded() and all(type(x) in PLAIN_TENSORS for x in tensors)


def _flat(inputs: Sequence) -> list:
    return [x for entry in inputs for x in (entry if isinstance(entry, list) else [entry])]


def _tensors(inputs: Sequence) -> list[Tensor]:
    return [x for x in _flat(inputs) if isinstance(x, Tensor)]


def needs_grad(inputs: Sequence) -> bool:
    """Whether autograd records what is computed from these tensors and lists of tensors, beside other arguments."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(inputs))


def _refuse_to_differentiate(ctx, *grads):
    """The derivative of what has none, so that autograd raises instead of leaving this path out of a sum."""
    raise RuntimeError(
        "Gradients that kernels or fused operations of depthmix have computed cannot be differentiated again: "
        'ask for impl="reference", or depth_impl="reference" of a model.'
    )


def refuse_batches(tensors: Sequence[Tensor]) -> None:
    """
    Raises:
        `RuntimeError`: for what `is_grads_batched=True` makes of gradients. It has no memory that a kernel can read.
    """
    if any(torch._C._functorch.is_legacy_batchedtensor(tensor) for tensor in tensors):
        raise RuntimeError(
            "Kernels and fused operations of depthmix do not take batches of gradients (is_grads_batched=True of "
            'torch.autograd.grad): ask for impl="reference", or depth_impl="reference" of a model.'
        )


class _WithoutDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *tensors):
        return tuple(function())

    backward = staticmethod(_refuse_to_differentiate)


def without_derivative(function: Callable[[], Sequence[Tensor]], tensors: Sequence) -> Sequence[Tensor]:
    """
    What `function` computes from these tensors. Where gradients are recorded, as in a backward with `create_graph`,
    the results stay connected to the tensors, and to differentiate them is an error. Results that are not connected
    would count as constants, and second derivatives would silently be other numbers.
    """
    return _WithoutDerivative.apply(function, *tensors) if needs_grad(tensors) else function()


class Operation:
    """
    A function of tensors and lists of tensors that gives a list of tensors, also typed, for the compiler to see it. To
    differentiate it is an error.

    Args:
        function (callable): What runs.
        new_outputs (callable): With the same arguments, gives tensors like its results.
    """

    def __init__(self, function: Callable, new_outputs: Callable):
        self.function = function
        # A name belongs to one version of the code. Loading two saved models loads two copies of it, and with a common
        # namespace the second would take over the operations of the first.
        namespace = re.sub(r"\W", "_", function.__module__)
        self.typed = torch.library.custom_op(f"{namespace}::{function.__name__}", function, mutates_args=())
        self.typed.register_fake(new_outputs)
        self.typed.register_autograd(_refuse_to_differentiate)

    def __call__(self, *inputs) -> list[Tensor]:
        tensors = _tensors(inputs)
        if not _is_plain(tensors):
            return self.typed(*inputs)
        refuse_batches(tensors)
        return list(without_derivative(partial(self.function, *inputs), tensors))


class DifferentiableOperation(Operation):
    """
    One whose last argument, `training`, says whether a backward may follow, which may need another output. Some inputs
    are handed on as further outputs: who reads them from there leaves it to the backward to add up their gradients.

    Args:
        save, backward (callable): As `torch.library.register_autograd` takes them; the backward may get gradients of
            what is handed on, after those of the outputs. All inputs that gradients depend on must be saved, or
            outputs that depend on them, and the backward must compute from these by operations: so the gradients stay
            connected to the inputs, and differentiating them is an error.
        handed_on (callable, *optional*): Gives these, with the same arguments; by default there are none.
    """

    def __init__(
        self,
        function: Callable,
        new_outputs: Callable,
        save: Callable,
        backward: Callable,
        handed_on: Callable = lambda *inputs: [],
    ):
        super().__init__(function, new_outputs)
        self.save, self.backward, self.handed_on = save, backward, handed_on
        self.typed.register_autograd(backward, setup_context=save)

    def __call__(self, *inputs) -> list[Tensor]:
        tensors = _tensors(inputs)
        training = needs_grad(tensors)
        if not (training and _is_plain(tensors)):
            # A typed operation may not return its inputs, so they are handed on here.
            return [*super().__call__(*inputs, training), *self.handed_on(*inputs)]
        lengths = tuple(len(x) if isinstance(x, list) else None for x in inputs)
        return list(_PlainFunction.apply(self, lengths, *_flat(inputs)))


class _PlainFunction(torch.autograd.Function):
    """A differentiable operation without the dispatcher."""

    @staticmethod
    def forward(ctx, operation, lengths, *flat):
        flat = iter(flat)
        inputs = [next(flat) if length is None else [next(flat) for _ in range(length)] for length in lengths]
        outputs = operation.function(*inputs, True)
        operation.save(ctx, (*inputs, True), output=outputs)
        ctx.operation = operation
        return *outputs, *operation.handed_on(*inputs)

    @staticmethod
    def backward(ctx, *grads):
        grads = ctx.operation.backward(ctx, grads)[:-1]
        return None, None, *_flat(grads)
