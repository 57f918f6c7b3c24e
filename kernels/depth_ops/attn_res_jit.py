# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Triton kernels of Attention Residuals.

Bytes, in units of one hidden state (tokens x hidden size), with N finished blocks and S sites:

    kernel               reads              writes
    single site          N                  1
    single site, bwd     N + 1              N
    phase 1              2 N                S       (1 and 0 of a single source, which is its own mix)
    phase 1, bwd         3 N + 2 S          N       (N + S of them a second time, in part from a cache)
    phase 2              3                  2       (2 and 1 where there is nothing to add)
    phase 2, bwd         4                  2       (3 + N and 2 where phase 1's output is computed again)

The rest is small: logits, inverse root mean squares, log-sum-exps and their gradients are scalars per token, and the
gradients of queries and norms are sums over tokens, first within a program and then over programs.

Phase 1 of many tokens is made of matrix products, over columns or sites; in all else a program holds whole rows. A
tensor `[tokens, D]` is handed to a kernel as the tuple of its pointer and its row stride; sources stay separate
tensors.

Legend: T tokens, D hidden size, N sources, S sites, P programs; in the kernels R rows of a program.
"""

from .depth_dispatch import INTERPRETED
from .depth_jit import block_of


# Only imported where Triton is. The block tells transformers that saved models load without it.
try:
    import triton
    import triton.language as tl
except ImportError:
    raise

# The interpreter cannot multiply bf16 matrices, so there they are widened first.
WIDENED = tl.constexpr(INTERPRETED)


@triton.jit
def _rows(tensor, row_R, valid_R, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Addresses and mask."""
    column_D = tl.arange(0, BLOCK_D)
    return (tensor[0] + (row_R * tensor[1])[:, None] + column_D[None, :], valid_R[:, None] & (column_D < D)[None, :])


@triton.jit
def _load(tensor, row_R, valid_R, D: tl.constexpr, BLOCK_D: tl.constexpr):
    address, mask = _rows(tensor, row_R, valid_R, D, BLOCK_D)
    return tl.load(address, mask=mask, other=0.0)


@triton.jit
def _store(tensor, value, row_R, valid_R, D: tl.constexpr, BLOCK_D: tl.constexpr):
    address, mask = _rows(tensor, row_R, valid_R, D, BLOCK_D)
    tl.store(address, value, mask=mask)


@triton.jit
def _load_vector(pointer, D: tl.constexpr, BLOCK_D: tl.constexpr):
    # This is loaded as a row. Making a row of a vector would move it between threads.
    column_1D = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(pointer + column_1D, mask=column_1D < D, other=0.0).to(tl.float32)


@triton.jit
def _load_query(query, gain, D: tl.constexpr, BLOCK_D: tl.constexpr):
    folded = _load_vector(query, D, BLOCK_D)
    if gain is not None:
        folded *= _load_vector(gain, D, BLOCK_D)
    return folded


@triton.jit
def _one_of(tensors, index, ALIGNMENT: tl.constexpr):
    """Element `index`, known at run time only, of a tuple of tensors of one dtype and row stride."""
    address = tensors[0][0].to(tl.int64)
    for i in tl.static_range(1, len(tensors)):
        address = tl.where(index == i, tensors[i][0].to(tl.int64), address)
    return tl.multiple_of(address.to(tensors[0][0].dtype), ALIGNMENT), tensors[0][1]


@triton.jit
def _address_of_each(tensors, index):
    """Those of the tensors `index`, all of one dtype."""
    address = tensors[0][0].to(tl.int64) + tl.zeros_like(index).to(tl.int64)
    for i in tl.static_range(1, len(tensors)):
        address = tl.where(index == i, tensors[i][0].to(tl.int64), address)
    return address.to(tensors[0][0].dtype)


@triton.jit
def _row_of_each(tensors, index, row):
    """Addresses `[index, 1]` of rows of tensors of one row stride."""
    return (_address_of_each(tensors, index) + row * tensors[0][1])[:, None]


@triton.jit
def _columns_of_each(row_N1, column_K, ALIGNMENT: tl.constexpr):
    # The hint stands where the addresses are made, since a hint on an argument is lost.
    return tl.multiple_of(row_N1 + column_K[None, :], [1, ALIGNMENT])


@triton.jit
def _load_of_each(row_N1, valid_N, column_K, ALIGNMENT: tl.constexpr, D: tl.constexpr):
    return tl.load(
        _columns_of_each(row_N1, column_K, ALIGNMENT), mask=valid_N[:, None] & (column_K < D)[None, :], other=0.0
    )


@triton.jit
def _load_queries(queries, site_S, column_K, SITES: tl.constexpr, D: tl.constexpr):
    return tl.load(
        queries + site_S[:, None] * D + column_K[None, :],
        mask=(site_S < SITES)[:, None] & (column_K < D)[None, :],
        other=0.0,
    )


@triton.jit
def _dot(exact, rounded, sums, PRECISION: tl.constexpr):
    """Adds the product of an fp32 matrix and one in any dtype to `sums`."""
    if rounded.dtype == tl.bfloat16 and not WIDENED:
        high = exact.to(tl.bfloat16)
        sums = tl.dot((exact - high.to(tl.float32)).to(tl.bfloat16), rounded, sums)
        return tl.dot(high, rounded, sums)
    else:
        return tl.dot(exact, rounded.to(tl.float32), sums, input_precision=PRECISION)


@triton.jit
def _row_sums(terms):
    """The sums over D of each of a tuple, four in one reduction: each makes the warps wait for one another."""
    sums = ()
    for i in tl.static_range(0, len(terms) // 4 * 4, 4):
        low = tl.join(terms[i], terms[i + 1])
        high = tl.join(terms[i + 2], terms[i + 3])
        low, high = tl.split(tl.sum(tl.join(low, high), 1))
        sums += tl.split(low)
        sums += tl.split(high)
    if len(terms) % 4 >= 2:
        sums += tl.split(tl.sum(tl.join(terms[len(sums)], terms[len(sums) + 1]), 1))
    if len(terms) % 2 == 1:
        sums += (tl.sum(terms[len(sums)], 1),)
    return sums


@triton.jit
def _inverse_rms(x, eps, D: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, 1) / D + eps)


@triton.jit
def _logit_backward(logit_grad_R, x, query, inverse_R, logit_R, D: tl.constexpr):
    """The gradient of `x` from that of the logit `query . x * inverse`."""
    return (logit_grad_R * inverse_R)[:, None] * query - (logit_grad_R * inverse_R * inverse_R * logit_R / D)[
        :, None
    ] * x


@triton.jit
def _mix(values, query, bias, eps, D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mix of the sources `values`, and inverse root mean squares, logits and weights of each."""
    terms = ()
    for i in tl.static_range(len(values)):
        value = values[i].to(tl.float32)
        terms += (value * value, value * query)
    sums = _row_sums(terms)
    inverses = ()
    logits = ()
    for i in tl.static_range(len(values)):
        inverse_R = tl.rsqrt(sums[2 * i] / D + eps)
        inverses += (inverse_R,)
        logits += (sums[2 * i + 1] * inverse_R,)
    highest_R = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    for i in tl.static_range(len(values)):
        highest_R = tl.maximum(highest_R, _biased(logits, i, bias))
    total_R = tl.zeros([BLOCK_ROWS], tl.float32)
    mixed = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for i in tl.static_range(len(values)):
        odds_R = tl.exp(_biased(logits, i, bias) - highest_R)
        total_R += odds_R
        mixed += odds_R[:, None] * values[i].to(tl.float32)
    return mixed / total_R[:, None], highest_R + tl.log(total_R), inverses, logits


@triton.jit
def _biased(logits, i: tl.constexpr, bias):
    logit_R = logits[i]
    if bias is not None and i == len(logits) - 1:
        logit_R += bias
    return logit_R


@triton.jit
def _norm(mixed, weight, eps, D: tl.constexpr):
    return mixed * _inverse_rms(mixed, eps, D)[:, None] * weight


@triton.jit
def _norm_backward(grad, mixed, weight, eps, D: tl.constexpr):
    """Gradients of the normalised rows and, to be summed over rows, of the weight."""
    inverse_R = _inverse_rms(mixed, eps, D)
    normal = mixed * inverse_R[:, None]
    weighted = grad * weight
    mean_R = tl.sum(weighted * normal, 1) / D
    return inverse_R[:, None] * (weighted - mean_R[:, None] * normal), grad * normal


@triton.jit
def _store_sums(partial_sums, row, sums, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    # partial_sums is [P, ROWS, D]. A second kernel adds it up: atomics would add in a different order each time.
    column_D = tl.arange(0, BLOCK_D)
    pointer = partial_sums + (tl.program_id(0).to(tl.int64) * ROWS + row) * D
    tl.store(pointer + column_D, tl.sum(sums, 0), mask=column_D < D)


@triton.jit(do_not_specialize=["tokens"])
def attn_res_fwd_kernel(
    sources,
    query,
    gain,
    bias,
    output_norm,
    mixed,
    scalars,
    tokens,
    eps,
    FACTOR: tl.constexpr,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row_R, valid_R = block_of(tokens, BLOCK_ROWS)
    values = ()
    for i in tl.static_range(len(sources)):
        values += (_load(sources[i], row_R, valid_R, D, BLOCK_D),)
    query_D = _load_query(query, gain, D, BLOCK_D)
    if bias is not None:
        bias = tl.load(bias).to(tl.float32)
    result, _, inverses, logits = _mix(values, query_D, bias, eps, D, BLOCK_ROWS, BLOCK_D)
    result *= FACTOR
    if output_norm is not None:
        result = _norm(result, _load_vector(output_norm, D, BLOCK_D), eps, D)
    _store(mixed, result, row_R, valid_R, D, BLOCK_D)
    if scalars is not None:
        # The scalars are [T, 2, N].
        for i in tl.static_range(len(sources)):
            address_R = scalars + row_R * 2 * len(sources) + i
            tl.store(address_R, inverses[i], mask=valid_R)
            tl.store(address_R + len(sources), logits[i], mask=valid_R)


@triton.jit(do_not_specialize=["tokens"])
def attn_res_bwd_kernel(
    mixed_grad,
    sources,
    query,
    gain,
    bias,
    output_norm,
    scalars,
    source_grads,
    last_logit_grad,
    partial_sums,
    tokens,
    eps,
    FACTOR: tl.constexpr,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    N: tl.constexpr = len(sources)
    query_D = _load_query(query, gain, D, BLOCK_D)
    query_sums = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    norm_sums = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    if bias is not None:
        bias = tl.load(bias).to(tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(tokens, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row_R = (block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        valid_R = row_R < tokens
        grad = _load(mixed_grad, row_R, valid_R, D, BLOCK_D).to(tl.float32)
        values = ()
        inverses = ()
        logits = ()
        for i in tl.static_range(N):
            values += (_load(sources[i], row_R, valid_R, D, BLOCK_D),)
            address_R = scalars + row_R * 2 * N + i
            inverses += (tl.load(address_R, mask=valid_R, other=0.0),)
            logits += (tl.load(address_R + N, mask=valid_R, other=0.0),)
        highest_R = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        for i in tl.static_range(N):
            highest_R = tl.maximum(highest_R, _biased(logits, i, bias))
        total_R = tl.zeros([BLOCK_ROWS], tl.float32)
        for i in tl.static_range(N):
            total_R += tl.exp(_biased(logits, i, bias) - highest_R)
        weights = ()
        for i in tl.static_range(N):
            weights += (tl.exp(_biased(logits, i, bias) - highest_R) / total_R,)
        if output_norm is not None:
            mixed = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
            for i in tl.static_range(N):
                mixed += (weights[i] * FACTOR)[:, None] * values[i].to(tl.float32)
            grad, norm_sum = _norm_backward(grad, mixed, _load_vector(output_norm, D, BLOCK_D), eps, D)
            norm_sums += norm_sum
        grad *= FACTOR

        terms = ()
        for i in tl.static_range(N):
            terms += (grad * values[i].to(tl.float32),)
        products = _row_sums(terms)
        mean_R = tl.zeros([BLOCK_ROWS], tl.float32)
        for i in tl.static_range(N):
            mean_R += weights[i] * products[i]
        for i in tl.static_range(N):
            value = values[i].to(tl.float32)
            logit_grad_R = weights[i] * (products[i] - mean_R)
            value_grad = weights[i][:, None] * grad
            value_grad += _logit_backward(logit_grad_R, value, query_D, inverses[i], logits[i], D)
            _store(source_grads[i], value_grad, row_R, valid_R, D, BLOCK_D)
            query_sums += (logit_grad_R * inverses[i])[:, None] * value
            if last_logit_grad is not None and i == N - 1:
                tl.store(last_logit_grad + row_R, logit_grad_R, mask=valid_R)
    ROWS: tl.constexpr = 1 if output_norm is None else 2
    _store_sums(partial_sums, 0, query_sums, ROWS, D, BLOCK_D)
    if output_norm is not None:
        _store_sums(partial_sums, 1, norm_sums, ROWS, D, BLOCK_D)


@triton.jit(do_not_specialize=["tokens"])
def attn_res_phase_1_few_fwd_kernel(
    sources,
    queries,
    gains,
    outputs,
    log_sum_exps,
    scalars,
    tokens,
    eps,
    ALIGNMENT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Phase 1 of few tokens, as in decoding: each program has one site, and there is one launch."""
    N: tl.constexpr = len(sources)
    SITES: tl.constexpr = len(log_sum_exps)
    row_R, valid_R = block_of(tokens, BLOCK_ROWS)
    site = tl.program_id(1)
    values = ()
    for i in tl.static_range(N):
        values += (_load(sources[i], row_R, valid_R, D, BLOCK_D),)
    query, _ = _one_of(queries, site, ALIGNMENT)
    query_D = _load_vector(query, D, BLOCK_D)
    if len(gains) > 0:
        gain, _ = _one_of(gains, site, ALIGNMENT)
        query_D *= _load_vector(gain, D, BLOCK_D)
    mixed, log_sum_exp_R, inverses, logits = _mix(values, query_D, None, eps, D, BLOCK_ROWS, BLOCK_D)
    if len(outputs) > 0:
        _store(_one_of(outputs, site, ALIGNMENT), mixed, row_R, valid_R, D, BLOCK_D)
    log_sum_exp, _ = _one_of(log_sum_exps, site, 4)
    tl.store(log_sum_exp + row_R, log_sum_exp_R, mask=valid_R)
    if scalars is not None:
        for i in tl.static_range(N):
            address_R = scalars + (i * tokens.to(tl.int64) + row_R) * (SITES + 1)
            tl.store(address_R + site, logits[i], mask=valid_R)
            tl.store(address_R + SITES, inverses[i], mask=valid_R & (site == 0))


@triton.jit(do_not_specialize=["tokens"])
def attn_res_phase_1_score_kernel(
    sources,
    queries,
    log_sum_exps,
    scalars,
    tokens,
    eps,
    ALIGNMENT: tl.constexpr,
    SITES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """
    The logits of one source at all sites, a matrix product, and its inverse root mean squares. Where there is no
    other source, the logits are the log-sum-exps.
    """
    token_T, valid_T = block_of(tokens, BLOCK_T)
    site_S = tl.arange(0, BLOCK_S)
    source, row_stride = _one_of(sources, tl.program_id(1), ALIGNMENT)
    row_T1 = source + (token_T * row_stride)[:, None]
    logits_ST = tl.zeros([BLOCK_S, BLOCK_T], tl.float32)
    squares_T = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, D, BLOCK_K):
        column_K = start + tl.arange(0, BLOCK_K)
        value_TK = tl.load(row_T1 + column_K[None, :], mask=valid_T[:, None] & (column_K < D)[None, :], other=0.0)
        query_SK = _load_queries(queries, site_S, column_K, SITES, D)
        logits_ST = _dot(query_SK, tl.trans(value_TK), logits_ST, PRECISION)
        squares_T += tl.sum(value_TK.to(tl.float32) * value_TK.to(tl.float32), 1)
    inverse_T = tl.rsqrt(squares_T / D + eps)
    logits_ST *= inverse_T[None, :]
    mask_ST = (site_S < SITES)[:, None] & valid_T[None, :]
    address_T = scalars + (tl.program_id(1) * tokens.to(tl.int64) + token_T) * (SITES + 1)
    tl.store(address_T[None, :] + site_S[:, None], logits_ST, mask=mask_ST)
    if len(sources) == 1:
        tl.store(_address_of_each(log_sum_exps, site_S)[:, None] + token_T[None, :], logits_ST, mask=mask_ST)
    tl.store(address_T + SITES, inverse_T, mask=valid_T)


@triton.jit(do_not_specialize=["tokens"])
def attn_res_phase_1_fwd_kernel(
    sources,
    scalars,
    outputs,
    log_sum_exps,
    tokens,
    ALIGNMENT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The mixes of all sites from the logits; columns are independent."""
    N: tl.constexpr = len(sources)
    SITES: tl.constexpr = len(outputs)
    row_R, valid_R = block_of(tokens, BLOCK_ROWS)
    column_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = valid_R[:, None] & (column_D < D)[None, :]
    values = ()
    for i in tl.static_range(N):
        address = sources[i][0] + (row_R * sources[i][1])[:, None] + column_D[None, :]
        values += (tl.load(address, mask=mask, other=0.0),)
    for site in tl.range(SITES):
        logits = ()
        highest_R = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        for i in tl.static_range(N):
            address_R = scalars + (i * tokens.to(tl.int64) + row_R) * (SITES + 1) + site
            logits += (tl.load(address_R, mask=valid_R, other=0.0),)
            highest_R = tl.maximum(highest_R, logits[i])
        total_R = tl.zeros([BLOCK_ROWS], tl.float32)
        mixed = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        for i in tl.static_range(N):
            odds_R = tl.exp(logits[i] - highest_R)
            total_R += odds_R
            mixed += odds_R[:, None] * values[i].to(tl.float32)
        output, row_stride = _one_of(outputs, site, ALIGNMENT)
        tl.store(
            output + (row_R * row_stride)[:, None] + column_D[None, :], mixed * (1.0 / total_R)[:, None], mask=mask
        )
        log_sum_exp, _ = _one_of(log_sum_exps, site, 4)
        tl.store(log_sum_exp + row_R, highest_R + tl.log(total_R), mask=valid_R & (tl.program_id(1) == 0))


@triton.jit(do_not_specialize=["tokens"])
def attn_res_phase_1_bwd_kernel(
    output_grads,
    log_sum_exp_grads,
    added_grads,
    sources,
    queries,
    scalars,
    source_grads,
    coefficients,
    tokens,
    ALIGNMENT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    All sums, over columns, sites and sources, are small matrix products. A program has a few tokens, so that the
    queries serve several; of the products between rows of different tokens nothing is used. The rows are read
    twice, the second time from a cache.

    Legend: J pairs of a token and a site, M pairs of a token and a source.
    """
    N: tl.constexpr = len(sources)
    SITES: tl.constexpr = len(output_grads)
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    token_J = first + tl.arange(0, BLOCK_T * BLOCK_S) // BLOCK_S
    site_J = tl.arange(0, BLOCK_T * BLOCK_S) % BLOCK_S
    valid_J = (token_J < tokens) & (site_J < SITES)
    token_M = first + tl.arange(0, BLOCK_T * BLOCK_N) // BLOCK_N
    source_M = tl.arange(0, BLOCK_T * BLOCK_N) % BLOCK_N
    valid_M = (token_M < tokens) & (source_M < N)
    grad_J1 = _row_of_each(output_grads, site_J, token_J)
    value_M1 = _row_of_each(sources, source_M, token_M)
    value_grad_M1 = _row_of_each(source_grads, source_M, token_M)
    added_grad_M1 = value_grad_M1
    if len(added_grads) > 0:
        added_grad_M1 = _row_of_each(added_grads, source_M, token_M)

    products_JM = tl.zeros([BLOCK_T * BLOCK_S, BLOCK_T * BLOCK_N], tl.float32)
    for start in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        column_K = start + tl.arange(0, BLOCK_K)
        grad_JK = _load_of_each(grad_J1, valid_J, column_K, ALIGNMENT, D)
        value_MK = _load_of_each(value_M1, valid_M, column_K, ALIGNMENT, D)
        if WIDENED:
            grad_JK, value_MK = grad_JK.to(tl.float32), value_MK.to(tl.float32)
        products_JM = tl.dot(grad_JK, tl.trans(value_MK), products_JM, input_precision=PRECISION)

    address_M = scalars + (source_M * tokens.to(tl.int64) + token_M) * (SITES + 1)
    mask_JM = (token_J[:, None] == token_M[None, :]) & valid_J[:, None] & valid_M[None, :]
    logits_JM = tl.load(address_M[None, :] + site_J[:, None], mask=mask_JM, other=float("-inf"))
    inverse_M = tl.load(address_M + SITES, mask=valid_M, other=0.0)
    log_sum_exp_grad_J = tl.load(_address_of_each(log_sum_exp_grads, site_J) + token_J, mask=valid_J, other=0.0)
    # Rows without a site need some finite number, whichever.
    highest_J = tl.where(valid_J, tl.max(logits_JM, 1), 0.0)
    odds_JM = tl.exp(logits_JM - highest_J[:, None])
    weights_JM = odds_JM / tl.where(valid_J, tl.sum(odds_JM, 1), 1.0)[:, None]
    mean_J = tl.sum(weights_JM * products_JM, 1)
    logit_grad_JM = weights_JM * (products_JM - mean_J[:, None] + log_sum_exp_grad_J[:, None])
    coefficient_JM = logit_grad_JM * inverse_M[None, :]
    moment_M = tl.sum(logit_grad_JM * tl.where(mask_JM, logits_JM, 0.0), 0)
    shrink_M = inverse_M * inverse_M * moment_M / D
    # The coefficients are [N, T, SITES].
    address_M = coefficients + (source_M * tokens.to(tl.int64) + token_M) * SITES
    tl.store(address_M[None, :] + site_J[:, None], coefficient_JM, mask=mask_JM)

    weights_MJ = tl.trans(weights_JM)
    # All tokens have the same queries, so coefficients of one source can be added up over them.
    coefficient_MTS = tl.reshape(tl.trans(coefficient_JM), [BLOCK_T * BLOCK_N, BLOCK_T, BLOCK_S])
    coefficient_MS = tl.sum(coefficient_MTS, 1)
    site_S = tl.arange(0, BLOCK_S)
    for start in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        column_K = start + tl.arange(0, BLOCK_K)
        grad_JK = _load_of_each(grad_J1, valid_J, column_K, ALIGNMENT, D)
        value_MK = _load_of_each(value_M1, valid_M, column_K, ALIGNMENT, D)
        query_SK = _load_queries(queries, site_S, column_K, SITES, D)
        value_grad_MK = -shrink_M[:, None] * value_MK.to(tl.float32)
        if len(added_grads) > 0:
            value_grad_MK += _load_of_each(added_grad_M1, valid_M, column_K, ALIGNMENT, D).to(tl.float32)
        value_grad_MK = _dot(weights_MJ, grad_JK, value_grad_MK, PRECISION)
        if grad_JK.dtype == tl.bfloat16 and not WIDENED:
            high_SK = query_SK.to(tl.bfloat16)
            value_grad_MK = _dot(coefficient_MS, high_SK, value_grad_MK, PRECISION)
            rest_SK = (query_SK - high_SK.to(tl.float32)).to(tl.bfloat16)
            value_grad_MK = tl.dot(coefficient_MS.to(tl.bfloat16), rest_SK, value_grad_MK)
        else:
            value_grad_MK = _dot(coefficient_MS, query_SK, value_grad_MK, PRECISION)
        tl.store(
            _columns_of_each(value_grad_M1, column_K, ALIGNMENT),
            value_grad_MK,
            mask=valid_M[:, None] & (column_K < D)[None, :],
        )


@triton.jit(do_not_specialize=["tokens", "tokens_of_program"])
def attn_res_phase_1_query_grad_kernel(
    sources,
    coefficients,
    partial_sums,
    tokens,
    tokens_of_program,
    SITES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    site_S = tl.arange(0, BLOCK_S)
    column_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.program_id(0).to(tl.int64) * tokens_of_program
    end = tl.minimum(first + tokens_of_program, tokens)
    sums_SD = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for i in tl.static_range(len(sources)):
        for start in range(first, end, BLOCK_TOKENS):
            token_T = start + tl.arange(0, BLOCK_TOKENS)
            valid_T = token_T < end
            coefficient_TS = tl.load(
                coefficients + (i * tokens.to(tl.int64) + token_T)[:, None] * SITES + site_S[None, :],
                mask=valid_T[:, None] & (site_S < SITES)[None, :],
                other=0.0,
            )
            value_TD = tl.load(
                sources[i][0] + (token_T * sources[i][1])[:, None] + column_D[None, :],
                mask=valid_T[:, None] & (column_D < D)[None, :],
                other=0.0,
            )
            sums_SD = _dot(tl.trans(coefficient_TS), value_TD, sums_SD, PRECISION)
    tl.store(
        partial_sums + (tl.program_id(0).to(tl.int64) * SITES + site_S)[:, None] * D + column_D[None, :],
        sums_SD,
        mask=(site_S < SITES)[:, None] & (column_D < D)[None, :],
    )


@triton.jit(do_not_specialize=["tokens"])
def attn_res_phase_2_fwd_kernel(
    output,
    log_sum_exp,
    partial,
    update,
    query,
    gain,
    bias,
    output_norm,
    new_partial,
    mixed,
    scalars,
    tokens,
    eps,
    FACTOR: tl.constexpr,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row_R, valid_R = block_of(tokens, BLOCK_ROWS)
    tokens = tokens.to(tl.int64)
    finished = _load(output, row_R, valid_R, D, BLOCK_D)
    value = _load(partial, row_R, valid_R, D, BLOCK_D)
    if update is not None:
        added = _load(update, row_R, valid_R, D, BLOCK_D)
        # The sum is rounded as it is stored, since the backward and the next site see that.
        value = (value.to(tl.float32) + added.to(tl.float32)).to(new_partial[0].dtype.element_ty)
    finished = finished.to(tl.float32)
    value = value.to(tl.float32)
    log_sum_exp_R = tl.load(log_sum_exp + row_R, mask=valid_R, other=0.0)
    query_D = _load_query(query, gain, D, BLOCK_D)

    square_R, product_R = _row_sums((value * value, value * query_D))
    inverse_R = tl.rsqrt(square_R / D + eps)
    logit_R = product_R * inverse_R
    relative_R = logit_R - log_sum_exp_R
    if bias is not None:
        relative_R += tl.load(bias).to(tl.float32)
    weight_R = tl.sigmoid(relative_R)
    result = FACTOR * (finished + weight_R[:, None] * (value - finished))
    if output_norm is not None:
        norm_R = _inverse_rms(result, eps, D)
        result = result * norm_R[:, None] * _load_vector(output_norm, D, BLOCK_D)
        if scalars is not None:
            tl.store(scalars + 3 * tokens + row_R, norm_R, mask=valid_R)
    if update is not None:
        _store(new_partial, value, row_R, valid_R, D, BLOCK_D)
    _store(mixed, result, row_R, valid_R, D, BLOCK_D)
    if scalars is not None:
        # The scalars are [4, T].
        tl.store(scalars + row_R, weight_R, mask=valid_R)
        tl.store(scalars + tokens + row_R, inverse_R, mask=valid_R)
        tl.store(scalars + 2 * tokens + row_R, logit_R, mask=valid_R)


@triton.jit(do_not_specialize=["tokens"])
def attn_res_phase_2_bwd_kernel(
    partial_grad,
    mixed_grad,
    output,
    sources,
    partial,
    query,
    gain,
    output_norm,
    scalars,
    output_grad,
    log_sum_exp_grad,
    new_partial_grad,
    partial_sums,
    tokens,
    eps,
    FACTOR: tl.constexpr,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    query_D = _load_query(query, gain, D, BLOCK_D)
    query_sums = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    norm_sums = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    blocks = tl.cdiv(tokens, BLOCK_ROWS)
    tokens = tokens.to(tl.int64)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        row_R = (block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        valid_R = row_R < tokens
        grad = _load(mixed_grad, row_R, valid_R, D, BLOCK_D).to(tl.float32)
        value = _load(partial, row_R, valid_R, D, BLOCK_D).to(tl.float32)
        value_grad = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        if partial_grad is not None:
            value_grad = _load(partial_grad, row_R, valid_R, D, BLOCK_D).to(tl.float32)
        weight_R = tl.load(scalars + row_R, mask=valid_R, other=0.0)
        inverse_R = tl.load(scalars + tokens + row_R, mask=valid_R, other=0.0)
        logit_R = tl.load(scalars + 2 * tokens + row_R, mask=valid_R, other=0.0)
        if output is not None:
            finished = _load(output, row_R, valid_R, D, BLOCK_D).to(tl.float32)
        else:
            values = ()
            for i in tl.static_range(len(sources)):
                values += (_load(sources[i], row_R, valid_R, D, BLOCK_D),)
            finished, _, _, _ = _mix(values, query_D, None, eps, D, BLOCK_ROWS, BLOCK_D)
            finished = finished.to(partial[0].dtype.element_ty).to(tl.float32)

        difference = value - finished
        if output_norm is None:
            product_R = tl.sum(grad * difference, 1)
        else:
            # The gradient of the norm, and its product with the difference, both follow from sums over the gradient
            # that came in. So all these sums are taken at once.
            norm_R = tl.load(scalars + 3 * tokens + row_R, mask=valid_R, other=0.0)
            normal = (FACTOR * norm_R)[:, None] * (finished + weight_R[:, None] * difference)
            norm_sums += grad * normal
            grad *= _load_vector(output_norm, D, BLOCK_D)
            mean_R, product_R, other_R, _ = _row_sums(
                (grad * normal, grad * difference, normal * difference, tl.zeros_like(grad))
            )
            mean_R /= D
            grad = norm_R[:, None] * (grad - mean_R[:, None] * normal)
            product_R = norm_R * (product_R - mean_R * other_R)
        grad *= FACTOR
        logit_grad_R = FACTOR * weight_R * (1.0 - weight_R) * product_R
        value_grad += weight_R[:, None] * grad
        value_grad += _logit_backward(logit_grad_R, value, query_D, inverse_R, logit_R, D)
        query_sums += (logit_grad_R * inverse_R)[:, None] * value
        _store(output_grad, (1.0 - weight_R)[:, None] * grad, row_R, valid_R, D, BLOCK_D)
        _store(new_partial_grad, value_grad, row_R, valid_R, D, BLOCK_D)
        tl.store(log_sum_exp_grad + row_R, -logit_grad_R, mask=valid_R)
    ROWS: tl.constexpr = 1 if output_norm is None else 2
    _store_sums(partial_sums, 0, query_sums, ROWS, D, BLOCK_D)
    if output_norm is not None:
        _store_sums(partial_sums, 1, norm_sums, ROWS, D, BLOCK_D)


@triton.jit(do_not_specialize=["programs"])
def attn_res_parameter_grad_kernel(
    partial_sums,
    queries,
    gains,
    query_grads,
    gain_grads,
    output_norm_grad,
    programs,
    SITES: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sums `[P, ROWS, D]` over programs: a row for the folded query of each site, then that of the output norm."""
    row = tl.program_id(1)
    column_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_D = column_D < D
    sums = tl.zeros([BLOCK_PROGRAMS, BLOCK_D], tl.float32)
    for start in range(0, programs, BLOCK_PROGRAMS):
        program_P = start + tl.arange(0, BLOCK_PROGRAMS)
        address = (program_P * ROWS + row)[:, None] * D + column_D[None, :]
        sums += tl.load(partial_sums + address, mask=(program_P < programs)[:, None] & mask_D[None, :], other=0.0)
    sum_D = tl.sum(sums, 0)
    if row < SITES:
        offset_D = row * D + column_D
        if gains is not None:
            query_D = tl.load(queries + offset_D, mask=mask_D, other=0.0).to(tl.float32)
            tl.store(gain_grads + offset_D, sum_D * query_D, mask=mask_D)
            sum_D *= tl.load(gains + offset_D, mask=mask_D, other=0.0).to(tl.float32)
        tl.store(query_grads + offset_D, sum_D, mask=mask_D)
    elif output_norm_grad is not None:
        tl.store(output_norm_grad + column_D, sum_D, mask=mask_D)
