# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Pure PyTorch form of manifold-constrained hyper-connections (mHC, arXiv 2512.24880): the definition that kernels are
judged against.

Legend: X any leading dimensions, S residual streams, D hidden size, M = S * (S + 2) entries of the three maps.
"""

import torch
from torch import Tensor

from .depth_precision import accumulation_dtype, without_autocast


SINKHORN_ORDERS = {"columns_first": (-2, -1), "rows_first": (-1, -2)}
_SMALLEST_SUM = 1e-12


def sinkhorn(logits_XSS: Tensor, iterations: int, order: str) -> Tensor:
    """`exp` of the logits, divided in turn by the sums of its rows and by those of its columns."""
    matrix_XSS = torch.exp(logits_XSS - logits_XSS.amax((-2, -1), keepdim=True)).clamp(min=_SMALLEST_SUM)
    for _ in range(iterations):
        for dim in SINKHORN_ORDERS[order]:
            matrix_XSS = matrix_XSS / matrix_XSS.sum(dim, keepdim=True).clamp(min=_SMALLEST_SUM)
    return matrix_XSS


def hyper_connection_maps(
    streams_XSD: Tensor,
    norm_weight: Tensor,
    projection: Tensor,
    *alphas_and_logits: Tensor,
    eps: float,
    iterations: int,
    order: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    The weights by which streams are read, `[X, S]`, those by which an update is written to them, `[X, S]`, and the
    matrix that mixes them, `[X, S, S]`, all in the dtype of the streams. To be called without autocast.
    """
    dtype, num_streams = streams_XSD.dtype, streams_XSD.shape[-2]
    flat_X = streams_XSD.flatten(-2)
    normed_X = flat_X * torch.rsqrt(flat_X.square().mean(-1, keepdim=True) + eps) * norm_weight.to(dtype)
    dynamic_XM = torch.nn.functional.linear(normed_X, projection.to(dtype))
    parts = dynamic_XM.split([num_streams, num_streams, num_streams**2], -1)
    alphas, logits = alphas_and_logits[:3], alphas_and_logits[3:]
    maps = [
        alpha.to(dtype) * part + logit.to(dtype).flatten()
        for alpha, part, logit in zip(alphas, parts, logits, strict=True)
    ]
    pre_XS, post_XS = torch.sigmoid(maps[0]), 2 * torch.sigmoid(maps[1])
    residual_XSS = sinkhorn(maps[2].unflatten(-1, (num_streams, num_streams)), iterations, order)
    return pre_XS, post_XS, residual_XSS


def hyper_connection_read_reference(
    streams: Tensor,
    *parameters: Tensor,
    eps: float,
    iterations: int,
    order: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a sub-layer reads, `[X, D]`, and how its output is written. See `hyper_connection_read`."""
    with without_autocast(streams):
        streams_XSD = streams.to(accumulation_dtype(streams))
        pre_XS, post_XS, residual_XSS = hyper_connection_maps(
            streams_XSD, *parameters, eps=eps, iterations=iterations, order=order
        )
        mixed_XD = (pre_XS.unsqueeze(-1) * streams_XSD).sum(-2)
    return mixed_XD.to(streams.dtype), residual_XSS, post_XS


def hyper_connection_write_reference(streams: Tensor, update: Tensor, residual: Tensor, post: Tensor) -> Tensor:
    """The streams after a sub-layer, `[X, S, D]`. See `hyper_connection_write`."""
    with without_autocast(streams):
        mixed_XSD = torch.matmul(residual, streams.to(residual.dtype))
        return torch.addcmul(mixed_XSD, post.unsqueeze(-1), update.unsqueeze(-2).to(post.dtype)).to(streams.dtype)


def stream_readout_reference(streams: Tensor, logits: Tensor) -> Tensor:
    """The average of the streams with these weights, `[X, D]`. See `stream_readout`."""
    dtype = accumulation_dtype(streams)
    shares_S1 = logits.to(dtype).softmax(-1).unsqueeze(-1)
    return (shares_S1 * streams.to(dtype)).sum(-2).to(streams.dtype)
