# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Linear maps of one token: public operation."""

from collections.abc import Sequence

from torch import Tensor

from .depth_dispatch import Route, route
from .shared_input_linear_reference import shared_input_linear_reference
from .shared_input_linear_triton import run_shared_input_linear, shared_input_linear_obstacle


def shared_input_linear(hidden_states: Tensor, weights: Sequence[Tensor], *, impl: str = "auto") -> list[Tensor]:
    r"""
    Several linear maps \\(W_i x\\) of the same hidden states, for decoding: a token's products take as long as reading
    the weights, and each product of a library besides what it costs to start one.

    Args:
        hidden_states (`torch.Tensor` of shape `[..., D]`):
            What all maps are applied to.
        weights (sequence of `torch.Tensor` of shape `[D_i, D]`):
            The matrices of the maps, of the same dtype.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"reference"` is pure PyTorch and runs anywhere. `"triton"` is one kernel for all maps that reads each
            weight once, for a single row of hidden states in fp16, bf16 or fp32 on a GPU; it has no gradient. `"auto"`
            is the kernel where it supports the tensors, else the reference.

    Returns:
        One `torch.Tensor` of shape `[..., D_i]` for each map, in the dtype of the hidden states. Products are added up
        in fp32 (fp64 for fp64 inputs) and rounded once.

    Raises:
        `ValueError`: if shapes or dtypes do not fit together, or `impl` is unknown.
        `RuntimeError`: if `impl="triton"` cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import shared_input_linear

        >>> query, key = shared_input_linear(torch.ones(1, 1, 8), [torch.ones(16, 8), torch.zeros(4, 8)])
        >>> query.shape, key.shape, query[0, 0, 0]
        (torch.Size([1, 1, 16]), torch.Size([1, 1, 4]), tensor(8.))
    """
    for i, weight in enumerate(weights):
        if weight.shape[1:] != hidden_states.shape[-1:] or weight.dtype is not hidden_states.dtype:
            raise ValueError(
                f"weights[{i}] has shape {list(weight.shape)} and dtype {weight.dtype}: must be [D_i, D] for hidden "
                f"states [..., D], which have shape {list(hidden_states.shape)} and dtype {hidden_states.dtype}."
            )
    if not weights:
        raise ValueError("weights is empty: there must be at least one.")
    obstacle = shared_input_linear_obstacle(hidden_states, weights)
    if route(impl, "shared_input_linear", obstacle) is Route.KERNEL:
        return run_shared_input_linear(hidden_states, list(weights))
    return shared_input_linear_reference(hidden_states, weights)
