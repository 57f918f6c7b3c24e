# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Triton kernels of manifold-constrained hyper-connections.

Bytes, in units of one hidden state (tokens x hidden size), with S streams:

    operation            reads              writes
    read                 2 S                1
    write                S + 1              S
    write, bwd           2 S + 1            S + 1
    read, bwd            4 S + 2            S

The read goes over the streams once for the projection, a matrix product whose rows are the maps, and once for the mix.
Its backward goes over them once for the gradients of the weights of the mix, once for the gradient of the streams, to
which it adds that of those it has handed on, and once for the gradient of the projection. These two are products with
the same coefficients of each token, over the maps and over the tokens; apart, neither waits for the other, and each
has a tile of its own. The maps themselves are a few dozen numbers for each token, and a thread has all those of one
token. The backward of the Sinkhorn iterations has only the product of gradient and matrix and the sums that the matrix
was divided by; it runs through the matrices again from the last to the first.

Norm weight and projection are multiplied in fp32. In products with bf16 streams a matrix of fp32 is the sum of two of
bf16, its halves: the rounded one and the rest, which leaves a relative error of 2^-17. Others are products of fp32.

Legend: S streams, T tokens, D hidden size, M = S * (S + 2) entries of the maps, P programs, K splits of the tokens,
H halves of a matrix: two with bf16 streams, else one, of fp32.
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
SMALLEST_SUM = tl.constexpr(1e-12)


@triton.jit
def _halves(x, dtype: tl.constexpr):
    """What a matrix of fp32 is in products with one of this dtype."""
    if dtype == tl.bfloat16 and not WIDENED:
        high = x.to(tl.bfloat16)
        return high, (x - high.to(tl.float32)).to(tl.bfloat16)
    else:
        return (x,)


@triton.jit
def _store_halves(address, distance, x, mask):
    """fp32, as halves of the dtype of the place."""
    high = x.to(address.dtype.element_ty)
    tl.store(address, high, mask=mask)
    if high.dtype == tl.bfloat16:
        tl.store(address + distance, x - high.to(tl.float32), mask=mask)


@triton.jit
def _load_halves(address, distance, mask):
    high = tl.load(address, mask=mask, other=0.0)
    if high.dtype == tl.bfloat16:
        return high, tl.load(address + distance, mask=mask, other=0.0)
    else:
        return (high,)


@triton.jit
def _dot(a, b, sums, PRECISION: tl.constexpr):
    """Adds the product of two matrices, each given by its halves, to `sums`: the larger terms last."""
    for i in tl.static_range(len(a) - 1, -1, -1):
        for j in tl.static_range(len(b) - 1, -1, -1):
            if i + j < 2:
                if a[i].dtype == tl.bfloat16 and b[j].dtype == tl.bfloat16 and not WIDENED:
                    sums = tl.dot(a[i], b[j], sums)
                else:
                    sums = tl.dot(a[i].to(tl.float32), b[j].to(tl.float32), sums, input_precision=PRECISION)
    return sums


@triton.jit
def _folded(norm_weight, projection, map_M1, column_1D, stream, S: tl.constexpr, D: tl.constexpr):
    """What one stream is multiplied by, fp32."""
    inside_1D = column_1D < D
    place_1D = stream * D + column_1D
    weight_MD = tl.load(projection + map_M1 * (S * D) + place_1D, mask=(map_M1 < S * (S + 2)) & inside_1D, other=0.0)
    return weight_MD.to(tl.float32) * tl.load(norm_weight + place_1D, mask=inside_1D, other=0.0).to(tl.float32)


@triton.jit
def _row(streams, token_T, stream):
    """Addresses `[T, 1]` of rows of one stream, whose distance may not fit into 32 bits."""
    return streams[0] + (token_T * streams[1] + tl.cast(stream, tl.int64) * streams[2])[:, None]


@triton.jit
def _map_logit(projected_T, alphas, logits, index: tl.constexpr, S: tl.constexpr):
    part: tl.constexpr = (index >= S) + (index >= 2 * S)
    alpha = tl.load(alphas[part]).to(tl.float32)
    return alpha * projected_T + tl.load(logits[part] + (index - part * S)).to(tl.float32)


@triton.jit
def _sinkhorn_start(logits):
    """The largest logit, `exp` of all logits relative to it, and the matrix from which the iterations start."""
    highest_T = logits[0]
    for k in tl.static_range(1, len(logits)):
        highest_T = tl.maximum(highest_T, logits[k])
    odds = ()
    for k in tl.static_range(len(logits)):
        odds += (tl.exp(logits[k] - highest_T),)
    matrix = ()
    for k in tl.static_range(len(logits)):
        matrix += (tl.maximum(odds[k], SMALLEST_SUM),)
    return highest_T, odds, matrix


@triton.jit
def _line_sums(matrix, COLUMNS: tl.constexpr, S: tl.constexpr):
    """The sums of the columns, or else of the rows, of a matrix, which is a tuple row by row."""
    sums = ()
    for line in tl.static_range(S):
        total_T = matrix[line if COLUMNS else line * S]
        for k in tl.static_range(1, S):
            total_T += matrix[k * S + line if COLUMNS else line * S + k]
        sums += (total_T,)
    return sums


@triton.jit
def _sinkhorn_step(matrix, sums_T, tokens, valid_T, COLUMNS: tl.constexpr, S: tl.constexpr):
    """Divides by the sums of lines, which are kept at `sums_T` if given."""
    sums = _line_sums(matrix, COLUMNS, S)
    inverses = ()
    for line in tl.static_range(S):
        sum_T = tl.maximum(sums[line], SMALLEST_SUM)
        inverses += (1.0 / sum_T,)
        if sums_T is not None:
            tl.store(sums_T + line * tokens, sum_T, mask=valid_T)
    scaled = ()
    for k in tl.static_range(S * S):
        scaled += (matrix[k] * inverses[k % S if COLUMNS else k // S],)
    return scaled


@triton.jit
def _sinkhorn_step_backward(products, matrix, sums_T, tokens, valid_T, COLUMNS: tl.constexpr, S: tl.constexpr):
    """
    The products of gradient and matrix, and the matrix, before a step from those after it: with c the sum of a
    line and m = n / c, the gradient of n is (dm - sum(dm * m)) / c.
    """
    means = _line_sums(products, COLUMNS, S)
    sums = ()
    for line in tl.static_range(S):
        sums += (tl.load(sums_T + line * tokens, mask=valid_T, other=1.0),)
    new_products = ()
    new_matrix = ()
    for k in tl.static_range(S * S):
        new_products += (products[k] - means[k % S if COLUMNS else k // S] * matrix[k],)
        new_matrix += (matrix[k] * sums[k % S if COLUMNS else k // S],)
    return new_products, new_matrix


@triton.jit
def _thread_sums(x_TD, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sums of eight neighbouring columns, which lie in one thread: the rest is added up once in the end."""
    return tl.sum(tl.reshape(x_TD, [BLOCK_T, BLOCK_D // 8, 8]), 2)


@triton.jit(do_not_specialize=["tokens"])
def hyper_connection_score_kernel(
    streams,
    norm_weight,
    projection,
    scores,
    tokens,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What one stream adds to the projection, and to the sum of squares: `[S, M + 1, T]`."""
    M: tl.constexpr = S * (S + 2)
    token_T, valid_T = block_of(tokens, BLOCK_T)
    stream = tl.program_id(1)
    row_T1 = _row(streams, token_T, stream)
    map_M = tl.arange(0, BLOCK_M)
    scores_TM = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    squares_T = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, D, BLOCK_D):
        column_1D = start + tl.arange(0, BLOCK_D)[None, :]
        value_TD = tl.load(row_T1 + column_1D, mask=valid_T[:, None] & (column_1D < D), other=0.0)
        weight_MD = _folded(norm_weight, projection, map_M[:, None], column_1D, stream, S, D)
        squares_T += tl.sum(value_TD.to(tl.float32) * value_TD.to(tl.float32), 1)
        halves = _halves(tl.trans(weight_MD), value_TD.dtype)
        scores_TM = _dot((value_TD,), halves, scores_TM, PRECISION)
    first = stream.to(tl.int64) * (M + 1) * tokens
    tl.store(
        scores + first + token_T[:, None] + map_M[None, :] * tokens.to(tl.int64),
        scores_TM,
        mask=valid_T[:, None] & (map_M < M)[None, :],
    )
    tl.store(scores + first + M * tokens.to(tl.int64) + token_T, squares_T, mask=valid_T)


@triton.jit(do_not_specialize=["tokens", "iterations"])
def hyper_connection_maps_fwd_kernel(
    scores,
    alphas,
    logits,
    scalars,
    residual,
    post,
    tokens,
    iterations,
    eps,
    S: tl.constexpr,
    D: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """
    The maps. `scalars` is `[M + 1 + S, T]`: the projection, the inverse root mean square, and the weights of the
    mix.
    """
    M: tl.constexpr = S * (S + 2)
    token_T, valid_T = block_of(tokens, BLOCK_T)
    tokens = tokens.to(tl.int64)
    sums = ()
    for m in tl.static_range(M + 1):
        sum_T = tl.zeros([BLOCK_T], tl.float32)
        for stream in tl.static_range(S):
            address_T = scores + (stream * (M + 1) + m) * tokens + token_T
            sum_T += tl.load(address_T, mask=valid_T, other=0.0)
        sums += (sum_T,)
    inverse_T = tl.rsqrt(sums[M] / (S * D) + eps)
    tl.store(scalars + M * tokens + token_T, inverse_T, mask=valid_T)
    matrix_logits = ()
    for m in tl.static_range(M):
        projected_T = sums[m] * inverse_T
        tl.store(scalars + m * tokens + token_T, projected_T, mask=valid_T)
        logit_T = _map_logit(projected_T, alphas, logits, m, S)
        if m < S:
            tl.store(scalars + (M + 1 + m) * tokens + token_T, tl.sigmoid(logit_T), mask=valid_T)
        elif m < 2 * S:
            tl.store(post + token_T * S + (m - S), 2.0 * tl.sigmoid(logit_T), mask=valid_T)
        else:
            matrix_logits += (logit_T,)
    _, _, matrix = _sinkhorn_start(matrix_logits)
    for _ in range(iterations):
        matrix = _sinkhorn_step(matrix, None, tokens, valid_T, COLUMNS_FIRST, S)
        matrix = _sinkhorn_step(matrix, None, tokens, valid_T, not COLUMNS_FIRST, S)
    for k in tl.static_range(S * S):
        tl.store(residual + token_T * (S * S) + k, matrix[k], mask=valid_T)


@triton.jit(do_not_specialize=["tokens"])
def hyper_connection_mix_kernel(
    streams, scalars, mixed, tokens, S: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    token_T, valid_T = block_of(tokens, BLOCK_T)
    column_1D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    mask_TD = valid_T[:, None] & (column_1D < D)
    mixed_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for i in tl.static_range(S):
        address_TD = _row(streams, token_T, i) + column_1D
        pre_T = tl.load(scalars + (S * (S + 2) + 1 + i) * tokens.to(tl.int64) + token_T, mask=valid_T, other=0.0)
        mixed_TD += pre_T[:, None] * tl.load(address_TD, mask=mask_TD, other=0.0).to(tl.float32)
    tl.store(mixed + (token_T * D)[:, None] + column_1D, mixed_TD, mask=mask_TD)


@triton.jit(do_not_specialize=["tokens"])
def hyper_connection_pre_grad_kernel(
    streams,
    mixed_grad,
    pre_grad,
    tokens,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The gradients of the weights of the mix, `[S, T]`."""
    token_T, valid_T = block_of(tokens, BLOCK_T)
    sums = ()
    for _ in tl.static_range(S):
        sums += (tl.zeros([BLOCK_T, BLOCK_D // 8], tl.float32),)
    for start in range(0, D, BLOCK_D):
        column_1D = start + tl.arange(0, BLOCK_D)[None, :]
        mask_TD = valid_T[:, None] & (column_1D < D)
        address_TD = mixed_grad[0] + (token_T * mixed_grad[1])[:, None] + column_1D
        grad_TD = tl.load(address_TD, mask=mask_TD, other=0.0).to(tl.float32)
        new_sums = ()
        for i in tl.static_range(S):
            address_TD = _row(streams, token_T, i) + column_1D
            value_TD = tl.load(address_TD, mask=mask_TD, other=0.0).to(tl.float32)
            new_sums += (sums[i] + _thread_sums(grad_TD * value_TD, BLOCK_T, BLOCK_D),)
        sums = new_sums
    for i in tl.static_range(S):
        tl.store(pre_grad + i * tokens.to(tl.int64) + token_T, tl.sum(sums[i], 1), mask=valid_T)


@triton.jit
def _joined(columns, BLOCK_T: tl.constexpr):
    """Columns, a power of two of them, as a matrix, to be stored by rows. A thread keeps its own."""
    COLUMNS: tl.constexpr = len(columns)
    # Each step makes a dimension of the highest bit that is left of a column's number.
    for _ in tl.static_range(COLUMNS.bit_length() - 1):
        pairs = ()
        for k in tl.static_range(len(columns) // 2):
            pairs += (tl.join(columns[k], columns[k + len(columns) // 2]),)
        columns = pairs
    return tl.reshape(columns[0], [BLOCK_T, COLUMNS])


@triton.jit(do_not_specialize=["tokens", "iterations", "programs"])
def hyper_connection_maps_bwd_kernel(
    pre_grad,
    residual_grad,
    post_grad,
    alphas,
    logits,
    scalars,
    line_sums,
    coefficients,
    shrink,
    map_sums,
    tokens,
    iterations,
    programs,
    S: tl.constexpr,
    D: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """
    From the gradients of the maps what the folded projection's rows and the streams themselves are multiplied by
    in the gradient of the streams: the `coefficients`, `[T, H, BLOCK_M]`, and `shrink`, `[T]`; and `map_sums`,
    `[2, M, P]`, which make the gradients of logits and alphas. `line_sums` is a place for the sums of the Sinkhorn
    iterations, `[iterations, 2, S, T]`.
    """
    M: tl.constexpr = S * (S + 2)
    token_T, valid_T = block_of(tokens, BLOCK_T)
    tokens = tokens.to(tl.int64)
    matrix_logits = ()
    for m in tl.static_range(2 * S, M):
        projected_T = tl.load(scalars + m * tokens + token_T, mask=valid_T, other=0.0)
        matrix_logits += (_map_logit(projected_T, alphas, logits, m, S),)
    highest_T, odds, matrix = _sinkhorn_start(matrix_logits)
    for step in range(iterations):
        sums_T = line_sums + step * 2 * S * tokens + token_T
        matrix = _sinkhorn_step(matrix, sums_T, tokens, valid_T, COLUMNS_FIRST, S)
        matrix = _sinkhorn_step(matrix, sums_T + S * tokens, tokens, valid_T, not COLUMNS_FIRST, S)
    # From here on a thread may read what another one has written.
    tl.debug_barrier()
    products = ()
    for k in tl.static_range(S * S):
        grad_T = tl.load(residual_grad + token_T * (S * S) + k, mask=valid_T, other=0.0).to(tl.float32)
        products += (grad_T * matrix[k],)
    for done in range(iterations):
        sums_T = line_sums + (iterations - 1 - done) * 2 * S * tokens + token_T
        products, matrix = _sinkhorn_step_backward(
            products, matrix, sums_T + S * tokens, tokens, valid_T, not COLUMNS_FIRST, S
        )
        products, matrix = _sinkhorn_step_backward(products, matrix, sums_T, tokens, valid_T, COLUMNS_FIRST, S)
    # The largest logit was subtracted from all. Several may be the largest, and share its gradient.
    total_T = tl.zeros([BLOCK_T], tl.float32)
    ties_T = tl.zeros([BLOCK_T], tl.float32)
    passed = ()
    for k in tl.static_range(S * S):
        passed += (tl.where(odds[k] >= SMALLEST_SUM, products[k], 0.0),)
        total_T += passed[k]
        ties_T += (matrix_logits[k] == highest_T).to(tl.float32)

    inverse_T = tl.load(scalars + M * tokens + token_T, mask=valid_T, other=0.0)
    moment_T = tl.zeros([BLOCK_T], tl.float32)
    row = ()
    for m in tl.static_range(M):
        projected_T = tl.load(scalars + m * tokens + token_T, mask=valid_T, other=0.0)
        if m < S:
            pre_T = tl.load(scalars + (M + 1 + m) * tokens + token_T, mask=valid_T, other=0.0)
            grad_T = tl.load(pre_grad + m * tokens + token_T, mask=valid_T, other=0.0)
            logit_grad_T = grad_T * pre_T * (1.0 - pre_T)
        elif m < 2 * S:
            half_T = tl.sigmoid(_map_logit(projected_T, alphas, logits, m, S))
            grad_T = tl.load(post_grad + token_T * S + (m - S), mask=valid_T, other=0.0).to(tl.float32)
            logit_grad_T = 2.0 * grad_T * half_T * (1.0 - half_T)
        else:
            is_highest_T = matrix_logits[m - 2 * S] == highest_T
            logit_grad_T = passed[m - 2 * S] - tl.where(is_highest_T, total_T / ties_T, 0.0)
        place = map_sums + m * programs.to(tl.int64) + tl.program_id(0)
        tl.store(place, tl.sum(logit_grad_T))
        tl.store(place + M * programs.to(tl.int64), tl.sum(logit_grad_T * projected_T))
        alpha = tl.load(alphas[(m >= S) + (m >= 2 * S)]).to(tl.float32)
        projected_grad_T = alpha * logit_grad_T
        moment_T += projected_grad_T * projected_T
        row += (projected_grad_T * inverse_T,)
    tl.store(shrink + token_T, inverse_T * inverse_T * moment_T / (S * D), mask=valid_T)
    for _ in tl.static_range(M, BLOCK_M):
        row += (tl.zeros([BLOCK_T], tl.float32),)
    address_T1 = coefficients + (token_T * (HALVES * BLOCK_M))[:, None]
    _store_halves(address_T1 + tl.arange(0, BLOCK_M)[None, :], BLOCK_M, _joined(row, BLOCK_T), valid_T[:, None])


@triton.jit
def hyper_connection_fold_kernel(
    norm_weight, projection, weights, S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """The folded projection, `[H, M, S, D]`, once for all programs that need it."""
    M: tl.constexpr = S * (S + 2)
    column_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_D = column_D < S * D
    place_D = tl.program_id(1) * (S * D) + column_D
    weight_D = tl.load(projection + place_D, mask=inside_D, other=0.0).to(tl.float32)
    weight_D *= tl.load(norm_weight + column_D, mask=inside_D, other=0.0).to(tl.float32)
    _store_halves(weights + place_D, M * S * D, weight_D, inside_D)


@triton.jit(do_not_specialize=["tokens"])
def hyper_connection_streams_grad_kernel(
    mixed_grad,
    added_grad,
    streams,
    weights,
    scalars,
    coefficients,
    shrink,
    streams_grad,
    tokens,
    S: tl.constexpr,
    D: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """
    The gradient of some columns of one stream. Neighbouring programs have those of the others, and find the
    gradient of the mix, which all need, in a cache.
    """
    M: tl.constexpr = S * (S + 2)
    COLUMNS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    tile, stream = tl.program_id(0) // S, tl.program_id(0) % S
    token_T = (tile // COLUMNS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid_T = token_T < tokens
    column_1D = (tile % COLUMNS) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    mask_TD = valid_T[:, None] & (column_1D < D)
    tokens = tokens.to(tl.int64)
    shrink_T = tl.load(shrink + token_T, mask=valid_T, other=0.0)
    map_M = tl.arange(0, BLOCK_M)
    address_T1 = coefficients + (token_T * (HALVES * BLOCK_M))[:, None]
    coefficient_halves = _load_halves(address_T1 + map_M[None, :], BLOCK_M, valid_T[:, None])
    value_TD = tl.load(_row(streams, token_T, stream) + column_1D, mask=mask_TD, other=0.0)
    if added_grad is not None:
        added_TD = tl.load(_row(added_grad, token_T, stream) + column_1D, mask=mask_TD, other=0.0)
    pre_T = tl.load(scalars + (M + 1 + stream) * tokens + token_T, mask=valid_T, other=0.0)
    weight_halves = _load_halves(
        weights + map_M[:, None] * (S * D) + stream * D + column_1D, M * S * D, (map_M < M)[:, None] & (column_1D < D)
    )
    address_TD = mixed_grad[0] + (token_T * mixed_grad[1])[:, None] + column_1D
    mixed_grad_TD = tl.load(address_TD, mask=mask_TD, other=0.0)
    grad_TD = pre_T[:, None] * mixed_grad_TD.to(tl.float32) - shrink_T[:, None] * value_TD.to(tl.float32)
    if added_grad is not None:
        grad_TD += added_TD.to(tl.float32)
    grad_TD = _dot(coefficient_halves, weight_halves, grad_TD, PRECISION)
    tl.store(streams_grad + (token_T * (S * D) + stream * D)[:, None] + column_1D, grad_TD, mask=mask_TD)


@triton.jit(do_not_specialize=["tokens", "tokens_of_program"])
def hyper_connection_projection_grad_kernel(
    streams,
    coefficients,
    partial_sums,
    tokens,
    tokens_of_program,
    S: tl.constexpr,
    D: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What some of the tokens add to some columns of the gradient of the folded projection, `[K, M, S, D]`."""
    M: tl.constexpr = S * (S + 2)
    COLUMNS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    stream = tl.program_id(0) // COLUMNS
    column_D = (tl.program_id(0) % COLUMNS) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.program_id(1).to(tl.int64) * tokens_of_program
    end = tl.minimum(first + tokens_of_program, tokens)
    # The two halves of the coefficients stand side by side, in one product.
    sums_DN = tl.zeros([BLOCK_D, HALVES * BLOCK_M], tl.float32)
    for start in range(first, end, BLOCK_T):
        token_T = start + tl.arange(0, BLOCK_T)
        valid_T1 = (token_T < end)[:, None]
        value_TD = tl.load(
            _row(streams, token_T, stream) + column_D[None, :], mask=valid_T1 & (column_D < D)[None, :], other=0.0
        )
        place_TN = (token_T * (HALVES * BLOCK_M))[:, None] + tl.arange(0, HALVES * BLOCK_M)[None, :]
        coefficient_TN = tl.load(coefficients + place_TN, mask=valid_T1, other=0.0)
        sums_DN = _dot((tl.trans(value_TD),), (coefficient_TN,), sums_DN, PRECISION)
    sums_DM = tl.sum(tl.reshape(sums_DN, [BLOCK_D, HALVES, BLOCK_M]), 1)
    map_1M = tl.arange(0, BLOCK_M)[None, :]
    place_DM = (stream * D + column_D)[:, None] + map_1M * (S * D)
    tl.store(
        partial_sums + tl.program_id(1).to(tl.int64) * (M * S * D) + place_DM,
        sums_DM,
        mask=(column_D < D)[:, None] & (map_1M < M),
    )


@triton.jit(do_not_specialize=["splits", "programs"])
def hyper_connection_parameter_grad_kernel(
    partial_sums,
    map_sums,
    norm_weight,
    projection,
    norm_weight_grad,
    projection_grad,
    alpha_grads,
    logit_grads,
    splits,
    programs,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """
    The second reduction of all sums. The first programs have the columns of the projection, one more each entry of
    the maps, and one more each alpha.
    """
    M: tl.constexpr = S * (S + 2)
    COLUMN_PROGRAMS: tl.constexpr = (S * D + BLOCK_D - 1) // BLOCK_D
    if tl.program_id(0) < COLUMN_PROGRAMS:
        column_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside_D = column_D < S * D
        gain_D = tl.load(norm_weight + column_D, mask=inside_D, other=0.0).to(tl.float32)
        gain_grad_D = tl.zeros([BLOCK_D], tl.float32)
        for first in range(0, M, BLOCK_M):
            map_M = first + tl.arange(0, BLOCK_M)
            address_MD = map_M[:, None] * (S * D) + column_D[None, :]
            mask_MD = (map_M < M)[:, None] & inside_D[None, :]
            sums_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for start in range(0, splits, BLOCK_K):
                split_K = start + tl.arange(0, BLOCK_K)
                sums_MD += tl.sum(
                    tl.load(
                        partial_sums + split_K.to(tl.int64)[:, None, None] * (M * S * D) + address_MD[None, :, :],
                        mask=(split_K < splits)[:, None, None] & mask_MD[None, :, :],
                        other=0.0,
                    ),
                    0,
                )
            weight_MD = tl.load(projection + address_MD, mask=mask_MD, other=0.0).to(tl.float32)
            gain_grad_D += tl.sum(sums_MD * weight_MD, 0)
            tl.store(projection_grad + address_MD, sums_MD * gain_D[None, :], mask=mask_MD)
        tl.store(norm_weight_grad + column_D, gain_grad_D, mask=inside_D)
    else:
        row = tl.program_id(0) - COLUMN_PROGRAMS
        part = row - M
        # The entries of one map lie together.
        rows = tl.where(part == 2, S * S, tl.where(part >= 0, S, 1))
        source = map_sums + tl.where(part >= 0, M + part * S, row) * programs.to(tl.int64)
        sums_P = tl.zeros([BLOCK_P], tl.float32)
        for start in range(0, rows * programs, BLOCK_P):
            place_P = start + tl.arange(0, BLOCK_P)
            sums_P += tl.load(source + place_P, mask=place_P < rows * programs, other=0.0)
        total = tl.sum(sums_P)
        tl.store(logit_grads[0] + row, total, mask=row < S)
        tl.store(logit_grads[1] + row - S, total, mask=(row >= S) & (row < 2 * S))
        tl.store(logit_grads[2] + row - 2 * S, total, mask=(row >= 2 * S) & (row < M))
        for i in tl.static_range(3):
            tl.store(alpha_grads[i], total, mask=part == i)


@triton.jit
def _load_maps(residual, post, token_T, valid_T, S: tl.constexpr):
    matrix = ()
    for k in tl.static_range(S * S):
        entry_T = tl.load(residual + token_T * (S * S) + k, mask=valid_T, other=0.0)
        matrix += (entry_T.to(tl.float32)[:, None],)
    weights = ()
    for i in tl.static_range(S):
        weight_T = tl.load(post + token_T * S + i, mask=valid_T, other=0.0)
        weights += (weight_T.to(tl.float32)[:, None],)
    return matrix, weights


@triton.jit(do_not_specialize=["tokens"])
def hyper_connection_write_fwd_kernel(
    streams,
    update,
    residual,
    post,
    new_streams,
    tokens,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token_T, valid_T = block_of(tokens, BLOCK_T)
    column_1D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    mask_TD = valid_T[:, None] & (column_1D < D)
    values = ()
    for i in tl.static_range(S):
        address_TD = _row(streams, token_T, i) + column_1D
        values += (tl.load(address_TD, mask=mask_TD, other=0.0),)
    update_TD = tl.load(update[0] + (token_T * update[1])[:, None] + column_1D, mask=mask_TD, other=0.0)
    matrix, weights = _load_maps(residual, post, token_T, valid_T, S)
    for i in tl.static_range(S):
        new_TD = weights[i] * update_TD.to(tl.float32)
        for j in tl.static_range(S):
            new_TD += matrix[i * S + j] * values[j].to(tl.float32)
        tl.store(new_streams + (token_T * (S * D) + i * D)[:, None] + column_1D, new_TD, mask=mask_TD)


@triton.jit(do_not_specialize=["tokens"])
def hyper_connection_write_bwd_kernel(
    new_streams_grad,
    streams,
    update,
    residual,
    post,
    streams_grad,
    update_grad,
    residual_grad,
    post_grad,
    tokens,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token_T, valid_T = block_of(tokens, BLOCK_T)
    matrix, weights = _load_maps(residual, post, token_T, valid_T, S)
    # These are sums for the residual matrix, row by row, and then for the weights of the update.
    sums = ()
    for _ in tl.static_range(S * (S + 1)):
        sums += (tl.zeros([BLOCK_T, BLOCK_D // 8], tl.float32),)
    for start in range(0, D, BLOCK_D):
        column_1D = start + tl.arange(0, BLOCK_D)[None, :]
        mask_TD = valid_T[:, None] & (column_1D < D)
        update_TD = tl.load(update[0] + (token_T * update[1])[:, None] + column_1D, mask=mask_TD, other=0.0)
        grads = ()
        values = ()
        for i in tl.static_range(S):
            address_TD = _row(new_streams_grad, token_T, i)
            grads += (tl.load(address_TD + column_1D, mask=mask_TD, other=0.0),)
            address_TD = _row(streams, token_T, i)
            values += (tl.load(address_TD + column_1D, mask=mask_TD, other=0.0),)
        update_grad_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        new_sums = ()
        for i in tl.static_range(S):
            grad_TD = grads[i].to(tl.float32)
            update_grad_TD += weights[i] * grad_TD
            for j in tl.static_range(S):
                products_TD = grad_TD * values[j].to(tl.float32)
                new_sums += (sums[i * S + j] + _thread_sums(products_TD, BLOCK_T, BLOCK_D),)
        for i in tl.static_range(S):
            products_TD = grads[i].to(tl.float32) * update_TD.to(tl.float32)
            new_sums += (sums[S * S + i] + _thread_sums(products_TD, BLOCK_T, BLOCK_D),)
        sums = new_sums
        tl.store(update_grad + (token_T * D)[:, None] + column_1D, update_grad_TD, mask=mask_TD)
        for j in tl.static_range(S):
            grad_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
            for i in tl.static_range(S):
                grad_TD += matrix[i * S + j] * grads[i].to(tl.float32)
            tl.store(streams_grad + (token_T * (S * D) + j * D)[:, None] + column_1D, grad_TD, mask=mask_TD)
    for k in tl.static_range(S * S):
        tl.store(residual_grad + token_T * (S * S) + k, tl.sum(sums[k], 1), mask=valid_T)
    for i in tl.static_range(S):
        tl.store(post_grad + token_T * S + i, tl.sum(sums[S * S + i], 1), mask=valid_T)
