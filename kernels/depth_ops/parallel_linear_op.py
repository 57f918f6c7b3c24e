# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Linear maps of the same hidden states whose backward adds their gradients up in the matrix products themselves.

The products are PyTorch's, so there is no kernel here. Without it autograd adds the gradients of the hidden states up
map by map, reading two of them and writing one each time, and rounding.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import linear

from .depth_launch import as_rows, new_like
from .typed_operations import DifferentiableOperation, Operation


def parallel_linear(hidden_states: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    r"""
    Several linear maps \\(W_i x\\) of the same hidden states, for training.

    Args:
        hidden_states (`torch.Tensor` of shape `[..., D]`):
            What all maps are applied to.
        weights (sequence of `torch.Tensor` of shape `[D_i, D]`):
            The matrices of the maps, of the same dtype.

    Returns:
        One `torch.Tensor` of shape `[..., D_i]` for each map, as `torch.nn.functional.linear` gives it. The gradient
        of the hidden states is one sum, and differentiating gradients again is an error.
    """
    return _run(hidden_states, list(weights))


def parallel_linear_forward(hidden_states: Tensor, weights: list[Tensor], training: bool = False) -> list[Tensor]:
    return [linear(hidden_states, weight) for weight in weights]


def parallel_linear_backward(
    output_grads: list[Tensor], hidden_states: Tensor, weights: list[Tensor], wanted: list[bool]
) -> list[Tensor]:
    """The gradients that are wanted: of the hidden states, and then of each weight."""
    grads_TE, grads = [as_rows(grad) for grad in output_grads], []
    if wanted[0]:
        sum_TD = grads_TE[0] @ weights[0]
        for grad_TE, weight in zip(grads_TE[1:], weights[1:], strict=True):
            sum_TD.addmm_(grad_TE, weight)
        grads.append(sum_TD.view(hidden_states.shape))
    rows_TD = as_rows(hidden_states)
    for grad_TE, is_wanted in zip(grads_TE, wanted[1:], strict=True):
        if is_wanted:
            grads.append(grad_TE.t() @ rows_TD)
    return grads


def _save(ctx, inputs, output):
    hidden_states, weights, _ = inputs
    ctx.wanted = [tensor.requires_grad for tensor in (hidden_states, *weights)]
    ctx.save_for_backward(hidden_states, *weights)


def _backward(ctx, output_grads):
    hidden_states, *weights = ctx.saved_tensors
    hidden_wanted, *weights_wanted = ctx.wanted
    # an output that nobody has read has no gradient
    read = [i for i, grad in enumerate(output_grads) if grad is not None]
    weight_grads: list[Tensor | None] = [None] * len(weights)
    if not read:
        return None, weight_grads, None
    wanted = [hidden_wanted, *(weights_wanted[i] for i in read)]
    found = iter(_run_backward([output_grads[i] for i in read], hidden_states, [weights[i] for i in read], wanted))
    hidden_grad = next(found) if hidden_wanted else None
    for i in read:
        if weights_wanted[i]:
            weight_grads[i] = next(found)
    return hidden_grad, weight_grads, None


_run_backward = Operation(
    parallel_linear_backward,
    lambda output_grads, hidden_states, weights, wanted: [
        new_like(tensor) for tensor, is_wanted in zip((hidden_states, *weights), wanted, strict=True) if is_wanted
    ],
)
_run = DifferentiableOperation(
    parallel_linear_forward,
    lambda hidden_states, weights, *_: [
        hidden_states.new_empty((*hidden_states.shape[:-1], weight.shape[0])) for weight in weights
    ],
    _save,
    _backward,
)
