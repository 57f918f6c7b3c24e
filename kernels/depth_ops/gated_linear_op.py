# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The gated activation of a feed-forward network, alone and with the linear map after it: public operations."""

from torch import Tensor

from .depth_dispatch import Route, route
from .gated_linear_reference import gated_linear_reference, gated_product_reference
from .gated_linear_triton import gated_obstacle, run_gated_linear, run_gated_product


def gated_product(gate: Tensor, up: Tensor, *, impl: str = "auto") -> Tensor:
    r"""
    The product \\(\mathrm{silu}(g) \odot u\\) of a gated feed-forward network (SwiGLU, arXiv 2002.05202). For the
    backward gate and up are kept, and nothing between.

    Args:
        gate, up (`torch.Tensor` of shape `[..., C]`):
            What the activation is applied to, and its factor; of one shape and dtype.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"reference"` is pure PyTorch and runs anywhere. `"triton"` is one kernel forward and one backward, for
            fp16, bf16 and fp32 on a GPU, whose gradients cannot be differentiated again. `"auto"` is the kernel where
            it supports the tensors, else the reference.

    Returns:
        `torch.Tensor` of the same shape and dtype, computed in fp32 (fp64 for fp64 inputs) and rounded once.

    Raises:
        `ValueError`: if shapes or dtypes differ, or `impl` is unknown.
        `RuntimeError`: if `impl="triton"` cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import gated_product

        >>> gated_product(torch.zeros(2, 3), torch.ones(2, 3))[0]
        tensor([0., 0., 0.])
    """
    check_gate(gate, up)
    if route(impl, "gated_product", gated_obstacle(gate, up)) is Route.KERNEL:
        return run_gated_product(gate, up)[0]
    return gated_product_reference(gate, up)


def gated_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, *, impl: str = "auto"
) -> Tensor:
    r"""
    The linear map \\(W (\mathrm{silu}(g) \odot u) + b\\) with which a gated feed-forward network (SwiGLU,
    arXiv 2002.05202) ends. Its backward needs the product for the gradient of the weight. The kernel writes it again
    there, beside the gradients of gate and up, so that it takes no memory between forward and backward.

    Args:
        gate, up (`torch.Tensor` of shape `[..., C]`):
            As for `gated_product`.
        weight (`torch.Tensor` of shape `[D, C]`), bias (`torch.Tensor` of shape `[D]`, *optional*):
            Of the linear map, in the dtype of the gate.
        impl (`str`, *optional*, defaults to `"auto"`):
            As for `gated_product`. The matrix products are PyTorch's in all of them.

    Returns:
        `torch.Tensor` of shape `[..., D]`, in the same dtype. The product is computed in fp32 (fp64 for fp64 inputs)
        and rounded before the map.

    Raises:
        `ValueError`: if shapes or dtypes do not fit together, or `impl` is unknown.
        `RuntimeError`: if `impl="triton"` cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import gated_linear

        >>> gated_linear(torch.full((2, 3), 100.0), torch.ones(2, 3), torch.eye(3))[0]
        tensor([100., 100., 100.])
    """
    check_gate(gate, up)
    sizes = (weight.shape[:1], gate.shape[-1:])
    if weight.ndim != 2 or weight.shape[1:] != sizes[1] or weight.dtype is not gate.dtype:
        raise ValueError(
            f"weight has shape {list(weight.shape)} and dtype {weight.dtype}: must be [D, C] for a gate [..., C], "
            f"which has shape {list(gate.shape)} and dtype {gate.dtype}."
        )
    if bias is not None and (bias.shape != sizes[0] or bias.dtype is not gate.dtype):
        raise ValueError(
            f"bias has shape {list(bias.shape)} and dtype {bias.dtype}: must be {list(sizes[0])} for a weight of "
            f"shape {list(weight.shape)}, in the dtype of the gate, {gate.dtype}."
        )
    if route(impl, "gated_linear", gated_obstacle(gate, up, weight, bias)) is Route.KERNEL:
        return run_gated_linear(gate, up, weight, bias)[0]
    return gated_linear_reference(gate, up, weight, bias)


def check_gate(gate: Tensor, up: Tensor) -> None:
    """
    Raises:
        `ValueError`: if shapes or dtypes differ.
    """
    if gate.shape != up.shape or gate.dtype is not up.dtype or gate.ndim == 0:
        raise ValueError(
            f"gate has shape {list(gate.shape)} and dtype {gate.dtype}, up {list(up.shape)} and {up.dtype}: both must "
            "be [..., C], of one dtype."
        )
