# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Triton kernels of Mixture-of-Depths Attention: the depth slots merged into an attention over the sequence, the backward
of that, and, for a few new tokens of a long sequence, both attentions at once.

A program of the first two works on rows, one for each token and key-value head, heads first, so that neighbouring
programs read whole slots of a token together. It holds the query heads of a row's group and runs over the slots, which
are read once. Its products are batched over the rows, so no token meets the slots of another. A tensor is handed to a
kernel as the tuple of its pointer and its strides.

Legend: B batch, H query heads, K key-value heads, G = H / K, T tokens, S columns of the sequence, N slots, D head dim;
in the kernels R rows of a program, M rows of one key-value head in decoding, one for each token and query head.
"""

import torch
from torch import Tensor

from .depth_implementations import device_of, multiprocessors, triton_obstacle


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:
    LOG2_E = tl.constexpr(1.4426950408889634)

    @triton.jit
    def _place(tokens, KV_HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
        """Batch entry, and token, key-value head and existence of this program's rows."""
        rows = tokens * KV_HEADS
        blocks = tl.cdiv(rows, BLOCK_ROWS)
        program = tl.program_id(0)
        row_R = program % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        return (program // blocks).to(tl.int64), (row_R // KV_HEADS).to(tl.int64), row_R % KV_HEADS, row_R < rows

    @triton.jit
    def _heads(tensor, place, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr):
        """Addresses of the rows' query heads in a tensor `[B, H, T, ..]`, and which of these exist."""
        batch, token_R, head_R, valid_R = place
        member_G = tl.arange(0, BLOCK_GROUP)
        head_RG = (head_R[:, None] * GROUP + member_G[None, :]).to(tl.int64)
        address_RG = tensor[0] + batch * tensor[1] + head_RG * tensor[2] + (token_R * tensor[3])[:, None]
        return address_RG, valid_R[:, None] & (member_G < GROUP)[None, :]

    @triton.jit
    def _columns(address, mask, stride, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
        """Addresses and mask of the rows, `[.., ..]`, that start at these addresses."""
        column_D = tl.arange(0, BLOCK_DIM)
        mask = mask[:, :, None]
        if HEAD_DIM < BLOCK_DIM:
            mask = mask & (column_D < HEAD_DIM)[None, None, :]
        return address[:, :, None] + column_D.to(tl.int64)[None, None, :] * stride, mask

    @triton.jit
    def _load_heads(
        tensor, place, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
    ):
        address_RG, mask_RG = _heads(tensor, place, GROUP, BLOCK_GROUP)
        address, mask = _columns(address_RG, mask_RG, tensor[4], HEAD_DIM, BLOCK_DIM)
        return tl.load(address, mask=mask, other=0.0)

    @triton.jit
    def _slots(tensor, place, slot_N, slots, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
        """Addresses and mask of these slots of the rows in a tensor `[N, B, T, K, D]`."""
        batch, token_R, head_R, valid_R = place
        address_R = tensor[0] + batch * tensor[2] + token_R * tensor[3] + head_R.to(tl.int64) * tensor[4]
        address_RN = address_R[:, None] + slot_N.to(tl.int64)[None, :] * tensor[1]
        mask_RN = valid_R[:, None] & (slot_N < slots)[None, :]
        return _columns(address_RN, mask_RN, tensor[5], HEAD_DIM, BLOCK_DIM)

    @triton.jit(do_not_specialize=["tokens", "slots"])
    def depth_merge_fwd_kernel(
        query,
        keys,
        values,
        output,
        log_sum_exp,
        merged,
        merged_log_sum_exp,
        tokens,
        slots,
        scaling,
        KV_HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_GROUP: tl.constexpr,
        BLOCK_SLOTS: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        place = _place(tokens, KV_HEADS, BLOCK_ROWS)
        query_RGD = _load_heads(query, place, GROUP, BLOCK_GROUP, HEAD_DIM, BLOCK_DIM)
        address_RG, exists_RG = _heads(log_sum_exp, place, GROUP, BLOCK_GROUP)
        # the attention over the sequence is where the online softmax starts from
        highest_RG = tl.load(address_RG, mask=exists_RG, other=0.0) * LOG2_E
        total_RG = tl.where(highest_RG == float("-inf"), 0.0, 1.0)
        mix_RGD = _load_heads(output, place, GROUP, BLOCK_GROUP, HEAD_DIM, BLOCK_DIM).to(tl.float32)
        for first in tl.range(0, slots, BLOCK_SLOTS, num_stages=STAGES):
            slot_N = first + tl.arange(0, BLOCK_SLOTS)
            address, mask = _slots(keys, place, slot_N, slots, HEAD_DIM, BLOCK_DIM)
            key_RND = tl.load(address, mask=mask, other=0.0)
            address, mask = _slots(values, place, slot_N, slots, HEAD_DIM, BLOCK_DIM)
            value_RND = tl.load(address, mask=mask, other=0.0)
            score_RGN = tl.dot(query_RGD, tl.trans(key_RND, (0, 2, 1)), input_precision="ieee") * (scaling * LOG2_E)
            score_RGN = tl.where((slot_N < slots)[None, None, :], score_RGN, float("-inf"))
            previous_RG = highest_RG
            highest_RG = tl.maximum(previous_RG, tl.max(score_RGN, 2))
            kept_RG = tl.exp2(previous_RG - highest_RG)
            odds_RGN = tl.exp2(score_RGN - highest_RG[:, :, None])
            total_RG = total_RG * kept_RG + tl.sum(odds_RGN, 2)
            mix_RGD *= kept_RG[:, :, None]
            mix_RGD += tl.dot(odds_RGN.to(value_RND.dtype), value_RND, input_precision="ieee")
        mix_RGD /= total_RG[:, :, None]
        address_RG, exists_RG = _heads(merged_log_sum_exp, place, GROUP, BLOCK_GROUP)
        tl.store(address_RG, (highest_RG + tl.log2(total_RG)) / LOG2_E, mask=exists_RG)
        address_RG, exists_RG = _heads(merged, place, GROUP, BLOCK_GROUP)
        address, mask = _columns(address_RG, exists_RG, merged[4], HEAD_DIM, BLOCK_DIM)
        tl.store(address, mix_RGD, mask=mask)

    @triton.jit
    def _store_slots(tensor, grad_RND, place, slot_N, slots, fresh, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
        """Into the first `fresh` slots, which may hold anything; added to the others."""
        address, mask = _slots(tensor, place, slot_N, slots, HEAD_DIM, BLOCK_DIM)
        earlier = tl.load(address, mask=mask & (slot_N >= fresh)[None, :, None], other=0.0)
        tl.store(address, grad_RND + earlier.to(tl.float32), mask=mask)

    @triton.jit(do_not_specialize=["tokens", "slots", "fresh"])
    def depth_merge_bwd_kernel(
        output_grad,
        query,
        keys,
        values,
        output,
        log_sum_exp,
        query_grad,
        key_grads,
        value_grads,
        tokens,
        slots,
        fresh,
        scaling,
        ADD_QUERY_GRAD: tl.constexpr,
        ADD_SLOT_GRADS: tl.constexpr,
        KV_HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_GROUP: tl.constexpr,
        BLOCK_SLOTS: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        place = _place(tokens, KV_HEADS, BLOCK_ROWS)
        grad_RGD = _load_heads(output_grad, place, GROUP, BLOCK_GROUP, HEAD_DIM, BLOCK_DIM)
        output_RGD = _load_heads(output, place, GROUP, BLOCK_GROUP, HEAD_DIM, BLOCK_DIM)
        delta_RG = tl.sum(grad_RGD.to(tl.float32) * output_RGD.to(tl.float32), 2)
        query_RGD = _load_heads(query, place, GROUP, BLOCK_GROUP, HEAD_DIM, BLOCK_DIM)
        address_RG, exists_RG = _heads(log_sum_exp, place, GROUP, BLOCK_GROUP)
        # infinite where there is no head, which then has weights of zero
        log_sum_exp_RG = tl.load(address_RG, mask=exists_RG, other=float("inf")) * LOG2_E
        query_grad_RGD = tl.zeros([BLOCK_ROWS, BLOCK_GROUP, BLOCK_DIM], tl.float32)
        for first in tl.range(0, slots, BLOCK_SLOTS, num_stages=STAGES):
            slot_N = first + tl.arange(0, BLOCK_SLOTS)
            address, mask = _slots(keys, place, slot_N, slots, HEAD_DIM, BLOCK_DIM)
            key_RND = tl.load(address, mask=mask, other=0.0)
            address, mask = _slots(values, place, slot_N, slots, HEAD_DIM, BLOCK_DIM)
            value_RND = tl.load(address, mask=mask, other=0.0)
            score_RGN = tl.dot(query_RGD, tl.trans(key_RND, (0, 2, 1)), input_precision="ieee") * (scaling * LOG2_E)
            weight_RGN = tl.exp2(score_RGN - log_sum_exp_RG[:, :, None])
            weight_RGN = tl.where((slot_N < slots)[None, None, :], weight_RGN, 0.0)
            product_RGN = tl.dot(grad_RGD, tl.trans(value_RND, (0, 2, 1)), input_precision="ieee")
            score_grad_RGN = weight_RGN * (product_RGN - delta_RG[:, :, None]) * scaling
            weight_RGN = weight_RGN.to(grad_RGD.dtype)
            score_grad_RGN = score_grad_RGN.to(key_RND.dtype)
            query_grad_RGD += tl.dot(score_grad_RGN, key_RND, input_precision="ieee")
            key_grad_RND = tl.dot(tl.trans(score_grad_RGN, (0, 2, 1)), query_RGD, input_precision="ieee")
            value_grad_RND = tl.dot(tl.trans(weight_RGN, (0, 2, 1)), grad_RGD, input_precision="ieee")
            if ADD_SLOT_GRADS:
                _store_slots(key_grads, key_grad_RND, place, slot_N, slots, fresh, HEAD_DIM, BLOCK_DIM)
                _store_slots(value_grads, value_grad_RND, place, slot_N, slots, fresh, HEAD_DIM, BLOCK_DIM)
            else:
                address, mask = _slots(key_grads, place, slot_N, slots, HEAD_DIM, BLOCK_DIM)
                tl.store(address, key_grad_RND, mask=mask)
                address, mask = _slots(value_grads, place, slot_N, slots, HEAD_DIM, BLOCK_DIM)
                tl.store(address, value_grad_RND, mask=mask)
        address_RG, exists_RG = _heads(query_grad, place, GROUP, BLOCK_GROUP)
        address, mask = _columns(address_RG, exists_RG, query_grad[4], HEAD_DIM, BLOCK_DIM)
        if ADD_QUERY_GRAD:
            query_grad_RGD += tl.load(address, mask=mask, other=0.0).to(tl.float32)
        tl.store(address, query_grad_RGD, mask=mask)


MAX_HEAD_DIM = 256
MAX_GROUP = 128


def moda_attention_obstacle(query: Tensor, key: Tensor, *others: Tensor) -> str | None:
    """Why the kernels cannot work on these tensors, as the end of a sentence about the kernel; None if they can."""
    heads, tokens, head_dim = query.shape[1:]
    if head_dim > MAX_HEAD_DIM:
        return f"supports head dims up to {MAX_HEAD_DIM}, not {head_dim}"
    if heads // key.shape[1] > MAX_GROUP:
        return f"supports up to {MAX_GROUP} query heads for each key-value head, not {heads // key.shape[1]}"
    if tokens * key.shape[1] >= 2**31:
        return "supports fewer than 2**31 rows (tokens times key-value heads) in a batch entry"
    return triton_obstacle((query, key, *others))


def depth_merge_forward(
    query: Tensor, keys: Tensor, values: Tensor, output: Tensor, log_sum_exp: Tensor, scaling: float
) -> list[Tensor]:
    """
    The output `[B, H, T, D]` and log-sum-exp `[B, H, T]` of an attention, with the slots `[N, B, T, K, D]` merged into
    it. Where its layout allows, the result takes the place of `output`.
    """
    merged = output if output.transpose(1, 2).is_contiguous() else _new_rows(output)
    merged_log_sum_exp = torch.empty_like(log_sum_exp, memory_format=torch.contiguous_format)
    programs, constants = _launch("fwd", query, keys)
    if programs:
        with device_of(query):
            depth_merge_fwd_kernel[(programs,)](
                *map(_argument, (query, keys, values, output, log_sum_exp, merged, merged_log_sum_exp)),
                query.shape[2],
                keys.shape[0],
                scaling,
                **constants,
            )
    return [merged, merged_log_sum_exp]


def depth_merge_backward(
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
    """
    From the merged output and log-sum-exp: writes the query's gradient, or adds to it if `accumulate`, and those of
    the slots, storing into the first `fresh` of `key_grads` and `value_grads` and adding to the others.
    """
    programs, constants = _launch("bwd", query, keys)
    if programs:
        with device_of(query):
            depth_merge_bwd_kernel[(programs,)](
                *map(_argument, (output_grad, query, keys, values, output, log_sum_exp)),
                *map(_argument, (query_grad, key_grads, value_grads)),
                query.shape[2],
                keys.shape[0],
                fresh,
                scaling,
                ADD_QUERY_GRAD=accumulate,
                ADD_SLOT_GRADS=fresh < keys.shape[0],
                **constants,
            )


def _argument(tensor: Tensor | None) -> tuple | None:
    return None if tensor is None else (tensor, *tensor.stride())


def _new_rows(tensor: Tensor) -> Tensor:
    batch, heads, tokens, head_dim = tensor.shape
    return tensor.new_empty((batch, tokens, heads, head_dim)).transpose(1, 2)


def _launch(direction: str, query: Tensor, keys: Tensor) -> tuple[int, dict[str, int]]:
    """Number of programs, and the constants of a kernel, which are the same for any number of tokens and slots."""
    batch, heads, tokens, head_dim = query.shape
    kv_heads = keys.shape[3]
    group = heads // kv_heads
    # the least that a matrix product takes
    block_group, block_dim = (max(16, triton.next_power_of_2(size)) for size in (group, head_dim))
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
    return batch * triton.cdiv(tokens * kv_heads, rows), constants


def tile(direction: str, block_group: int, block_dim: int, element_size: int) -> tuple[int, int, int, int]:
    """Rows and slots of a program, warps, and stages of its loop."""
    rows = max(1, 64 * 64 // (block_group * block_dim))
    return rows, 16, 4, 2
