# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Pure PyTorch form of Attention Residuals (arXiv 2603.15031): the definition that every kernel is judged against.

Legend: X any leading dimensions, D hidden size, N sources (the running sum of a block last), S sites of a block.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from .depth_precision import accumulation_dtype, mix_dtype


def _rms_norm(x_XD: Tensor, eps: float) -> Tensor:
    """The RMS norm without a gain, in fp32 (fp64 for fp64)."""
    x_XD = x_XD.to(accumulation_dtype(x_XD))
    return x_XD * torch.rsqrt(x_XD.square().mean(-1, keepdim=True) + eps)


def _logits(
    sources: Sequence[Tensor], pseudo_query: Tensor, norm_weight: Tensor | None, *, eps: float, bias: Tensor | None
) -> Tensor:
    dtype = accumulation_dtype(*sources)
    query_D = pseudo_query.to(dtype)
    if norm_weight is not None:
        query_D = query_D * norm_weight.to(dtype)
    # Autocast would round the inputs of a matrix product. It leaves products and sums in fp32.
    logits = [(_rms_norm(source_XD.to(dtype), eps) * query_D).sum(-1) for source_XD in sources]
    if bias is not None:
        logits[-1] = logits[-1] + bias.to(dtype).reshape(())
    return torch.stack(logits, dim=-1)


def _finish(
    mixed_XD: Tensor, factor: int, output_norm_weight: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    mixed_XD = mixed_XD * factor
    if output_norm_weight is not None:
        mixed_XD = _rms_norm(mixed_XD, eps) * output_norm_weight.to(mixed_XD.dtype)
    return mixed_XD.to(dtype)


def attn_res_weights_reference(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    norm_weight: Tensor | None,
    *,
    eps: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Softmax over the sources, `[X, N]`. See `attn_res_weights`."""
    return _logits(sources, pseudo_query, norm_weight, eps=eps, bias=bias).softmax(-1)


def attn_res_reference(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    norm_weight: Tensor | None,
    *,
    eps: float,
    bias: Tensor | None = None,
    scale: str = "mean",
    output_norm_weight: Tensor | None = None,
) -> Tensor:
    """The sources averaged with these weights, `[X, D]`. See `attn_res`."""
    weights_XN = attn_res_weights_reference(sources, pseudo_query, norm_weight, eps=eps, bias=bias)
    weighted = (weights_XN[..., i : i + 1] * source_XD.to(weights_XN.dtype) for i, source_XD in enumerate(sources))
    mixed_XD = reduce(torch.add, weighted)
    factor = len(sources) if scale == "sum" else 1
    return _finish(mixed_XD, factor, output_norm_weight, eps, mix_dtype(*sources))


def attn_res_additive_reference(
    stream: Tensor,
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    norm_weight: Tensor | None,
    *,
    eps: float,
    bias: Tensor | None = None,
    scale: str = "mean",
) -> Tensor:
    """The stream and what the mix of the sources has beyond their mean, `[X, D]`. See `attn_res_additive`."""
    weights_XN = attn_res_weights_reference(sources, pseudo_query, norm_weight, eps=eps, bias=bias)
    # what equal logits give, from the same softmax: the difference is zero then, and not nearly so
    beyond_XN = (weights_XN - torch.zeros_like(weights_XN).softmax(-1)) * (len(sources) if scale == "sum" else 1)
    weighted = (beyond_XN[..., i : i + 1] * source_XD.to(beyond_XN.dtype) for i, source_XD in enumerate(sources))
    return (stream.to(beyond_XN.dtype) + reduce(torch.add, weighted)).to(stream.dtype)


def attn_res_phase_1_reference(
    sources: Sequence[Tensor], pseudo_queries: Sequence[Tensor], norm_weights: Sequence[Tensor] | None, *, eps: float
) -> tuple[list[Tensor], list[Tensor]]:
    """For each site the mix of the finished blocks, `[X, D]`, and its log-sum-exp, `[X]`. See `attn_res_phase_1`."""
    outputs, log_sum_exps = [], []
    for site, query_D in enumerate(pseudo_queries):
        gain_D = None if norm_weights is None else norm_weights[site]
        logits_XN = _logits(sources, query_D, gain_D, eps=eps, bias=None)
        weights_XN = logits_XN.softmax(-1)
        weighted = (weights_XN[..., i : i + 1] * source_XD for i, source_XD in enumerate(sources))
        output_XD = reduce(torch.add, weighted)
        outputs.append(output_XD.to(mix_dtype(*sources)))
        log_sum_exps.append(logits_XN.logsumexp(-1))
    return outputs, log_sum_exps


def attn_res_phase_2_reference(
    output: Tensor,
    log_sum_exp: Tensor,
    partial: Tensor,
    pseudo_query: Tensor,
    norm_weight: Tensor | None,
    *,
    eps: float,
    bias: Tensor | None = None,
    factor: int = 1,
    output_norm_weight: Tensor | None = None,
) -> Tensor:
    """Merges the running sum `partial` into phase 1's `output`, `[X, D]`. See `attn_res_phase_2`."""
    logit_X1 = _logits([partial], pseudo_query, norm_weight, eps=eps, bias=bias)
    # This is a softmax over two sources, one of which stands for all finished blocks.
    weight_X1 = torch.sigmoid(logit_X1 - log_sum_exp.unsqueeze(-1))
    mixed_XD = (1 - weight_X1) * output.to(weight_X1.dtype) + weight_X1 * partial.to(weight_X1.dtype)
    return _finish(mixed_XD, factor, output_norm_weight, eps, mix_dtype(output, partial))
