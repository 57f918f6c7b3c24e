# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The depth-weighted average of DenseFormer: public operation."""

from collections.abc import Sequence

from torch import Tensor

from .depth_average_reference import depth_average_reference
from .depth_average_triton import depth_average_obstacle, run_depth_average
from .depth_dispatch import Route, route


def depth_average(sources: Sequence[Tensor], weight: Tensor, *, impl: str = "auto") -> Tensor:
    r"""
    The sum \\(\sum_i w_i x_i\\) of hidden states of several depths (DenseFormer,
    arXiv 2402.02622, equation 2).

    Args:
        sources (sequence of `torch.Tensor` of shape `[..., D]`):
            Hidden states, all of one shape.
        weight (`torch.Tensor` of shape `[len(sources)]`):
            The weights of the sources, any numbers.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"reference"` is pure PyTorch and runs anywhere. `"triton"` is one kernel that reads each source once, for
            fp16, bf16 and fp32 on a GPU and up to 128 sources, whose gradients cannot be differentiated again.
            `"auto"` is the kernel where it supports the tensors, else the reference.

    Returns:
        `torch.Tensor` of the sources' shape, in the dtype of the last one. The sum is computed in fp32 (fp64 for fp64
        inputs) and rounded once.

    Raises:
        `ValueError`: if shapes do not fit together, or `impl` is unknown.
        `RuntimeError`: if `impl="triton"` cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import depth_average

        >>> depth_average([torch.ones(2, 8), torch.full((2, 8), 3.0)], torch.tensor([1.0, -2.0]))[0, :4]
        tensor([-5., -5., -5., -5.])
    """
    check_average(sources, weight)
    if route(impl, "depth_average", depth_average_obstacle(sources, weight), sources[-1]) is Route.KERNEL:
        return run_depth_average(list(sources), weight)[0]
    return depth_average_reference(sources, weight)


def check_average(sources: Sequence[Tensor], weight: Tensor) -> None:
    """
    Raises:
        `ValueError`: if the shapes do not fit together.
    """
    if not sources or weight.shape != (len(sources),):
        raise ValueError(
            f"{len(sources)} sources, weight of shape {list(weight.shape)}: there must be one weight for each source, "
            "and at least one."
        )
    for i, source in enumerate(sources):
        if source.shape != sources[-1].shape:
            raise ValueError(
                f"sources[{i}] has shape {list(source.shape)}: all must have that of the last one, "
                f"{list(sources[-1].shape)}."
            )
