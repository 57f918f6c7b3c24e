# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The depth-weighted average of DenseFormer (arXiv 2402.02622): public entry point."""

from collections.abc import Sequence

from torch import Tensor

from .depth_average_reference import depth_average_reference


def depth_average(sources: Sequence[Tensor], weight: Tensor) -> Tensor:
    r"""
    The sum \\(\sum_i w_i x_i\\) of hidden states of several depths (equation 2 of the paper).

    Args:
        sources (sequence of `torch.Tensor` of shape `[..., D]`):
            Hidden states, all of one shape.
        weight (`torch.Tensor` of shape `[len(sources)]`):
            Their weights, any numbers.

    Returns:
        `torch.Tensor` of the sources' shape, in the dtype of the last one. The sum is computed in fp32 (fp64 for fp64
        inputs) and rounded once.

    Raises:
        `ValueError`: if shapes do not fit together.
    """
    check_average(sources, weight)
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
