# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Triton kernels of `norm_rotary_mix` and of `depth_value_mix`, which is the same without norms and rotation.

A program works on rows, one for each token and key-value head, and holds each row in two halves, which the rotation
combines. A tensor, `[B, H, T, D]` or `[D]`, is handed to a kernel as the tuple of its pointer and its strides, an
absent one as None; a result, which is fresh memory in the order `[B, T, H, D]`, as its pointer. Sources stay separate
tensors.

Legend: B batch, H query heads, K key-value heads, G = H / K, T tokens, D head dim, N sources; in the kernels R rows of
a program, C columns of a half.
"""

from .depth_jit import chosen_pointer


# Only imported where Triton is. The block tells transformers that saved models load without it.
try:
    import triton
    import triton.language as tl
except ImportError:
    raise


@triton.jit
def _rows(tokens, KV_HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """
    The key-value heads of this program's rows, and their place: batch entry, number of tokens, token of each row,
    and whether the row exists.
    """
    rows = tokens * KV_HEADS
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    program = tl.program_id(0)
    row_R = program % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row_R % KV_HEADS, ((program // blocks).to(tl.int64), tokens, row_R // KV_HEADS, row_R < rows)


@triton.jit
def _halves(pointer, mask, column_stride, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Pointers to and masks of the halves of rows, or of a vector, that start at `pointer` and exist by `mask`."""
    SPLIT: tl.constexpr = (HEAD_DIM + 1) // 2
    column_C = tl.arange(0, BLOCK_HALF)
    low = pointer + column_C.to(tl.int64)[None, :] * column_stride
    low_mask = mask
    high_mask = mask
    if SPLIT < BLOCK_HALF:
        low_mask = mask & (column_C < SPLIT)[None, :]
    if HEAD_DIM - SPLIT < BLOCK_HALF:
        high_mask = mask & (column_C < HEAD_DIM - SPLIT)[None, :]
    # The product of column and stride may need 64 bits where the stride does not.
    return low, low_mask, low + tl.full([], SPLIT, tl.int64) * column_stride, high_mask


@triton.jit
def _load(tensor, head_R, place, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr):
    batch, _, token_R, valid_R = place
    pointer_R = tensor[0] + (batch * tensor[1] + head_R.to(tl.int64) * tensor[2] + token_R.to(tl.int64) * tensor[3])
    low, low_mask, high, high_mask = _halves(pointer_R[:, None], valid_R[:, None], tensor[4], HEAD_DIM, BLOCK_HALF)
    return tl.load(low, mask=low_mask, other=0.0), tl.load(high, mask=high_mask, other=0.0)


@triton.jit
def _load_source(pointers, strides, i, head_R, place, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr):
    tensor = (chosen_pointer(pointers, i), strides[0], strides[1], strides[2], strides[3])
    return _float(_load(tensor, head_R, place, HEAD_DIM, BLOCK_HALF))


@triton.jit
def _load_vector(tensor, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr):
    low, low_mask, high, high_mask = _halves(tensor[0], True, tensor[1], HEAD_DIM, BLOCK_HALF)
    return _float((tl.load(low, mask=low_mask, other=0.0), tl.load(high, mask=high_mask, other=0.0)))


@triton.jit
def _store(pointer, halves, head_R, HEADS: tl.constexpr, place, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr):
    batch, tokens, token_R, valid_R = place
    pointer_R = pointer + ((batch * tokens + token_R) * HEADS + head_R) * HEAD_DIM
    low, low_mask, high, high_mask = _halves(pointer_R[:, None], valid_R[:, None], 1, HEAD_DIM, BLOCK_HALF)
    tl.store(low, halves[0], mask=low_mask)
    tl.store(high, halves[1], mask=high_mask)


@triton.jit
def _store_column_sums(partial_sums, row, halves, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr):
    # partial_sums is [programs, 2, D]. A second reduction adds it up: atomics would add in a different order each
    # time.
    pointer = partial_sums + (tl.program_id(0).to(tl.int64) * 2 + row) * HEAD_DIM
    low, low_mask, high, high_mask = _halves(pointer, True, 1, HEAD_DIM, BLOCK_HALF)
    tl.store(low, tl.sum(halves[0], 0)[None, :], mask=low_mask)
    tl.store(high, tl.sum(halves[1], 0)[None, :], mask=high_mask)


@triton.jit
def _load_gate(gate, head_R):
    return tl.load(gate[0] + head_R.to(tl.int64) * gate[1]).to(tl.float32)


@triton.jit
def _float(halves):
    return halves[0].to(tl.float32), halves[1].to(tl.float32)


@triton.jit
def _dot(x, y):
    return tl.sum(x[0] * y[0] + x[1] * y[1], 1)


@triton.jit
def _scale(factor, x):
    return factor * x[0], factor * x[1]


@triton.jit
def _add(x, y):
    return x[0] + y[0], x[1] + y[1]


@triton.jit
def _normalise(x, eps, HEAD_DIM: tl.constexpr):
    inverse_R = tl.rsqrt(_dot(x, x) / HEAD_DIM + eps)
    return inverse_R, _scale(inverse_R[:, None], x)


@triton.jit
def _normalise_backward(grad, inverse_R, normal, HEAD_DIM: tl.constexpr):
    mean = (_dot(grad, normal) / HEAD_DIM)[:, None]
    return _scale(inverse_R[:, None], (grad[0] - normal[0] * mean, grad[1] - normal[1] * mean))


@triton.jit
def _rotate(x, cos, sin):
    return x[0] * cos[0] - x[1] * sin[0], x[1] * cos[1] + x[0] * sin[1]


@triton.jit
def _rotate_backward(grad, cos, sin):
    return grad[0] * cos[0] + grad[1] * sin[1], grad[1] * cos[1] - grad[0] * sin[0]


@triton.jit
def _finish(raw, weight, cos, sin, eps, NORM_FIRST: tl.constexpr, HEAD_DIM: tl.constexpr):
    """
    Norm and rotation of a query or key, either of which may be absent. Also returns what the backward needs of
    the norm: the inverse root mean square and the normalised rows.
    """
    x = _float(raw)
    inverse_R = 1.0
    normal = x
    if NORM_FIRST and weight is not None:
        inverse_R, normal = _normalise(x, eps, HEAD_DIM)
        x = (normal[0] * weight[0], normal[1] * weight[1])
    if cos is not None:
        x = _rotate(x, cos, sin)
    if not NORM_FIRST and weight is not None:
        inverse_R, normal = _normalise(x, eps, HEAD_DIM)
        x = (normal[0] * weight[0], normal[1] * weight[1])
    return x, inverse_R, normal


@triton.jit
def _finish_backward(
    grad, inverse_R, normal, weight, weight_grad, cos, sin, NORM_FIRST: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Returns the gradient of the raw query or key, and `weight_grad` with that of the norm's weight added."""
    if cos is not None and NORM_FIRST:
        grad = _rotate_backward(grad, cos, sin)
    if weight is not None:
        weight_grad = _add(weight_grad, (grad[0] * normal[0], grad[1] * normal[1]))
        grad = _normalise_backward((grad[0] * weight[0], grad[1] * weight[1]), inverse_R, normal, HEAD_DIM)
    if cos is not None and not NORM_FIRST:
        grad = _rotate_backward(grad, cos, sin)
    return grad, weight_grad


@triton.jit(do_not_specialize=["tokens", "sources"])
def norm_rotary_mix_fwd_kernel(
    query,
    key,
    value,
    source_keys,
    source_values,
    source_strides,
    sources,
    query_norm,
    key_norm,
    gate,
    cos,
    sin,
    finished_query,
    finished_key,
    mixed_value,
    tokens,
    scaling,
    eps,
    KEY_NORM_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    head_R, place = _rows(tokens, KV_HEADS, BLOCK_ROWS)
    # Everything is loaded before the first store, since the compiler moves no load over a store.
    raw_queries = ()
    for g in tl.static_range(GROUP):
        raw_queries += (_load(query, head_R * GROUP + g, place, HEAD_DIM, BLOCK_HALF),)
    raw_key = _load(key, head_R, place, HEAD_DIM, BLOCK_HALF)
    if cos is not None:
        cos = _float(_load(cos, head_R, place, HEAD_DIM, BLOCK_HALF))
        sin = _float(_load(sin, head_R, place, HEAD_DIM, BLOCK_HALF))
    if query_norm is not None:
        query_norm = _load_vector(query_norm, HEAD_DIM, BLOCK_HALF)
    if key_norm is not None:
        key_norm = _load_vector(key_norm, HEAD_DIM, BLOCK_HALF)

    mean = (tl.zeros([BLOCK_ROWS, BLOCK_HALF], tl.float32), tl.zeros([BLOCK_ROWS, BLOCK_HALF], tl.float32))
    queries = ()
    for g in tl.static_range(GROUP):
        x, _, _ = _finish(raw_queries[g], query_norm, cos, sin, eps, True, HEAD_DIM)
        queries += (x,)
        mean = _add(mean, x)
    own_key, _, _ = _finish(raw_key, key_norm, cos, sin, eps, KEY_NORM_FIRST, HEAD_DIM)

    if mixed_value is not None:
        mean = _scale(scaling / GROUP, mean)
        own_score_R = _dot(mean, own_key)
        highest_R = own_score_R
        own_value = _load(value, head_R, place, HEAD_DIM, BLOCK_HALF)
        mixed = _float(own_value)
        if source_strides is None:
            scores = ()
            for i in tl.static_range(len(source_keys)):
                score_R = _dot(mean, _float(_load(source_keys[i], head_R, place, HEAD_DIM, BLOCK_HALF)))
                scores += (score_R,)
                highest_R = tl.maximum(highest_R, score_R)
            total_R = tl.exp(own_score_R - highest_R)
            mixed = _scale(total_R[:, None], mixed)
            for i in tl.static_range(len(source_keys)):
                odds_R = tl.exp(scores[i] - highest_R)
                total_R += odds_R
                source_value = _float(_load(source_values[i], head_R, place, HEAD_DIM, BLOCK_HALF))
                mixed = _add(mixed, _scale(odds_R[:, None], source_value))
        else:
            total_R = tl.full([BLOCK_ROWS], 1.0, tl.float32)
            for i in range(sources):
                score_R = _dot(
                    mean, _load_source(source_keys, source_strides[0], i, head_R, place, HEAD_DIM, BLOCK_HALF)
                )
                source_value = _load_source(source_values, source_strides[1], i, head_R, place, HEAD_DIM, BLOCK_HALF)
                previous_R = highest_R
                highest_R = tl.maximum(previous_R, score_R)
                kept_R = tl.exp(previous_R - highest_R)
                odds_R = tl.exp(score_R - highest_R)
                total_R = total_R * kept_R + odds_R
                mixed = _add(_scale(kept_R[:, None], mixed), _scale(odds_R[:, None], source_value))
        mixed = _scale((1.0 / total_R)[:, None], mixed)
        if gate is not None:
            # Sums of products: with a gate of 0 or 1 one of them is nothing, and the other is not rounded.
            gate_R = _load_gate(gate, head_R)
            mixed = _add(_scale(gate_R[:, None], mixed), _scale((1.0 - gate_R)[:, None], _float(own_value)))
        _store(mixed_value, mixed, head_R, KV_HEADS, place, HEAD_DIM, BLOCK_HALF)
    if finished_query is not None:
        for g in tl.static_range(GROUP):
            _store(finished_query, queries[g], head_R * GROUP + g, KV_HEADS * GROUP, place, HEAD_DIM, BLOCK_HALF)
        _store(finished_key, own_key, head_R, KV_HEADS, place, HEAD_DIM, BLOCK_HALF)


@triton.jit(do_not_specialize=["tokens", "sources"])
def norm_rotary_mix_bwd_kernel(
    finished_query_grad,
    finished_key_grad,
    mixed_value_grad,
    query,
    key,
    value,
    source_keys,
    source_values,
    source_strides,
    sources,
    query_norm,
    key_norm,
    gate,
    cos,
    sin,
    query_grad,
    key_grad,
    value_grad,
    source_key_grads,
    source_value_grads,
    norm_grads,
    gate_grads,
    tokens,
    scaling,
    eps,
    KEY_NORM_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    head_R, place = _rows(tokens, KV_HEADS, BLOCK_ROWS)
    raw_queries = ()
    query_grads = ()
    for g in tl.static_range(GROUP):
        head_of_query_R = head_R * GROUP + g
        raw_queries += (_load(query, head_of_query_R, place, HEAD_DIM, BLOCK_HALF),)
        if finished_query_grad is not None:
            query_grads += (_load(finished_query_grad, head_of_query_R, place, HEAD_DIM, BLOCK_HALF),)
    raw_key = _load(key, head_R, place, HEAD_DIM, BLOCK_HALF)
    if cos is not None:
        cos = _float(_load(cos, head_R, place, HEAD_DIM, BLOCK_HALF))
        sin = _float(_load(sin, head_R, place, HEAD_DIM, BLOCK_HALF))
    if query_norm is not None:
        query_norm = _load_vector(query_norm, HEAD_DIM, BLOCK_HALF)
    if key_norm is not None:
        key_norm = _load_vector(key_norm, HEAD_DIM, BLOCK_HALF)

    zero = (tl.zeros([BLOCK_ROWS, BLOCK_HALF], tl.float32), tl.zeros([BLOCK_ROWS, BLOCK_HALF], tl.float32))
    own_key, key_inverse_R, key_normal = _finish(raw_key, key_norm, cos, sin, eps, KEY_NORM_FIRST, HEAD_DIM)
    own_key_grad = zero
    if finished_key_grad is not None:
        own_key_grad = _float(_load(finished_key_grad, head_R, place, HEAD_DIM, BLOCK_HALF))
    mean_grad = zero
    if mixed_value_grad is not None:
        grad = _float(_load(mixed_value_grad, head_R, place, HEAD_DIM, BLOCK_HALF))
        mean = zero
        for g in tl.static_range(GROUP):
            x, _, _ = _finish(raw_queries[g], query_norm, cos, sin, eps, True, HEAD_DIM)
            mean = _add(mean, x)
        mean = _scale(scaling / GROUP, mean)

        # A weight's gradient is the product of its value with the gradient of the mix.
        own_score_R = _dot(mean, own_key)
        own_product_R = _dot(grad, _float(_load(value, head_R, place, HEAD_DIM, BLOCK_HALF)))
        highest_R = own_score_R
        if source_strides is None:
            keys = ()
            scores = ()
            products = ()
            for i in tl.static_range(len(source_keys)):
                source_key = _load(source_keys[i], head_R, place, HEAD_DIM, BLOCK_HALF)
                source_value = _load(source_values[i], head_R, place, HEAD_DIM, BLOCK_HALF)
                score_R = _dot(mean, _float(source_key))
                keys += (source_key,)
                scores += (score_R,)
                products += (_dot(grad, _float(source_value)),)
                highest_R = tl.maximum(highest_R, score_R)
            total_R = tl.exp(own_score_R - highest_R)
            product_R = total_R * own_product_R
            for i in tl.static_range(len(source_keys)):
                odds_R = tl.exp(scores[i] - highest_R)
                total_R += odds_R
                product_R += odds_R * products[i]
        else:
            total_R = tl.full([BLOCK_ROWS], 1.0, tl.float32)
            product_R = own_product_R
            for i in range(sources):
                source_key = _load_source(source_keys, source_strides[0], i, head_R, place, HEAD_DIM, BLOCK_HALF)
                source_value = _load_source(source_values, source_strides[1], i, head_R, place, HEAD_DIM, BLOCK_HALF)
                score_R = _dot(mean, source_key)
                previous_R = highest_R
                highest_R = tl.maximum(previous_R, score_R)
                kept_R = tl.exp(previous_R - highest_R)
                odds_R = tl.exp(score_R - highest_R)
                total_R = total_R * kept_R + odds_R
                product_R = product_R * kept_R + odds_R * _dot(grad, source_value)
        product_R = product_R / total_R

        own_weight_R = tl.exp(own_score_R - highest_R) / total_R
        own_share_R = own_weight_R
        # what the weights of all entries are multiplied by
        factor_R = 1.0
        if gate is not None:
            factor_R = _load_gate(gate, head_R)
            own_share_R = factor_R * own_weight_R + (1.0 - factor_R)
            batch, _, token_R, valid_R = place
            # A second reduction adds these up: atomics would add in a different order each time.
            gate_grad = gate_grads + (batch * tokens + token_R) * KV_HEADS + head_R
            tl.store(gate_grad, product_R - own_product_R, mask=valid_R)
        score_grad_R = factor_R * own_weight_R * (own_product_R - product_R)
        _store(value_grad, _scale(own_share_R[:, None], grad), head_R, KV_HEADS, place, HEAD_DIM, BLOCK_HALF)
        own_key_grad = _add(own_key_grad, _scale(score_grad_R[:, None], mean))
        mean_grad = _scale(score_grad_R[:, None], own_key)
        if source_strides is None:
            for i in tl.static_range(len(source_keys)):
                weight_R = factor_R * (tl.exp(scores[i] - highest_R) / total_R)
                score_grad_R = weight_R * (products[i] - product_R)
                mean_grad = _add(mean_grad, _scale(score_grad_R[:, None], _float(keys[i])))
                key_grad_i = _scale(score_grad_R[:, None], mean)
                value_grad_i = _scale(weight_R[:, None], grad)
                _store(source_key_grads[i], key_grad_i, head_R, KV_HEADS, place, HEAD_DIM, BLOCK_HALF)
                _store(source_value_grads[i], value_grad_i, head_R, KV_HEADS, place, HEAD_DIM, BLOCK_HALF)
        else:
            for i in range(sources):
                source_key = _load_source(source_keys, source_strides[0], i, head_R, place, HEAD_DIM, BLOCK_HALF)
                source_value = _load_source(source_values, source_strides[1], i, head_R, place, HEAD_DIM, BLOCK_HALF)
                weight_R = factor_R * (tl.exp(_dot(mean, source_key) - highest_R) / total_R)
                score_grad_R = weight_R * (_dot(grad, source_value) - product_R)
                mean_grad = _add(mean_grad, _scale(score_grad_R[:, None], source_key))
                key_grad_i = _scale(score_grad_R[:, None], mean)
                value_grad_i = _scale(weight_R[:, None], grad)
                pointer = chosen_pointer(source_key_grads, i)
                _store(pointer, key_grad_i, head_R, KV_HEADS, place, HEAD_DIM, BLOCK_HALF)
                pointer = chosen_pointer(source_value_grads, i)
                _store(pointer, value_grad_i, head_R, KV_HEADS, place, HEAD_DIM, BLOCK_HALF)
        mean_grad = _scale(scaling / GROUP, mean_grad)

    own_key_grad, key_norm_grad = _finish_backward(
        own_key_grad, key_inverse_R, key_normal, key_norm, zero, cos, sin, KEY_NORM_FIRST, HEAD_DIM
    )
    _store(key_grad, own_key_grad, head_R, KV_HEADS, place, HEAD_DIM, BLOCK_HALF)
    query_norm_grad = zero
    for g in tl.static_range(GROUP):
        _, query_inverse_R, query_normal = _finish(raw_queries[g], query_norm, cos, sin, eps, True, HEAD_DIM)
        one_query_grad = mean_grad
        if finished_query_grad is not None:
            one_query_grad = _add(mean_grad, _float(query_grads[g]))
        one_query_grad, query_norm_grad = _finish_backward(
            one_query_grad, query_inverse_R, query_normal, query_norm, query_norm_grad, cos, sin, True, HEAD_DIM
        )
        _store(query_grad, one_query_grad, head_R * GROUP + g, KV_HEADS * GROUP, place, HEAD_DIM, BLOCK_HALF)
    if norm_grads is not None:
        _store_column_sums(norm_grads, 0, query_norm_grad, HEAD_DIM, BLOCK_HALF)
        _store_column_sums(norm_grads, 1, key_norm_grad, HEAD_DIM, BLOCK_HALF)
