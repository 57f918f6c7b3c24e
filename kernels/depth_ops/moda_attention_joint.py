# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Mixture-of-Depths Attention as two parts of one softmax: an attention over the sequence, which PyTorch has, and the
depth slots, which are merged into it by its log-sum-exp. In the backward, both take the merged output and log-sum-exp,
which makes their gradients those of the joint softmax.

With a gate the output is a blend of the attention without and with slots. That the weight of the slots in it depends
on the log-sum-exp of the sequence is then folded into the output that the backward of the sequence takes, which so
remains one call; that of the slots takes the joint softmax, and the gradient times the gate.

Slots are tensors `[n, B, T, K, D]` that follow one another; what is joined for a kernel is not kept for the backward.

Legend: B batch, H query heads, K key-value heads, G = H / K, T tokens, S columns, N slots, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .depth_launch import new_heads_like, new_like
from .depth_precision import accumulation_dtype, without_autocast
from .moda_attention_triton import decode_forward, depth_merge_backward, depth_merge_forward, ungated
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
    gate: Tensor | None,
    scaling: float,
    is_causal: bool,
    implementation: str,
    training: bool = False,
) -> list[Tensor]:
    """
    Output `[B, H, T, D]` and log-sum-exp `[B, H, T]`; `implementation` as `choose` gives it. Of a gated one, if
    `training`, also the output and log-sum-exp of the sequence alone, and the joint output.
    """
    keys, values = _joined(depth_keys), _joined(depth_values)
    if implementation == "decode":
        inputs = (query, key, value, keys, values, depth_query, attention_mask, gate)
        return decode_forward(*inputs, scaling, is_causal)
    with without_autocast(query):
        output, log_sum_exp = sequence_attention_forward(query, key, value, attention_mask, scaling, is_causal)
        if keys is None or values is None:
            return [in_token_order(output), log_sum_exp.contiguous()]
        merge = depth_merge_forward if implementation == "triton" else merge_without_kernels
        slots = (query if depth_query is None else depth_query, keys, values)
        blended, joint_log_sum_exp, *joint = merge(*slots, output, log_sum_exp, gate, scaling, training)
        parts = [in_token_order(output), log_sum_exp.contiguous(), *joint] if joint else []
        return [blended, joint_log_sum_exp, *parts]


def moda_attention_backward(
    output_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    depth_keys: Sequence[Tensor],
    depth_values: Sequence[Tensor],
    depth_query: Tensor | None,
    attention_mask: Tensor | None,
    gate: Tensor | None,
    outputs: Sequence[Tensor],
    scaling: float,
    is_causal: bool,
    implementation: str,
) -> list[Tensor]:
    """
    Gradients of query, key and value, then, if there are slots, of their keys and values `[N, B, T, K, D]`, then, if
    they are given, of the depth query and of the gate, the latter in fp32. `outputs` is what the forward returned.
    """
    keys, values = _joined(depth_keys), _joined(depth_values)
    slot_grads = [] if keys is None or values is None else [new_like(keys), new_like(values)]
    query_grads = joint_backward(
        output_grad,
        (query, key, value, keys, values, depth_query, attention_mask, gate),
        outputs,
        scaling,
        is_causal,
        implementation,
        slot_grads,
        None if keys is None else keys.shape[0],
    )
    return [*query_grads[:3], *slot_grads, *query_grads[3:]]


def joint_backward(
    output_grad: Tensor,
    inputs: tuple,
    outputs: Sequence[Tensor],
    scaling: float,
    is_causal: bool,
    implementation: str,
    slot_grads: Sequence[Tensor],
    fresh: int | None,
) -> list[Tensor]:
    """
    Returns the gradients of query, key, value and, if given, depth query and gate, which are `inputs` with the slots'
    keys and values and the mask, as the forward takes them; `outputs` is what that has returned. Those of the slots
    are stored into the first `fresh` of `slot_grads`, keys' and values', and added to the others.
    """
    query, key, value, keys, values, depth_query, attention_mask, gate = inputs
    output, log_sum_exp, *parts = outputs
    sequence_grad, sequence, sequence_lse = output_grad, output, log_sum_exp
    gate_grads: list[Tensor] = []
    if gate is not None:
        sequence, sequence_lse, output = parts
        without_gate = ungated if implementation == "triton" else _ungated
        sequence_grad, sequence, sequence_lse, gate_grad = without_gate(
            output_grad, gate, sequence, sequence_lse, output, log_sum_exp
        )
        gate_grads.append(gate_grad)
    with without_autocast(query):
        query_grad, key_grad, value_grad = map(
            in_token_order,
            sequence_attention_backward(
                sequence_grad, query, key, value, sequence, sequence_lse, attention_mask, scaling, is_causal
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
                gate,
                scaling,
                grads[-1] if depth_query is not None else query_grad,
                depth_query is None,
                keys_grad,
                values_grad,
                fresh,
            )
    return [*grads, *gate_grads]


def _ungated(
    output_grad: Tensor, gate: Tensor, sequence: Tensor, sequence_lse: Tensor, joint: Tensor, joint_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    Does what `ungated` does, without Triton.

    The sequence has the weight (1 - g) + g e^(l - l_joint) of its own softmax. Where a gate above one makes that
    negative, its sign goes to the gradient, since a log-sum-exp has none.
    """
    dtype = accumulation_dtype(sequence)
    gate_H11 = gate.to(dtype)[:, None, None]
    gate_H1 = gate_H11.squeeze(-1)
    kept_BHT = gate_H1 * (sequence_lse - joint_lse).exp()
    weight_BHT = (1 - gate_H1) + kept_BHT
    size_BHT = weight_BHT.abs().clamp(min=1e-12)
    is_negative_BHT1 = (weight_BHT < 0).unsqueeze(-1)
    share_BHT1 = (kept_BHT / torch.where(weight_BHT < 0, -size_BHT, size_BHT)).unsqueeze(-1)
    output = ((1 - share_BHT1) * sequence + share_BHT1 * joint).to(sequence.dtype)
    # Summed over the channels, then over the tokens, always in the same order.
    gate_grad = (output_grad * (joint.to(dtype) - sequence)).sum(-1).sum((0, 2))
    grad = torch.where(is_negative_BHT1, -output_grad, output_grad)
    return in_token_order(grad), in_token_order(output), sequence_lse - size_BHT.log(), gate_grad


def merge_without_kernels(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    gate: Tensor | None,
    scaling: float,
    training: bool,
) -> list[Tensor]:
    """Does what `depth_merge_forward` does, without Triton."""
    scores_BHTN = _depth_scores(query, keys, scaling)
    depth_BHT = scores_BHTN.logsumexp(-1)
    merged_BHT = torch.logaddexp(log_sum_exp, depth_BHT)
    weights_BKGTN = (scores_BHTN - merged_BHT.unsqueeze(-1)).exp().unflatten(1, (keys.shape[3], -1))
    depth_BKGTD = torch.einsum("bkgtn,nbtkd->bkgtd", weights_BKGTN, values.to(weights_BKGTN.dtype))
    sequence_BHT1 = (log_sum_exp - merged_BHT).exp().unsqueeze(-1)
    joint = depth_BKGTD.flatten(1, 2) + sequence_BHT1 * output
    if gate is None:
        return [in_token_order(joint.to(query.dtype)), merged_BHT.contiguous()]
    # Gates of 0 and 1 give the one or the other to the last bit.
    share_H11 = gate.to(joint.dtype)[:, None, None]
    blended = (1 - share_H11) * output + share_H11 * joint
    outputs = [in_token_order(blended.to(query.dtype)), merged_BHT.contiguous()]
    return [*outputs, in_token_order(joint.to(query.dtype))] if training else outputs


def _depth_merge_backward(
    output_grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    gate: Tensor | None,
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
    if gate is not None:
        grad_BKGTD = grad_BKGTD * gate.to(dtype).view(kv_heads, -1, 1, 1)
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


def _new_outputs(
    query, key, value, depth_keys, depth_values, depth_query, attention_mask, gate, *constants
) -> list[Tensor]:
    def one() -> list[Tensor]:
        return [new_heads_like(query), query.new_empty(query.shape[:3], dtype=accumulation_dtype(query))]

    is_trained = constants[-1]
    return [*one(), *one(), new_heads_like(query)] if gate is not None and is_trained else one()


def _new_grads(
    output_grad, query, key, value, depth_keys, depth_values, depth_query, attention_mask, gate, *_
) -> list[Tensor]:
    slots = [
        tensors[0].new_empty((sum(x.shape[0] for x in tensors), *tensors[0].shape[1:]))
        for tensors in (depth_keys, depth_values)
        if tensors
    ]
    depth_query_grads = [] if depth_query is None else [new_heads_like(query)]
    gate_grads = [] if gate is None else [gate.new_empty(gate.shape, dtype=accumulation_dtype(query))]
    return [*map(new_heads_like, (query, key, value)), *slots, *depth_query_grads, *gate_grads]


def _save_for_backward(ctx, inputs, output):
    query, key, value, keys, values, depth_query, attention_mask, gate, *ctx.constants, _ = inputs
    ctx.entries = len(keys)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(query, key, value, depth_query, attention_mask, gate, *keys, *values, *output)


def _backward(ctx, grads):
    query, key, value, depth_query, attention_mask, gate, *others = ctx.saved_tensors
    keys, values, outputs = others[: ctx.entries], others[ctx.entries : 2 * ctx.entries], others[2 * ctx.entries :]
    query_grad, key_grad, value_grad, *grads = _run_backward(
        *(grads[0], query, key, value, keys, values, depth_query, attention_mask, gate, outputs, *ctx.constants)
    )
    slot_grads = [list(x.split([slots.shape[0] for slots in keys])) for x in grads[:2]] if keys else [[], []]
    gate_grad = None if gate is None else grads.pop().to(gate.dtype)
    depth_query_grad = None if depth_query is None else grads[-1]
    return query_grad, key_grad, value_grad, *slot_grads, depth_query_grad, None, gate_grad, *(None,) * 4


_run_backward = Operation(moda_attention_backward, _new_grads)
run_moda_attention = DifferentiableOperation(moda_attention_forward, _new_outputs, _save_for_backward, _backward)
