# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Triton kernels of Mixture-of-Depths Attention: the depth slots merged into an attention over the sequence, the backward
of that, what a gate changes for the backward of the sequence, and, for a few new tokens of a long sequence, both
attentions at once.

A program of the first two works on rows, one for each token and key-value head, heads first, so that neighbouring
programs read whole slots of a token together. It holds the query heads of a row's group and runs over the slots, which
are read once. Its products are batched over the rows, so no token meets the slots of another. A tensor is handed to a
kernel as the tuple of its pointer and its strides.

Legend: B batch, H query heads, K key-value heads, G = H / K, T tokens, S columns of the sequence, N slots, D head dim;
in the kernels R rows of a program, M rows of one key-value head in decoding, one for each token and query head.
"""

import torch

from .depth_dispatch import INTERPRETED


# Only imported where Triton is. The block tells transformers that saved models load without it.
try:
    import triton
    import triton.language as tl
except ImportError:
    raise

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
# The interpreter's matrix product takes the bits of bf16 for integers.
IN_INTERPRETER = tl.constexpr(INTERPRETED)


@triton.jit
def _product(x, y):
    if IN_INTERPRETER:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    # TF32 would round the inputs to 10 bits.
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def _place(tokens, KV_HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Batch entry, and token, key-value head and existence of this program's rows."""
    rows = tokens * KV_HEADS
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    program = tl.program_id(0)
    row_R = program % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return (program // blocks).to(tl.int64), (row_R // KV_HEADS).to(tl.int64), row_R % KV_HEADS, row_R < rows


@triton.jit
def _heads(tensor, place, member_G, GROUP: tl.constexpr):
    """Addresses of these query heads of the rows in a tensor `[B, H, T, ..]`, and which of them exist."""
    batch, token_R, head_R, valid_R = place
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
def _load_heads(tensor, place, member_G, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    address_RG, mask_RG = _heads(tensor, place, member_G, GROUP)
    address, mask = _columns(address_RG, mask_RG, tensor[4], HEAD_DIM, BLOCK_DIM)
    return tl.load(address, mask=mask, other=0.0)


@triton.jit
def _load_gate(gate, place, member_G, GROUP: tl.constexpr):
    """How much these query heads of the rows take of the attention with slots, `[R, G]`."""
    _, _, head_R, valid_R = place
    head_RG = (head_R[:, None] * GROUP + member_G[None, :]).to(tl.int64)
    exists_RG = valid_R[:, None] & (member_G < GROUP)[None, :]
    return tl.load(gate[0] + head_RG * gate[1], mask=exists_RG, other=0.0).to(tl.float32)


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
    gate,
    joint,
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
    """With a gate, `merged` is the blend of `output` and of what has the slots merged in, which goes into `joint`."""
    place = _place(tokens, KV_HEADS, BLOCK_ROWS)
    for chunk in range((GROUP + BLOCK_GROUP - 1) // BLOCK_GROUP):
        member_G = chunk * BLOCK_GROUP + tl.arange(0, BLOCK_GROUP)
        query_RGD = _load_heads(query, place, member_G, GROUP, HEAD_DIM, BLOCK_DIM)
        address_RG, exists_RG = _heads(log_sum_exp, place, member_G, GROUP)
        # The online softmax starts from the attention over the sequence.
        highest_RG = tl.load(address_RG, mask=exists_RG, other=0.0) * LOG2_E
        total_RG = tl.where(highest_RG == float("-inf"), 0.0, 1.0)
        mix_RGD = _load_heads(output, place, member_G, GROUP, HEAD_DIM, BLOCK_DIM).to(tl.float32)
        for first in tl.range(0, slots, BLOCK_SLOTS, num_stages=STAGES):
            slot_N = first + tl.arange(0, BLOCK_SLOTS)
            address, mask = _slots(keys, place, slot_N, slots, HEAD_DIM, BLOCK_DIM)
            key_RND = tl.load(address, mask=mask, other=0.0)
            address, mask = _slots(values, place, slot_N, slots, HEAD_DIM, BLOCK_DIM)
            value_RND = tl.load(address, mask=mask, other=0.0)
            score_RGN = _product(query_RGD, tl.trans(key_RND, (0, 2, 1))) * (scaling * LOG2_E)
            score_RGN = tl.where((slot_N < slots)[None, None, :], score_RGN, float("-inf"))
            previous_RG = highest_RG
            highest_RG = tl.maximum(previous_RG, tl.max(score_RGN, 2))
            kept_RG = tl.exp2(previous_RG - highest_RG)
            odds_RGN = tl.exp2(score_RGN - highest_RG[:, :, None])
            total_RG = total_RG * kept_RG + tl.sum(odds_RGN, 2)
            mix_RGD *= kept_RG[:, :, None]
            mix_RGD += _product(odds_RGN.to(value_RND.dtype), value_RND)
        mix_RGD /= total_RG[:, :, None]
        address_RG, exists_RG = _heads(merged_log_sum_exp, place, member_G, GROUP)
        tl.store(address_RG, (highest_RG + tl.log2(total_RG)) / LOG2_E, mask=exists_RG)
        if joint is not None:
            address_RG, exists_RG = _heads(joint, place, member_G, GROUP)
            address, mask = _columns(address_RG, exists_RG, joint[4], HEAD_DIM, BLOCK_DIM)
            tl.store(address, mix_RGD, mask=mask)
        if gate is not None:
            # It is read again, so that the loop over the slots has the registers.
            sequence_RGD = _load_heads(output, place, member_G, GROUP, HEAD_DIM, BLOCK_DIM).to(tl.float32)
            share_RG1 = _load_gate(gate, place, member_G, GROUP)[:, :, None]
            mix_RGD = (1.0 - share_RG1) * sequence_RGD + share_RG1 * mix_RGD
        address_RG, exists_RG = _heads(merged, place, member_G, GROUP)
        address, mask = _columns(address_RG, exists_RG, merged[4], HEAD_DIM, BLOCK_DIM)
        tl.store(address, mix_RGD, mask=mask)


@triton.jit
def _store_slots(tensor, grad_RND, place, slot_N, slots, fresh, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Stores into the first `fresh` slots, which may hold anything, and adds to the others."""
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
    gate,
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
    for chunk in range((GROUP + BLOCK_GROUP - 1) // BLOCK_GROUP):
        member_G = chunk * BLOCK_GROUP + tl.arange(0, BLOCK_GROUP)
        grad_RGD = _load_heads(output_grad, place, member_G, GROUP, HEAD_DIM, BLOCK_DIM)
        if gate is not None:
            share_RG = _load_gate(gate, place, member_G, GROUP)
            grad_RGD = (grad_RGD.to(tl.float32) * share_RG[:, :, None]).to(grad_RGD.dtype)
        output_RGD = _load_heads(output, place, member_G, GROUP, HEAD_DIM, BLOCK_DIM)
        delta_RG = tl.sum(grad_RGD.to(tl.float32) * output_RGD.to(tl.float32), 2)
        query_RGD = _load_heads(query, place, member_G, GROUP, HEAD_DIM, BLOCK_DIM)
        address_RG, exists_RG = _heads(log_sum_exp, place, member_G, GROUP)
        # Where there is no head it is infinite, which makes the weights zero.
        log_sum_exp_RG = tl.load(address_RG, mask=exists_RG, other=float("inf")) * LOG2_E
        query_grad_RGD = tl.zeros([BLOCK_ROWS, BLOCK_GROUP, BLOCK_DIM], tl.float32)
        for first in tl.range(0, slots, BLOCK_SLOTS, num_stages=STAGES):
            slot_N = first + tl.arange(0, BLOCK_SLOTS)
            address, mask = _slots(keys, place, slot_N, slots, HEAD_DIM, BLOCK_DIM)
            key_RND = tl.load(address, mask=mask, other=0.0)
            address, mask = _slots(values, place, slot_N, slots, HEAD_DIM, BLOCK_DIM)
            value_RND = tl.load(address, mask=mask, other=0.0)
            score_RGN = _product(query_RGD, tl.trans(key_RND, (0, 2, 1))) * (scaling * LOG2_E)
            weight_RGN = tl.exp2(score_RGN - log_sum_exp_RG[:, :, None])
            weight_RGN = tl.where((slot_N < slots)[None, None, :], weight_RGN, 0.0)
            product_RGN = _product(grad_RGD, tl.trans(value_RND, (0, 2, 1)))
            score_grad_RGN = weight_RGN * (product_RGN - delta_RG[:, :, None]) * scaling
            weight_RGN = weight_RGN.to(grad_RGD.dtype)
            score_grad_RGN = score_grad_RGN.to(key_RND.dtype)
            query_grad_RGD += _product(score_grad_RGN, key_RND)
            key_grad_RND = _product(tl.trans(score_grad_RGN, (0, 2, 1)), query_RGD)
            value_grad_RND = _product(tl.trans(weight_RGN, (0, 2, 1)), grad_RGD)
            if ADD_SLOT_GRADS:
                # After the first heads, every slot has a gradient to add to.
                new = fresh if chunk == 0 else 0
                _store_slots(key_grads, key_grad_RND, place, slot_N, slots, new, HEAD_DIM, BLOCK_DIM)
                _store_slots(value_grads, value_grad_RND, place, slot_N, slots, new, HEAD_DIM, BLOCK_DIM)
            else:
                address, mask = _slots(key_grads, place, slot_N, slots, HEAD_DIM, BLOCK_DIM)
                tl.store(address, key_grad_RND, mask=mask)
                address, mask = _slots(value_grads, place, slot_N, slots, HEAD_DIM, BLOCK_DIM)
                tl.store(address, value_grad_RND, mask=mask)
        address_RG, exists_RG = _heads(query_grad, place, member_G, GROUP)
        address, mask = _columns(address_RG, exists_RG, query_grad[4], HEAD_DIM, BLOCK_DIM)
        if ADD_QUERY_GRAD:
            query_grad_RGD += tl.load(address, mask=mask, other=0.0).to(tl.float32)
        tl.store(address, query_grad_RGD, mask=mask)
        # The next heads add to what other threads have stored here.
        tl.debug_barrier()


@triton.jit
def _attend(query_MD, key_ND, value_ND, visible_MN, bias_MN, state, scaling):
    """Adds columns to an online softmax: the highest score, the total, and the mix of each row."""
    highest_M, total_M, mix_MD = state
    score_MN = _product(query_MD, tl.trans(key_ND)) * scaling
    if bias_MN is not None:
        score_MN += bias_MN
    # A mask may have the lowest finite number, which hides less than -inf does: it must stay finite.
    scaled_MN = tl.maximum(score_MN * LOG2_E, tl.where(score_MN == float("-inf"), float("-inf"), LOWEST))
    score_MN = tl.where(visible_MN, scaled_MN, float("-inf"))
    previous_M = highest_M
    highest_M = tl.maximum(previous_M, tl.max(score_MN, 1))
    # A row may have seen nothing yet, and infinity minus infinity is not a number.
    shift_M = tl.where(highest_M == float("-inf"), 0.0, highest_M)
    kept_M = tl.exp2(previous_M - shift_M)
    odds_MN = tl.exp2(score_MN - shift_M[:, None])
    mix_MD = mix_MD * kept_M[:, None] + _product(odds_MN.to(value_ND.dtype), value_ND)
    return highest_M, total_M * kept_M + tl.sum(odds_MN, 1), mix_MD


@triton.jit
def _load_rows(address_X, mask_X, stride, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    column_D = tl.arange(0, BLOCK_DIM)
    mask = mask_X[:, None] & (column_D < HEAD_DIM)[None, :]
    return tl.load(address_X[:, None] + column_D.to(tl.int64)[None, :] * stride, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["rows", "tokens"])
def gate_bwd_kernel(
    output_grad,
    gate,
    sequence,
    sequence_log_sum_exp,
    joint,
    joint_log_sum_exp,
    grad,
    output,
    log_sum_exp,
    gate_grads,
    rows,
    tokens,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """
    Does what `ungated` says, for one head of some tokens; of the gate's gradient, `[H, programs]`, each program stores
    its part.
    """
    head = tl.program_id(0).to(tl.int64)
    row_R = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists_R = row_R < rows
    batch_R = (row_R // tokens).to(tl.int64)
    token_R = (row_R % tokens).to(tl.int64)
    share = tl.load(gate[0] + head * gate[1]).to(tl.float32)
    address_R = sequence_log_sum_exp[0] + batch_R * sequence_log_sum_exp[1] + head * sequence_log_sum_exp[2]
    own_R = tl.load(address_R + token_R * sequence_log_sum_exp[3], mask=exists_R, other=0.0)
    address_R = joint_log_sum_exp[0] + batch_R * joint_log_sum_exp[1] + head * joint_log_sum_exp[2]
    all_R = tl.load(address_R + token_R * joint_log_sum_exp[3], mask=exists_R, other=0.0)
    kept_R = share * tl.exp(own_R - all_R)
    weight_R = (1.0 - share) + kept_R
    size_R = tl.maximum(tl.abs(weight_R), 1e-12)
    sign_R = tl.where(weight_R < 0.0, -1.0, 1.0)
    part_R1 = (kept_R / (sign_R * size_R))[:, None]
    address_R = output_grad[0] + batch_R * output_grad[1] + head * output_grad[2] + token_R * output_grad[3]
    grad_RD = _load_rows(address_R, exists_R, output_grad[4], HEAD_DIM, BLOCK_DIM).to(tl.float32)
    address_R = sequence[0] + batch_R * sequence[1] + head * sequence[2] + token_R * sequence[3]
    sequence_RD = _load_rows(address_R, exists_R, sequence[4], HEAD_DIM, BLOCK_DIM).to(tl.float32)
    address_R = joint[0] + batch_R * joint[1] + head * joint[2] + token_R * joint[3]
    joint_RD = _load_rows(address_R, exists_R, joint[4], HEAD_DIM, BLOCK_DIM).to(tl.float32)
    # What is written has the order `[B, T, H, D]`.
    heads = tl.num_programs(0)
    column_D = tl.arange(0, BLOCK_DIM)
    place_RD = ((row_R.to(tl.int64) * heads + head) * HEAD_DIM)[:, None] + column_D[None, :]
    stored_RD = exists_R[:, None] & (column_D < HEAD_DIM)[None, :]
    tl.store(grad + place_RD, sign_R[:, None] * grad_RD, mask=stored_RD)
    tl.store(output + place_RD, (1.0 - part_R1) * sequence_RD + part_R1 * joint_RD, mask=stored_RD)
    tl.store(log_sum_exp + (batch_R * heads + head) * tokens + token_R, own_R - tl.log(size_R), mask=exists_R)
    total = tl.sum(tl.sum(grad_RD * (joint_RD - sequence_RD), 1), 0)
    tl.store(gate_grads + head * tl.num_programs(1) + tl.program_id(1), total)


@triton.jit(do_not_specialize=["tokens", "length", "slots", "columns"])
def moda_decode_kernel(
    query,
    key,
    value,
    keys,
    values,
    depth_query,
    mask,
    output,
    log_sum_exp,
    tokens,
    length,
    slots,
    columns,
    scaling,
    IS_CAUSAL: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    One of several programs for a key-value head takes so many columns of the sequence, or, after these programs,
    of the slots.
    """
    batch = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    part = tl.program_id(1)
    row_M = tl.arange(0, BLOCK_QUERIES)
    token_M = row_M // GROUP
    head_M = (head * GROUP + row_M % GROUP).to(tl.int64)
    exists_M = token_M < tokens
    address_M = query[0] + batch * query[1] + head_M * query[2] + token_M.to(tl.int64) * query[3]
    query_MD = _load_rows(address_M, exists_M, query[4], HEAD_DIM, BLOCK_DIM)
    state = (
        tl.full([BLOCK_QUERIES], float("-inf"), tl.float32),
        tl.zeros([BLOCK_QUERIES], tl.float32),
        tl.zeros([BLOCK_QUERIES, BLOCK_DIM], tl.float32),
    )
    last = tl.minimum((part + 1) * columns, length)
    for first in tl.range(part * columns, last, BLOCK_COLUMNS, num_stages=STAGES):
        column_N = first + tl.arange(0, BLOCK_COLUMNS)
        exists_N = column_N < last
        offset_N = column_N.to(tl.int64)
        address_N = key[0] + batch * key[1] + head * key[2] + offset_N * key[3]
        key_ND = _load_rows(address_N, exists_N, key[4], HEAD_DIM, BLOCK_DIM)
        address_N = value[0] + batch * value[1] + head * value[2] + offset_N * value[3]
        value_ND = _load_rows(address_N, exists_N, value[4], HEAD_DIM, BLOCK_DIM)
        visible_MN = exists_M[:, None] & exists_N[None, :]
        bias_MN = None
        if mask is not None:
            mask_MN = mask[0] + (batch * mask[1] + head_M * mask[2] + token_M.to(tl.int64) * mask[3])[:, None]
            mask_MN = tl.load(mask_MN + offset_N[None, :] * mask[4], mask=visible_MN, other=0)
            if mask_MN.dtype == tl.int1:
                visible_MN = visible_MN & mask_MN
            else:
                bias_MN = mask_MN.to(tl.float32)
        elif IS_CAUSAL:
            visible_MN = visible_MN & (column_N[None, :] <= token_M[:, None] + (length - tokens))
        state = _attend(query_MD, key_ND, value_ND, visible_MN, bias_MN, state, scaling)
    depth_part = part - tl.cdiv(length, columns)
    if keys is not None and depth_part >= 0:
        if depth_query is not None:
            address_M = (
                depth_query[0]
                + batch * depth_query[1]
                + head_M * depth_query[2]
                + token_M.to(tl.int64) * depth_query[3]
            )
            query_MD = _load_rows(address_M, exists_M, depth_query[4], HEAD_DIM, BLOCK_DIM)
        last = tl.minimum((depth_part + 1) * columns, slots * tokens)
        for first in tl.range(depth_part * columns, last, BLOCK_COLUMNS, num_stages=STAGES):
            column_N = first + tl.arange(0, BLOCK_COLUMNS)
            exists_N = column_N < last
            # The columns are the slots of all tokens, and each token sees its own.
            slot_N = (column_N // tokens).to(tl.int64)
            own_N = column_N % tokens
            address_N = keys[0] + slot_N * keys[1] + batch * keys[2] + own_N.to(tl.int64) * keys[3] + head * keys[4]
            key_ND = _load_rows(address_N, exists_N, keys[5], HEAD_DIM, BLOCK_DIM)
            address_N = (
                values[0] + slot_N * values[1] + batch * values[2] + own_N.to(tl.int64) * values[3] + head * values[4]
            )
            value_ND = _load_rows(address_N, exists_N, values[5], HEAD_DIM, BLOCK_DIM)
            visible_MN = exists_N[None, :] & (own_N[None, :] == token_M[:, None])
            state = _attend(query_MD, key_ND, value_ND, visible_MN, None, state, scaling)
    highest_M, total_M, mix_MD = state
    # A row that has seen nothing is zero, and its log-sum-exp is -inf.
    mix_MD /= tl.where(total_M == 0.0, 1.0, total_M)[:, None]
    row_M = (part * (tl.num_programs(0) // KV_HEADS) + batch) * tokens + token_M
    address_M = (row_M * (KV_HEADS * GROUP) + head_M) * HEAD_DIM
    column_D = tl.arange(0, BLOCK_DIM)
    stored = exists_M[:, None] & (column_D < HEAD_DIM)[None, :]
    tl.store(output + address_M[:, None] + column_D[None, :], mix_MD, mask=stored)
    row_M = (part * (tl.num_programs(0) // KV_HEADS) + batch) * (KV_HEADS * GROUP) + head_M
    total_M = (highest_M + tl.log2(total_M)) / LOG2_E
    tl.store(log_sum_exp + row_M * tokens + token_M, total_M, mask=exists_M)


@triton.jit(do_not_specialize=["parts", "sequence_parts", "rows", "tokens"])
def moda_decode_merge_kernel(
    outputs,
    log_sum_exps,
    output,
    log_sum_exp,
    gate,
    parts,
    sequence_parts,
    rows,
    tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """
    Merges what the programs have found for one row, `[parts, B, T, H, D]` and `[parts, B, H, T]`; with a gate, all
    parts and those of the sequence, which come first, and then the two.
    """
    row = tl.program_id(0)
    entry = row // HEADS
    scalar = (entry // tokens * HEADS + row % HEADS) * tokens + entry % tokens
    column_D = tl.arange(0, BLOCK_DIM)
    inside_D = column_D < HEAD_DIM
    highest = float("-inf")
    total = 0.0
    mix_D = tl.zeros([BLOCK_DIM], tl.float32)
    sequence_total = 0.0
    sequence_D = mix_D
    for first in tl.range(0, parts, BLOCK_PARTS):
        part_P = first + tl.arange(0, BLOCK_PARTS)
        exists_P = part_P < parts
        offset_P = part_P.to(tl.int64) * rows
        score_P = tl.load(log_sum_exps + offset_P + scalar, mask=exists_P, other=float("-inf")) * LOG2_E
        address_PD = outputs + ((offset_P + row) * HEAD_DIM)[:, None] + column_D[None, :]
        part_PD = tl.load(address_PD, mask=exists_P[:, None] & inside_D[None, :], other=0.0)
        previous = highest
        highest = tl.maximum(previous, tl.max(score_P, 0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        kept = tl.exp2(previous - shift)
        odds_P = tl.exp2(score_P - shift)
        total = total * kept + tl.sum(odds_P, 0)
        mix_D = mix_D * kept + tl.sum(odds_P[:, None] * part_PD, 0)
        if gate is not None:
            odds_P = tl.where(part_P < sequence_parts, odds_P, 0.0)
            sequence_total = sequence_total * kept + tl.sum(odds_P, 0)
            sequence_D = sequence_D * kept + tl.sum(odds_P[:, None] * part_PD, 0)
    mix_D /= tl.where(total == 0.0, 1.0, total)
    if gate is not None:
        share = tl.load(gate[0] + (row % HEADS).to(tl.int64) * gate[1]).to(tl.float32)
        sequence_D /= tl.where(sequence_total == 0.0, 1.0, sequence_total)
        mix_D = (1.0 - share) * sequence_D + share * mix_D
    tl.store(output + row.to(tl.int64) * HEAD_DIM + column_D, mix_D, mask=inside_D)
    tl.store(log_sum_exp + scalar, (highest + tl.log2(total)) / LOG2_E)
