# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Mixture-of-Depths Attention with Triton: how its kernels are launched."""

import torch
from torch import Tensor

from .depth_dispatch import triton, triton_obstacle
from .depth_launch import (
    device_of,
    divide_up,
    matrix_block,
    multiprocessors,
    new_heads_like,
    new_like,
    power_of_2_from,
    strided,
)


if triton is not None:
    from .moda_attention_jit import (
        depth_merge_bwd_kernel,
        depth_merge_fwd_kernel,
        gate_bwd_kernel,
        moda_decode_kernel,
        moda_decode_merge_kernel,
    )

# Up to so many new tokens, and so many rows (tokens times query heads of a key-value head), one kernel does both
# attentions.
DECODED_TOKENS, DECODED_QUERIES = 16, 64
DECODE_COLUMNS = 64
MAX_HEAD_DIM = 256
MAX_GROUP = 128


def moda_attention_obstacle(query: Tensor, key: Tensor, *others: Tensor | None) -> str | None:
    """Why the kernels cannot work on these tensors, as the end of a sentence about the kernel; None if they can."""
    heads, tokens, head_dim = query.shape[1:]
    if head_dim > MAX_HEAD_DIM:
        return f"supports head dims up to {MAX_HEAD_DIM}, not {head_dim}"
    if heads // key.shape[1] > MAX_GROUP:
        return f"supports up to {MAX_GROUP} query heads for each key-value head, not {heads // key.shape[1]}"
    if tokens * key.shape[1] >= 2**31:
        return "supports fewer than 2**31 rows (tokens times key-value heads) in a batch entry"
    return triton_obstacle((query, key, *others))


def slot_obstacle(key: Tensor, value: Tensor) -> str | None:
    """Why the kernels cannot work on slots `[B, T, K, D]`, as the end of a sentence about them; None if they can."""
    return moda_attention_obstacle(*(x.transpose(1, 2) for x in (key, key, value)))


def decodes(query: Tensor, key: Tensor) -> bool:
    """Whether there are so few new tokens that one kernel does both attentions."""
    heads, tokens = query.shape[1:3]
    return tokens <= DECODED_TOKENS and tokens * (heads // key.shape[1]) <= DECODED_QUERIES


def decode_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor | None,
    values: Tensor | None,
    depth_query: Tensor | None,
    attention_mask: Tensor | None,
    gate: Tensor | None,
    scaling: float,
    is_causal: bool,
) -> list[Tensor]:
    """Output `[B, H, T, D]` and log-sum-exp `[B, H, T]` over the sequence and the slots `[N, B, T, K, D]`."""
    batch, heads, tokens, head_dim = query.shape
    kv_heads, length = key.shape[1:3]
    slots = 0 if keys is None else keys.shape[0]
    block_dim = matrix_block(head_dim)
    # There are two to four programs for each multiprocessor, each with at least one block of columns.
    wanted = max(1, 2 * multiprocessors(query.device) // max(1, batch * kv_heads))
    columns = max(1, length // (wanted * DECODE_COLUMNS)) * DECODE_COLUMNS
    # The slots get programs of their own: after a part of the sequence they would begin late.
    sequence_parts = divide_up(length, columns)
    parts = max(1, sequence_parts + divide_up(slots * tokens, columns))
    output = new_heads_like(query)
    log_sum_exp = query.new_empty((batch, heads, tokens), dtype=torch.float32)
    if parts == 1:
        partial, partial_log_sum_exp = output, log_sum_exp
    else:
        partial = query.new_empty((parts, batch, tokens, heads, head_dim), dtype=torch.float32)
        partial_log_sum_exp = query.new_empty((parts, batch, heads, tokens), dtype=torch.float32)
    if query.numel():
        with device_of(query):
            moda_decode_kernel[(batch * kv_heads, parts)](
                *map(strided, (query, key, value, keys, values, depth_query)),
                _mask_argument(attention_mask),
                partial,
                partial_log_sum_exp,
                tokens,
                length,
                slots,
                columns,
                scaling,
                IS_CAUSAL=is_causal,
                KV_HEADS=kv_heads,
                GROUP=heads // kv_heads,
                HEAD_DIM=head_dim,
                BLOCK_QUERIES=matrix_block(tokens * (heads // kv_heads)),
                BLOCK_COLUMNS=DECODE_COLUMNS if block_dim <= 128 and query.element_size() < 4 else 32,
                BLOCK_DIM=block_dim,
                STAGES=2,
                num_warps=4,
            )
            if parts > 1:
                rows = batch * tokens * heads
                moda_decode_merge_kernel[(rows,)](
                    *(partial, partial_log_sum_exp, output, log_sum_exp, strided(gate)),
                    *(parts, sequence_parts, rows, tokens),
                    HEADS=heads,
                    HEAD_DIM=head_dim,
                    BLOCK_PARTS=max(1, 4096 // block_dim),
                    BLOCK_DIM=block_dim,
                    num_warps=4,
                )
    return [output, log_sum_exp]


def _mask_argument(mask: Tensor | None) -> tuple | None:
    """A mask `[B or 1, H or 1, T, S]` as kernels take it: what has size one is shared."""
    if mask is None:
        return None
    batch, heads = (stride if size > 1 else 0 for stride, size in zip(mask.stride()[:2], mask.shape[:2], strict=True))
    return mask, batch, heads, *mask.stride()[2:]


def depth_merge_forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    gate: Tensor | None,
    scaling: float,
    training: bool,
) -> list[Tensor]:
    """
    The output `[B, H, T, D]` and log-sum-exp `[B, H, T]` of an attention, with the slots `[N, B, T, K, D]` merged into
    it. With a gate `[H]` the first is a blend of both outputs, and the joint one comes third if `training`, whose
    backward takes `output` too. Otherwise the result takes the place of `output` where its layout allows.
    """
    joint = new_heads_like(output) if gate is not None and training else None
    in_place = joint is None and output.transpose(1, 2).is_contiguous()
    merged = output if in_place else new_heads_like(output)
    merged_log_sum_exp = torch.empty_like(log_sum_exp, memory_format=torch.contiguous_format)
    programs, constants = _launch("fwd", query, keys)
    if programs:
        with device_of(query):
            depth_merge_fwd_kernel[(programs,)](
                *map(strided, (query, keys, values, output, log_sum_exp, merged, merged_log_sum_exp)),
                *map(strided, (gate, joint)),
                query.shape[2],
                keys.shape[0],
                scaling,
                **constants,
            )
    return [merged, merged_log_sum_exp] if joint is None else [merged, merged_log_sum_exp, joint]


def ungated(
    output_grad: Tensor, gate: Tensor, sequence: Tensor, sequence_lse: Tensor, joint: Tensor, joint_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    With which gradient, output and log-sum-exp the backward of the attention over the sequence gives the gradients of
    its part of a blend, and the gradient of the gate, `[H]`.
    """
    batch, heads, tokens, head_dim = sequence.shape
    grad, output = new_heads_like(sequence), new_heads_like(sequence)
    log_sum_exp = new_like(sequence_lse)
    rows, block_dim = batch * tokens, power_of_2_from(head_dim)
    block_rows = max(1, 4096 // block_dim)
    programs = divide_up(rows, block_rows)
    gate_grads = gate.new_empty((heads, programs), dtype=torch.float32)
    if programs:
        with device_of(sequence):
            gate_bwd_kernel[(heads, programs)](
                *map(strided, (output_grad, gate, sequence, sequence_lse, joint, joint_lse)),
                *(grad, output, log_sum_exp, gate_grads),
                *(rows, tokens),
                HEAD_DIM=head_dim,
                BLOCK_ROWS=block_rows,
                BLOCK_DIM=block_dim,
                num_warps=4,
            )
    return grad, output, log_sum_exp, gate_grads.sum(-1)


def depth_merge_backward(
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
    """
    From the joint output and log-sum-exp: writes the query's gradient, or adds to it if `accumulate`, and those of
    the slots, storing into the first `fresh` of `key_grads` and `value_grads` and adding to the others. With a gate
    `[H]`, `output_grad` is the gradient of the blend.
    """
    programs, constants = _launch("bwd", query, keys)
    if programs:
        with device_of(query):
            depth_merge_bwd_kernel[(programs,)](
                *map(strided, (output_grad, query, keys, values, output, log_sum_exp, gate)),
                *map(strided, (query_grad, key_grads, value_grads)),
                query.shape[2],
                keys.shape[0],
                fresh,
                scaling,
                ADD_QUERY_GRAD=accumulate,
                ADD_SLOT_GRADS=fresh < keys.shape[0] or constants["GROUP"] > constants["BLOCK_GROUP"],
                **constants,
            )


def _launch(direction: str, query: Tensor, keys: Tensor) -> tuple[int, dict[str, int]]:
    """Number of programs, and the constants of a kernel, which are the same for any number of tokens and slots."""
    batch, heads, tokens, head_dim = query.shape
    kv_heads = keys.shape[3]
    group = heads // kv_heads
    block_dim = matrix_block(head_dim)
    # Of a larger group, a program takes one such block of heads after the other.
    block_group = min(matrix_block(group), 32 if block_dim <= 64 and query.element_size() == 2 else 16)
    rows, slots, warps, stages = tile(direction, block_group, block_dim, query.element_size())
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_ROWS": rows,
        "BLOCK_GROUP": block_group,
        "BLOCK_SLOTS": slots,
        "BLOCK_DIM": block_dim,
        "STAGES": stages,
        "num_warps": warps,
    }
    return batch * divide_up(tokens * kv_heads, rows), constants


def tile(direction: str, block_group: int, block_dim: int, element_size: int) -> tuple[int, int, int, int]:
    """How many rows and slots a program has, how many warps, and how many stages its loop."""
    if element_size == 4:
        return max(1, 64 // block_dim), 16, 4, 1
    # Measured on an H200: one warp for every 16 heads of a token is best, as long as they fit into its registers.
    size = block_group * block_dim
    if size > 2048:
        return 1, 16, 4, 2
    rows = max(1, 2048 // size)
    return rows, 32 if direction == "fwd" and size <= 1024 else 16, rows * block_group // 16, 2
