# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Pure PyTorch form of Mixture-of-Depths Attention: the definition that its kernels are judged against.

Legend: B batch, H query heads, K key-value heads, G = H / K, T tokens, S columns of the sequence, N depth slots,
D head dim.
"""

import torch
from torch import Tensor

from .depth_precision import accumulation_dtype, without_autocast


def moda_attention_weights_reference(
    query: Tensor,
    key: Tensor,
    depth_keys: Tensor,
    *,
    depth_query: Tensor | None,
    scaling: float,
    attention_mask: Tensor | None,
    is_causal: bool,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Softmax over sequence and depth, `[B, H, T, S + N]`, and its log-sum-exp `[B, H, T]`, in the accumulation dtype.
    See `moda_attention_weights`.
    """
    dtype = accumulation_dtype(query)
    depth_query = query if depth_query is None else depth_query
    query_BKGTD, depth_query_BKGTD = (
        x.to(dtype).unflatten(1, (key.shape[1], -1)) * scaling for x in (query, depth_query)
    )
    with without_autocast(query):
        sequence_BHTS = torch.einsum("bkgtd,bksd->bkgts", query_BKGTD, key.to(dtype)).flatten(1, 2)
        depth_BHTN = torch.einsum("bkgtd,nbtkd->bkgtn", depth_query_BKGTD, depth_keys.to(dtype)).flatten(1, 2)
    if attention_mask is None and is_causal:
        tokens, length = sequence_BHTS.shape[-2:]
        attention_mask = causal_mask(tokens, length, query.device)
    if attention_mask is not None:
        if attention_mask.dtype is torch.bool:
            sequence_BHTS = sequence_BHTS.masked_fill(~attention_mask, float("-inf"))
        else:
            sequence_BHTS = sequence_BHTS + attention_mask.to(dtype)
    logits_BHTX = torch.cat([sequence_BHTS, depth_BHTN], dim=-1)
    log_sum_exp_BHT = logits_BHTX.detach().logsumexp(-1)
    # A row that sees nothing has no softmax, and gets weights of zero.
    empty_BHT1 = log_sum_exp_BHT.isneginf().unsqueeze(-1)
    weights_BHTX = logits_BHTX.masked_fill(empty_BHT1, 0.0).softmax(-1).masked_fill(empty_BHT1, 0.0)
    if gate is not None:
        unseen_BHT1 = sequence_BHTS.detach().isneginf().all(-1, keepdim=True)
        alone_BHTS = sequence_BHTS.masked_fill(unseen_BHT1, 0.0).softmax(-1).masked_fill(unseen_BHT1, 0.0)
        gate_H11, length = gate.to(dtype)[:, None, None], alone_BHTS.shape[-1]
        shared_BHTX = gate_H11 * weights_BHTX
        sequence_BHTS = (1 - gate_H11) * alone_BHTS + shared_BHTX[..., :length]
        weights_BHTX = torch.cat([sequence_BHTS, shared_BHTX[..., length:]], dim=-1)
    return weights_BHTX, log_sum_exp_BHT


def moda_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    depth_keys: Tensor,
    depth_values: Tensor,
    *,
    depth_query: Tensor | None,
    scaling: float,
    attention_mask: Tensor | None,
    is_causal: bool,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Values averaged with these weights, `[B, H, T, D]`, and the log-sum-exp `[B, H, T]`. See `moda_attention`."""
    weights_BHTX, log_sum_exp_BHT = moda_attention_weights_reference(
        query,
        key,
        depth_keys,
        depth_query=depth_query,
        scaling=scaling,
        attention_mask=attention_mask,
        is_causal=is_causal,
        gate=gate,
    )
    dtype, length = weights_BHTX.dtype, key.shape[2]
    weights_BKGTX = weights_BHTX.unflatten(1, (key.shape[1], -1))
    with without_autocast(query):
        output_BKGTD = torch.einsum("bkgts,bksd->bkgtd", weights_BKGTX[..., :length], value.to(dtype))
        output_BKGTD = output_BKGTD + torch.einsum(
            "bkgtn,nbtkd->bkgtd", weights_BKGTX[..., length:], depth_values.to(dtype)
        )
    return output_BKGTD.flatten(1, 2).to(query.dtype), log_sum_exp_BHT


def causal_mask(tokens: int, length: int, device: torch.device) -> Tensor:
    """`[T, S]`: what the last `tokens` tokens of a sequence of this length see of it."""
    return torch.ones(tokens, length, dtype=torch.bool, device=device).tril(length - tokens)
