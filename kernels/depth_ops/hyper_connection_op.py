# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Manifold-constrained hyper-connections: public operations."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .depth_dispatch import Route, is_transformed, route
from .hyper_connection_reference import (
    SINKHORN_ORDERS,
    hyper_connection_read_reference,
    hyper_connection_write_reference,
    stream_readout_reference,
)
from .hyper_connection_triton import hyper_connection_obstacle, run_hyper_connection_read, run_hyper_connection_write


Result = TypeVar("Result")


def hyper_connection_read(
    streams: Tensor,
    norm_weight: Tensor,
    projection: Tensor,
    alphas: Sequence[Tensor],
    logits: Sequence[Tensor],
    *,
    eps: float,
    iterations: int = 20,
    order: str = "columns_first",
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""
    What a sub-layer reads from the residual streams, and the maps by which its output is written to them
    (manifold-constrained hyper-connections, mHC, arXiv 2512.24880, equations 7 to 9).

    With \\(z\\) the projection of the normalised streams, cut into its three parts, and \\(b\\) the `logits`,

    $$h = \sum_i \sigma(\alpha_1 z_1 + b_1)_i x_i, \qquad p = 2 \sigma(\alpha_2 z_2 + b_2), \qquad
    R = \mathrm{Sinkhorn}(\exp(\alpha_3 z_3 + b_3)).$$

    Args:
        streams (`torch.Tensor` of shape `[..., S, D]`):
            The residual streams.
        norm_weight (`torch.Tensor` of shape `[S * D]`):
            Gain of the RMS norm over all streams together, the first stream's channels first.
        projection (`torch.Tensor` of shape `[S * (S + 2), S * D]`):
            Its rows give the S weights for reading, the S for writing, and the matrix row by row.
        alphas (three `torch.Tensor` of one element), logits (`torch.Tensor` of shapes `[S]`, `[S]` and `[S, S]`):
            Factor of the projection, and what is added to it, for each of the three maps.
        eps (`float`):
            Added to the mean square in the norm.
        iterations (`int`, *optional*, defaults to 20), order (`str`, *optional*, defaults to `"columns_first"`):
            How often the matrix is divided by the sums of its columns and rows, and by which of them first.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"reference"` is pure PyTorch and runs anywhere. `"triton"` asks for kernels, for fp16, bf16 and fp32 on a
            GPU and up to 5 streams, whose gradients cannot be differentiated again. `"auto"` takes the kernels where
            they support the tensors, else the reference.

    Returns:
        \\(h\\), `[..., D]`, in the dtype of the streams; \\(R\\), `[..., S, S]`, and \\(p\\), `[..., S]`, in fp32
        (fp64 for fp64 inputs), in which everything is computed; then the streams. Whoever uses these from here on
        spares the backward an addition.

    Raises:
        `ValueError`: if shapes do not fit together, or there is no such order or `impl`.
        `RuntimeError`: if `impl="triton"` cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import hyper_connection_read

        >>> streams, norm_weight, projection = torch.ones(3, 4, 8), torch.ones(32), torch.randn(24, 32)
        >>> alphas, logits = [torch.zeros(1)] * 3, [torch.zeros(4), torch.zeros(4), torch.zeros(4, 4)]
        >>> hidden, residual, post, streams = hyper_connection_read(
        ...     streams, norm_weight, projection, alphas, logits, eps=1e-6
        ... )
        >>> hidden[0, :4], residual[0, 0], post[0]
        (tensor([2., 2., 2., 2.]), tensor([0.2500, 0.2500, 0.2500, 0.2500]), tensor([1., 1., 1., 1.]))
    """
    if order not in SINKHORN_ORDERS:
        raise ValueError(f"order={order!r}: must be one of {', '.join(SINKHORN_ORDERS)}.")
    num_streams, size = _check_streams(streams)
    expected = {
        "norm_weight": (norm_weight, (num_streams * size,)),
        "projection": (projection, (num_streams * (num_streams + 2), num_streams * size)),
        "logits[0]": (logits[0], (num_streams,)),
        "logits[1]": (logits[1], (num_streams,)),
        "logits[2]": (logits[2], (num_streams, num_streams)),
    }
    for i, alpha in enumerate(alphas):
        if alpha.numel() != 1:
            raise ValueError(f"alphas[{i}] has shape {list(alpha.shape)}: must be a single number.")
    _check_shapes(expected, num_streams, size)
    tensors = (streams, norm_weight, projection, *alphas, *logits)
    if route(impl, "hyper_connection_read", hyper_connection_obstacle(*tensors)) is Route.KERNEL:
        mixed, residual, post, *others = run_hyper_connection_read(
            *(streams, norm_weight, projection, list(alphas), list(logits)),
            *(eps, iterations, order == "columns_first"),
        )
        return mixed, residual, post, others[-1]
    function = partial(hyper_connection_read_reference, eps=eps, iterations=iterations, order=order)
    return *_recomputed(function, *tensors), streams


def hyper_connection_write(
    streams: Tensor, update: Tensor, residual: Tensor, post: Tensor, *, impl: str = "auto"
) -> Tensor:
    r"""
    The residual streams after a sub-layer, \\(x'_i = \sum_j R_{ij} x_j + p_i u\\) (equation 3 of
    arXiv 2512.24880).

    Args:
        streams (`torch.Tensor` of shape `[..., S, D]`):
            The streams that the sub-layer has read.
        update (`torch.Tensor` of shape `[..., D]`):
            The sub-layer's output.
        residual (`torch.Tensor` of shape `[..., S, S]`), post (`torch.Tensor` of shape `[..., S]`):
            \\(R\\) and \\(p\\) of [`hyper_connection_read`].
        impl: as there.

    Returns:
        `torch.Tensor` of shape `[..., S, D]` in the dtype of the streams, rounded once.

    Raises:
        `ValueError`: if shapes do not fit together, or there is no such `impl`.
        `RuntimeError`: if `impl="triton"` cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import hyper_connection_write

        >>> streams, update = torch.zeros(3, 2, 8), torch.ones(3, 8)
        >>> residual, post = torch.eye(2).expand(3, 2, 2), torch.tensor([1.0, 2.0]).expand(3, 2)
        >>> hyper_connection_write(streams, update, residual, post)[0, :, 0]
        tensor([1., 2.])
    """
    num_streams, size = _check_streams(streams)
    leading = streams.shape[:-2]
    expected = {
        "update": (update, (*leading, size)),
        "residual": (residual, (*leading, num_streams, num_streams)),
        "post": (post, (*leading, num_streams)),
    }
    _check_shapes(expected, num_streams, size)
    tensors = (streams, update, residual, post)
    if route(impl, "hyper_connection_write", hyper_connection_obstacle(*tensors)) is Route.KERNEL:
        return run_hyper_connection_write(*tensors)[0]
    return _recomputed(hyper_connection_write_reference, *tensors)


def _check_streams(streams: Tensor) -> torch.Size:
    if streams.ndim < 2:
        raise ValueError(f"streams has shape {list(streams.shape)}: must be [..., S, D].")
    return streams.shape[-2:]


def _check_shapes(expected: dict[str, tuple[Tensor, tuple[int, ...]]], num_streams: int, size: int) -> None:
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: must be {list(shape)} for {num_streams} streams of {size}."
            )


def _recomputed(function: Callable[..., Result], *tensors: Tensor) -> Result:
    """
    The function, of which the backward keeps the arguments only: its fp32 forms of the streams are several times as
    large as all else that a layer keeps. A compiler decides this by itself, and transforms know no recomputation.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or is_transformed():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


def stream_readout(streams: Tensor, logits: Tensor) -> Tensor:
    r"""
    What the final norm reads of the residual streams of [`hyper_connection_write`]: their average
    \\(\sum_i \mathrm{softmax}(b)_i x_i\\), with \\(b\\) the `logits`. With equal logits it is the mean.

    Args:
        streams (`torch.Tensor` of shape `[..., S, D]`):
            The streams after the last layer.
        logits (`torch.Tensor` of shape `[S]`):
            The weights before their softmax.

    Returns:
        `torch.Tensor` of shape `[..., D]` in the dtype of the streams, computed in fp32 (fp64 for fp64 inputs).

    Raises:
        `ValueError`: if shapes do not fit together.

    Example:

        >>> import torch
        >>> from depthmix.kernels import stream_readout

        >>> stream_readout(torch.tensor([[1.0, 1.0], [3.0, 3.0]]), torch.zeros(2))
        tensor([2., 2.])
    """
    num_streams, size = _check_streams(streams)
    _check_shapes({"logits": (logits, (num_streams,))}, num_streams, size)
    return _recomputed(stream_readout_reference, streams, logits)
