# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Mixture-of-Depths Attention as two parts of one softmax: an attention over the sequence, which PyTorch has, and the
depth slots, which are merged into it by its log-sum-exp. In the backward, both take the merged output and log-sum-exp,
which makes their gradients those of the joint softmax.

Slots are tensors `[n, B, T, K, D]` that follow one another; what is joined for a kernel is not kept for the backward.

Legend: B batch, H query heads, K key-value heads, G = H / K, T tokens, S columns, N slots, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .depth_launch import new_heads_like, new_like
from .depth_precision import accumulation_dtype, without_autocast
from .moda_attention_triton import decode_forward, depth_merge_backward, depth_merge_forward
from .moda_sequence_attention import in_token_order, sequence_attention_backward, sequence_attention_forward
from .typed_operations import DifferentiableOperation, Operation


def moda_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    depth_keys: Sequence[Tensor],
    depth_values: Sequence[Tensor],
    depth_query: Tensor | None,
    attention_mask: Tensor | None,
    scaling: float,
    is_causal: bool,
    implementation: str,
    training: bool = False,
) -> list[Tensor]:
    """Output `[B, H, T, D]` and log-sum-exp `[B, H, T]`; `implementation` as `choose` gives it."""
    keys, values = _joined(depth_keys), _joined(depth_values)
    if implementation == "decode":
        return decode_forward(query, key, value, keys, values, depth_query, attention_mask, scaling, is_causal)
    with without_autocast(query):
        output, log_sum_exp = sequence_attention_forward(query, key, value, attention_mask, scaling, is_causal)
        if keys is None or values is None:
            return [in_token_order(output), log_sum_exp.contiguous()]
        merge = depth_merge_forward if implementation == "triton" else _depth_merge_forward
        return merge(query if depth_query is None else depth_query, keys, values, output, log_sum_exp, scaling)


def moda_attention_backward(
    output_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    depth_keys: Sequence[Tensor],
    depth_values: Sequence[Tensor],
    depth_query: Tensor | None,
    attention_mask: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    scaling: float,
    is_causal: bool,
    implementation: str,
) -> list[Tensor]:
    """
    Gradients of query, key and value, then, if there are slots, of their keys and values `[N, B, T, K, D]`, then, if
    it is given, of the depth query.
    """
    keys, values = _joined(depth_keys), _joined(depth_values)
    slot_grads = [] if keys is None or values is None else [new_like(keys), new_like(values)]
    query_grads = joint_backward(
        output_grad,
        (query, key, value, keys, values, depth_query, attention_mask),
        output,
        log_sum_exp,
        scaling,
        is_causal,
        implementation,
        slot_grads,
        None if keys is None else keys.shape[0],
    )
    return [*query_grads[:3], *slot_grads, *query_grads[3:]]


def joint_backward(
    output_grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    output: Tensor,
    log_sum_exp: Tensor,
    scaling: float,
    is_causal: bool,
    implementation: str,
    slot_grads: Sequence[Tensor],
    fresh: int | None,
) -> list[Tensor]:
    """
    Returns the gradients of query, key, value and, if given, depth query, which are `inputs` with the slots' keys and
    values and the mask. Those of the slots are stored into the first `fresh` of `slot_grads`, keys' and values', and
    added to the others.
    """
    query, key, value, keys, values, depth_query, attention_mask = inputs
    with without_autocast(query):
        query_grad, key_grad, value_grad = map(
            in_token_order,
            sequence_attention_backward(
                output_grad, query, key, value, output, log_sum_exp, attention_mask, scaling, is_causal
            ),
        )
        grads = [query_grad, key_grad, value_grad]
        if depth_query is not None:
            grads.append(torch.zeros_like(query_grad) if keys is None else torch.empty_like(query_grad))
        if keys is not None and values is not None and fresh is not None:
            keys_grad, values_grad = slot_grads
            backward = depth_merge_backward if implementation == "triton" else _depth_merge_backward
            backward(
                output_grad,
                query if depth_query is None else depth_query,
                keys,
                values,
                output,
                log_sum_exp,
                scaling,
                grads[-1] if depth_query is not None else query_grad,
                depth_query is None,
                keys_grad,
                values_grad,
                fresh,
            )
    return grads


def _depth_merge_forward(
    query: Tensor, keys: Tensor, values: Tensor, output: Tensor, log_sum_exp: Tensor, scaling: float
) -> list[Tensor]:
    """Does what `depth_merge_forward` does, without Triton."""
    scores_BHTN = _depth_scores(query, keys, scaling)
    depth_BHT = scores_BHTN.logsumexp(-1)
    merged_BHT = torch.logaddexp(log_sum_exp, depth_BHT)
    weights_BKGTN = (scores_BHTN - merged_BHT.unsqueeze(-1)).exp().unflatten(1, (keys.shape[3], -1))
    depth_BKGTD = torch.einsum("bkgtn,nbtkd->bkgtd", weights_BKGTN, values.to(weights_BKGTN.dtype))
    sequence_BHT1 = (log_sum_exp - merged_BHT).exp().unsqueeze(-1)
    merged = depth_BKGTD.flatten(1, 2) + sequence_BHT1 * output
    return [in_token_order(merged.to(query.dtype)), merged_BHT.contiguous()]


def _depth_merge_backward(
    output_grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    scaling: float,
    query_grad: Tensor,
    accumulate: bool,
    key_grads: Tensor,
    value_grads: Tensor,
    fresh: int,
) -> None:
    """Does what `depth_merge_backward` does, without Triton."""
    kv_heads, dtype = keys.shape[3], accumulation_dtype(query)
    query_BKGTD, grad_BKGTD, output_BKGTD = (
        x.to(dtype).unflatten(1, (kv_heads, -1)) for x in (query, output_grad, output)
    )
    weights_BHTN = (_depth_scores(query, keys, scaling) - log_sum_exp.unsqueeze(-1)).exp()
    weights_BKGTN = weights_BHTN.unflatten(1, (kv_heads, -1))
    products_BKGTN = torch.einsum("bkgtd,nbtkd->bkgtn", grad_BKGTD, values.to(dtype))
    delta_BKGT1 = (grad_BKGTD * output_BKGTD).sum(-1, keepdim=True)
    score_grads_BKGTN = weights_BKGTN * (products_BKGTN - delta_BKGT1) * scaling
    depth_part = torch.einsum("bkgtn,nbtkd->bkgtd", score_grads_BKGTN, keys.to(dtype)).flatten(1, 2)
    query_grad.copy_(query_grad + depth_part if accumulate else depth_part)
    for slots, grads in (
        (key_grads, torch.einsum("bkgtn,bkgtd->nbtkd", score_grads_BKGTN, query_BKGTD)),
        (value_grads, torch.einsum("bkgtn,bkgtd->nbtkd", weights_BKGTN, grad_BKGTD)),
    ):
        slots[:fresh] = grads[:fresh].to(slots.dtype)
        slots[fresh:] += grads[fresh:]


def _depth_scores(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    query_BKGTD = query.to(accumulation_dtype(query)).unflatten(1, (keys.shape[3], -1))
    return torch.einsum("bkgtd,nbtkd->bkgtn", query_BKGTD, keys.to(query_BKGTD.dtype)).flatten(1, 2) * scaling


def _joined(slots: Sequence[Tensor]) -> Tensor | None:
    if len(slots) <= 1:
        return slots[0] if slots else None
    return torch.cat(list(slots))


def _new_outputs(query: Tensor) -> list[Tensor]:
    return [new_heads_like(query), query.new_empty(query.shape[:3], dtype=accumulation_dtype(query))]


def _new_grads(output_grad, query, key, value, depth_keys, depth_values, depth_query, *_) -> list[Tensor]:
    slots = [
        tensors[0].new_empty((sum(x.shape[0] for x in tensors), *tensors[0].shape[1:]))
        for tensors in (depth_keys, depth_values)
        if tensors
    ]
    depth_query_grads = [] if depth_query is None else [new_heads_like(query)]
    return [*map(new_heads_like, (query, key, value)), *slots, *depth_query_grads]


def _save_for_backward(ctx, inputs, output):
    query, key, value, keys, values, depth_query, attention_mask, *ctx.constants, _ = inputs
    ctx.entries = len(keys)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, depth_query, attention_mask, *output, *keys, *values)


def _backward(ctx, grads):
    query, key, value, depth_query, attention_mask, output, log_sum_exp, *slots = ctx.saved_tensors
    keys, values = slots[: ctx.entries], slots[ctx.entries :]
    query_grad, key_grad, value_grad, *grads = _run_backward(
        *(grads[0], query, key, value, keys, values, depth_query, attention_mask, output, log_sum_exp, *ctx.constants)
    )
    slot_grads = [list(x.split([slots.shape[0] for slots in keys])) for x in grads[:2]] if keys else [[], []]
    depth_query_grad = None if depth_query is None else grads[-1]
    return query_grad, key_grad, value_grad, *slot_grads, depth_query_grad, *(None,) * 5


_run_backward = Operation(moda_attention_backward, _new_grads)
run_moda_attention = DifferentiableOperation(
    moda_attention_forward, lambda query, *_: _new_outputs(query), _save_for_backward, _backward
)
