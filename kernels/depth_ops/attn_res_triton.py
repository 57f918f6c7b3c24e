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

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .depth_implementations import INTERPRETED, device_of, divide_up, multiprocessors, power_of_2_from, triton_obstacle
from .typed_operations import DifferentiableOperation, Operation, new_like


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:
    # the interpreter multiplies no bf16 matrices
    WIDENED = tl.constexpr(INTERPRETED)

    @triton.jit
    def _rows(tensor, row_R, valid_R, D: tl.constexpr, BLOCK_D: tl.constexpr):
        """Addresses and mask."""
        column_D = tl.arange(0, BLOCK_D)
        return (
            tensor[0] + (row_R * tensor[1])[:, None] + column_D[None, :],
            valid_R[:, None] & (column_D < D)[None, :],
        )

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
        # a row from the start: a vector that becomes one changes places between threads
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
        # where the compiler sees the addresses made, since a hint on an argument is lost
        return tl.multiple_of(row_N1 + column_K[None, :], [1, ALIGNMENT])

    @triton.jit
    def _load_of_each(row_N1, valid_N, column_K, ALIGNMENT: tl.constexpr, D: tl.constexpr):
        return tl.load(
            _columns_of_each(row_N1, column_K, ALIGNMENT),
            mask=valid_N[:, None] & (column_K < D)[None, :],
            other=0.0,
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
        """Of `query . x * inverse`, with respect to `x`."""
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
        # partial_sums is [P, ROWS, D]; a second reduction follows, since atomics would sum in any order
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
        row_R = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        valid_R = row_R < tokens
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
            # [T, 2, N]
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
        """For few tokens, as in decoding: one site each program, all in one launch."""
        N: tl.constexpr = len(sources)
        SITES: tl.constexpr = len(log_sum_exps)
        row_R = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        valid_R = row_R < tokens
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
        token_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        valid_T = token_T < tokens
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
        row_R = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        valid_R = row_R < tokens
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
        # of rows without a site any number will do
        highest_J = tl.where(valid_J, tl.max(logits_JM, 1), 0.0)
        odds_JM = tl.exp(logits_JM - highest_J[:, None])
        weights_JM = odds_JM / tl.where(valid_J, tl.sum(odds_JM, 1), 1.0)[:, None]
        mean_J = tl.sum(weights_JM * products_JM, 1)
        logit_grad_JM = weights_JM * (products_JM - mean_J[:, None] + log_sum_exp_grad_J[:, None])
        coefficient_JM = logit_grad_JM * inverse_M[None, :]
        moment_M = tl.sum(logit_grad_JM * tl.where(mask_JM, logits_JM, 0.0), 0)
        shrink_M = inverse_M * inverse_M * moment_M / D
        # [N, T, SITES]
        address_M = coefficients + (source_M * tokens.to(tl.int64) + token_M) * SITES
        tl.store(address_M[None, :] + site_J[:, None], coefficient_JM, mask=mask_JM)

        weights_MJ = tl.trans(weights_JM)
        # the queries are those of every token
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
        row_R = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        valid_R = row_R < tokens
        tokens = tokens.to(tl.int64)
        finished = _load(output, row_R, valid_R, D, BLOCK_D)
        value = _load(partial, row_R, valid_R, D, BLOCK_D)
        if update is not None:
            added = _load(update, row_R, valid_R, D, BLOCK_D)
            # rounded as it is stored, since that is what the backward and the next site see
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
            # [4, T]
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
                # the gradient of a norm and its product with the difference from sums that need not wait for it
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


@dataclass(frozen=True)
class Tile:
    """
    How much work a kernel's program has: columns of a row per thread, rows (more where they are short), and, of a
    kernel that loops over rows, how many programs share them and how many loads run ahead.
    """

    columns_per_thread: int
    rows: int = 1
    programs_per_multiprocessor: int | None = None
    stages: int | None = None


TILES = {
    "attn_res_fwd": Tile(16),
    "attn_res_bwd": Tile(16, programs_per_multiprocessor=4, stages=1),
    "attn_res_phase_1_few_fwd": Tile(16),
    "attn_res_phase_2_fwd": Tile(16),
    "attn_res_phase_2_bwd": Tile(16, programs_per_multiprocessor=3, stages=2),
}
# where a row has more than 2048 columns
WIDE_TILES = {
    "attn_res_fwd": Tile(32),
    "attn_res_bwd": Tile(16, programs_per_multiprocessor=2, stages=1),
}
SCORE_TILE = {"BLOCK_T": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
PHASE_1_FWD_TILE = {"BLOCK_ROWS": 1, "BLOCK_D": 2048, "num_warps": 4}
PHASE_1_BWD_TILE = {"BLOCK_K": 64, "num_warps": 2, "STAGES": 3}
# pairs of a token and a source of a program, to fill a matrix
PHASE_1_BWD_ROWS = 16
QUERY_GRAD_TILE = {"BLOCK_TOKENS": 32, "BLOCK_D": 128, "num_warps": 4, "num_stages": 3}
# from so many tokens on, phase 1 reads the sources twice instead of once for every site
MANY_TOKENS = 256
# of one launch: what a program holds must fit into registers
MAX_SOURCES = 16
MAX_SITES = 16
MAX_HIDDEN_SIZE = 32768
# of so many, phase 2's backward reads each again instead of one kept mix
RECOMPUTED_SOURCES = 4
MAX_ELEMENTS = 65536


def max_sources(hidden_size: int) -> int:
    """The number of sources that one launch takes; more are mixed in groups."""
    return max(1, min(MAX_SOURCES, MAX_ELEMENTS // 2 // power_of_2_from(hidden_size)))


def attn_res_obstacle(*tensors: Tensor | None) -> str | None:
    """
    Why the kernels cannot work on these tensors, a source first, as the end of a sentence about the kernel; None if
    they can.
    """
    hidden_size = tensors[0].shape[-1]
    if not 0 < hidden_size <= MAX_HIDDEN_SIZE:
        return f"supports hidden sizes from 1 to {MAX_HIDDEN_SIZE}, not {hidden_size}"
    return triton_obstacle([tensor for tensor in tensors if tensor is not None])


def attn_res_forward(
    sources: list[Tensor],
    pseudo_query: Tensor,
    norm_weight: Tensor | None,
    bias: Tensor | None,
    output_norm_weight: Tensor | None,
    eps: float,
    factor: int,
    training: bool,
) -> list[Tensor]:
    """The mix, and, if `training`, inverse root mean squares and logits of the sources, `[T, 2, N]`."""
    outputs = _new_mix(sources, training)
    tokens, constants, programs = _launch("attn_res_fwd", sources[0])
    if tokens:
        with device_of(sources[0]):
            attn_res_fwd_kernel[(programs,)](
                tuple(map(_argument, sources)),
                *map(_vector, (pseudo_query, norm_weight, bias, output_norm_weight)),
                _argument(outputs[0]),
                outputs[1] if training else None,
                tokens,
                eps,
                FACTOR=factor,
                **constants,
            )
    return outputs


def attn_res_backward(
    mixed_grad: Tensor,
    sources: list[Tensor],
    pseudo_query: Tensor,
    norm_weight: Tensor | None,
    bias: Tensor | None,
    output_norm_weight: Tensor | None,
    scalars: Tensor,
    eps: float,
    factor: int,
) -> list[Tensor]:
    """
    Gradients of the sources, of the query, and of norm weight, output norm weight and bias, so far as there are any.
    """
    source_grads = [new_like(source) for source in sources]
    last_logit_grad = None if bias is None else _new_scalars(sources[0])
    tokens, constants, programs = _launch("attn_res_bwd", sources[0])
    partial_sums = _new_sums(programs, 1 if output_norm_weight is None else 2, sources[0])
    if tokens:
        with device_of(sources[0]):
            attn_res_bwd_kernel[(programs,)](
                _argument(mixed_grad),
                tuple(map(_argument, sources)),
                *map(_vector, (pseudo_query, norm_weight, bias, output_norm_weight)),
                scalars,
                tuple(map(_argument, source_grads)),
                last_logit_grad,
                partial_sums,
                tokens,
                eps,
                FACTOR=factor,
                **constants,
            )
    grads = _parameter_grads(partial_sums, pseudo_query, norm_weight, output_norm_weight)
    if bias is not None:
        grads.append(last_logit_grad.sum().to(bias.dtype).view(bias.shape))
    return [*source_grads, *grads]


def attn_res_phase_1_forward(
    sources: list[Tensor], pseudo_queries: list[Tensor], norm_weights: list[Tensor], eps: float, training: bool
) -> list[Tensor]:
    """
    The mixes of all sites, none of a single source, which is its own mix; their log-sum-exps; and, if `training`,
    logits and inverse root mean squares of the sources, `[N, T, S + 1]`.
    """
    sites, source = len(pseudo_queries), sources[0]
    outputs = _new_phase_1(sources, sites, training)
    tokens, hidden_size = _tokens(source), source.shape[-1]
    if not tokens:
        return outputs
    first = 0 if len(sources) == 1 else sites
    results = tuple(map(_argument, outputs[:first])), tuple((x, 1) for x in outputs[first : first + sites])
    scalars = outputs[-1] if training else None
    with device_of(source):
        if tokens < MANY_TOKENS:
            _, constants, programs = _launch("attn_res_phase_1_few_fwd", source)
            parameters = [_vector(x) for x in (*pseudo_queries, *norm_weights)]
            attn_res_phase_1_few_fwd_kernel[(programs, sites)](
                tuple(map(_argument, sources)),
                *(tuple((x, 1) for x in group) for group in (parameters[:sites], parameters[sites:])),
                *results,
                scalars,
                tokens,
                eps,
                ALIGNMENT=min(16 if x.data_ptr() % 16 == 0 else x.element_size() for x in parameters),
                **constants,
            )
            return outputs
        if scalars is None:
            scalars = _new_phase_1_scalars(sources, sites)
        sources = _of_equal_strides(sources)
        attn_res_phase_1_score_kernel[(divide_up(tokens, SCORE_TILE["BLOCK_T"]), len(sources))](
            tuple(map(_argument, sources)),
            _fold(pseudo_queries, norm_weights),
            results[1],
            scalars,
            tokens,
            eps,
            ALIGNMENT=_alignment(sources),
            SITES=sites,
            D=hidden_size,
            BLOCK_S=max(16, power_of_2_from(sites)),
            PRECISION=_precision(),
            **SCORE_TILE,
        )
        if len(sources) == 1:
            return outputs
        grid = (
            divide_up(tokens, PHASE_1_FWD_TILE["BLOCK_ROWS"]),
            divide_up(hidden_size, PHASE_1_FWD_TILE["BLOCK_D"]),
        )
        attn_res_phase_1_fwd_kernel[grid](
            tuple(map(_argument, sources)),
            scalars,
            *results,
            tokens,
            ALIGNMENT=16,
            D=hidden_size,
            **PHASE_1_FWD_TILE,
        )
    return outputs


def attn_res_phase_1_backward(
    output_grads: list[Tensor],
    log_sum_exp_grads: list[Tensor],
    added_grads: list[Tensor],
    sources: list[Tensor],
    pseudo_queries: list[Tensor],
    norm_weights: list[Tensor],
    scalars: Tensor,
) -> list[Tensor]:
    """
    Gradients of the sources, with `added_grads` added if there are any, and of the queries and norm weights of all
    sites, `[S, D]`, the latter if any.
    """
    sites, source = len(pseudo_queries), sources[0]
    tokens, hidden_size = _tokens(source), source.shape[-1]
    source_grads = [new_like(source) for source in sources]
    coefficients = source.new_empty((len(sources), tokens, sites), dtype=torch.float32)
    # few enough programs that their sums are small beside the sources, enough to fill the device
    columns = divide_up(hidden_size, QUERY_GRAD_TILE["BLOCK_D"])
    splits = max(1, min(divide_up(tokens, 128), divide_up(4 * multiprocessors(source.device), columns)))
    partial_sums = _new_sums(splits if tokens else 0, sites, source)
    if tokens:
        sources, output_grads, added_grads = map(_of_equal_strides, (sources, output_grads, added_grads))
        arguments = tuple(map(_argument, sources))
        block_sources = max(4, power_of_2_from(len(sources)))
        block_tokens = max(1, PHASE_1_BWD_ROWS // block_sources)
        with device_of(source):
            attn_res_phase_1_bwd_kernel[(divide_up(tokens, block_tokens),)](
                tuple(map(_argument, output_grads)),
                tuple((grad.reshape(-1).contiguous(), 1) for grad in log_sum_exp_grads),
                tuple(map(_argument, added_grads)),
                arguments,
                _fold(pseudo_queries, norm_weights),
                scalars,
                tuple(map(_argument, source_grads)),
                coefficients,
                tokens,
                ALIGNMENT=min(_alignment(x) for x in (sources, output_grads, added_grads or sources)),
                D=hidden_size,
                BLOCK_T=block_tokens,
                BLOCK_S=max(16, power_of_2_from(sites)),
                BLOCK_N=block_sources,
                PRECISION=_precision(),
                **PHASE_1_BWD_TILE,
            )
            attn_res_phase_1_query_grad_kernel[(splits, columns)](
                arguments,
                coefficients,
                partial_sums,
                tokens,
                divide_up(tokens, splits),
                SITES=sites,
                D=hidden_size,
                BLOCK_S=max(16, power_of_2_from(sites)),
                PRECISION=_precision(),
                **QUERY_GRAD_TILE,
            )
    gains = torch.stack(norm_weights) if norm_weights else None
    return [*source_grads, *_parameter_grads(partial_sums, torch.stack(pseudo_queries), gains, None)]


def attn_res_phase_2_forward(
    output: Tensor,
    log_sum_exp: Tensor,
    partial: Tensor,
    update: Tensor | None,
    pseudo_query: Tensor,
    norm_weight: Tensor | None,
    bias: Tensor | None,
    output_norm_weight: Tensor | None,
    sources: list[Tensor],
    eps: float,
    factor: int,
    training: bool,
) -> list[Tensor]:
    """
    The new running sum if there is an update, the mix, and, if `training`, the sum's weight, inverse root mean square
    and logit, and, if it is normalised, the inverse root mean square of the mix, `[4, T]`. Of `sources` only the
    backward makes use.
    """
    outputs = _new_phase_2(partial, update, training)
    mixed = outputs[0 if update is None else 1]
    tokens, constants, programs = _launch("attn_res_phase_2_fwd", output)
    if tokens:
        with device_of(output):
            attn_res_phase_2_fwd_kernel[(programs,)](
                _argument(output),
                log_sum_exp.reshape(-1).contiguous(),
                _argument(partial),
                _argument(update),
                *map(_vector, (pseudo_query, norm_weight, bias, output_norm_weight)),
                None if update is None else _argument(outputs[0]),
                _argument(mixed),
                outputs[-1] if training else None,
                tokens,
                eps,
                FACTOR=factor,
                **constants,
            )
    return outputs


def attn_res_phase_2_backward(
    partial_grad: Tensor | None,
    mixed_grad: Tensor,
    output: Tensor | None,
    log_sum_exp: Tensor,
    sources: list[Tensor],
    partial: Tensor,
    pseudo_query: Tensor,
    norm_weight: Tensor | None,
    bias: Tensor | None,
    output_norm_weight: Tensor | None,
    scalars: Tensor,
    eps: float,
    factor: int,
) -> list[Tensor]:
    """
    Gradients of phase 1's output and log-sum-exp, of the running sum, of the query, and of norm weight, output norm
    weight and bias, so far as there are any. Without `output` it is computed again from `sources`. `log_sum_exp` is in
    `scalars` already: it is given since the gradients depend on it, for autograd to know.
    """
    output_grad, new_partial_grad = new_like(partial), new_like(partial)
    log_sum_exp_grad = _new_scalars(partial)
    tokens, constants, programs = _launch("attn_res_phase_2_bwd", partial)
    partial_sums = _new_sums(programs, 1 if output_norm_weight is None else 2, partial)
    if tokens:
        with device_of(partial):
            attn_res_phase_2_bwd_kernel[(programs,)](
                _argument(partial_grad),
                _argument(mixed_grad),
                _argument(output),
                tuple(map(_argument, sources)) if output is None else (),
                _argument(partial),
                *map(_vector, (pseudo_query, norm_weight, output_norm_weight)),
                scalars,
                _argument(output_grad),
                log_sum_exp_grad,
                _argument(new_partial_grad),
                partial_sums,
                tokens,
                eps,
                FACTOR=factor,
                **constants,
            )
    grads = _parameter_grads(partial_sums, pseudo_query, norm_weight, output_norm_weight)
    if bias is not None:
        grads.append(log_sum_exp_grad.sum().neg().to(bias.dtype).view(bias.shape))
    return [output_grad, log_sum_exp_grad, new_partial_grad, *grads]


def _parameter_grads(
    partial_sums: Tensor, queries: Tensor, gains: Tensor | None, output_norm_weight: Tensor | None
) -> list[Tensor]:
    """From sums `[P, rows, D]`: gradients of `queries`, and of `gains` and `output_norm_weight`, so far as given."""
    programs, rows, hidden_size = partial_sums.shape
    # without tokens there is nothing to sum
    new = torch.empty_like if programs else torch.zeros_like
    grads = [None if tensor is None else new(tensor) for tensor in (queries, gains, output_norm_weight)]
    if programs:
        with device_of(partial_sums):
            attn_res_parameter_grad_kernel[(divide_up(hidden_size, 32), rows)](
                partial_sums,
                queries.contiguous(),
                _vector(gains),
                *grads,
                programs,
                SITES=rows if output_norm_weight is None else rows - 1,
                ROWS=rows,
                D=hidden_size,
                BLOCK_PROGRAMS=128,
                BLOCK_D=32,
                num_warps=4,
            )
    return [grad for grad in grads if grad is not None]


def _fold(pseudo_queries: list[Tensor], norm_weights: list[Tensor]) -> Tensor:
    queries = torch.stack(pseudo_queries).float()
    return queries * torch.stack(norm_weights) if norm_weights else queries


def _as_rows(tensor: Tensor) -> Tensor:
    """As `[T, D]` with neighbouring columns, copied only if need be."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _of_equal_strides(tensors: list[Tensor]) -> list[Tensor]:
    rows = [_as_rows(tensor) for tensor in tensors]
    return rows if len({row.stride(0) for row in rows}) == 1 else [row.contiguous() for row in rows]


def _alignment(tensors: list[Tensor]) -> int:
    """Of the rows in bytes, as far as it matters."""
    size = tensors[0].element_size()
    return 16 if all(x.data_ptr() % 16 == 0 and x.stride(0) * size % 16 == 0 for x in tensors) else size


def _precision() -> str:
    """Of fp32 matrix products: of tensor cores, where there is that choice."""
    return "ieee" if torch.version.hip else "tf32x3"


def _argument(tensor: Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
    rows = _as_rows(tensor)
    return rows, rows.stride(0)


def _vector(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _new_scalars(tensor: Tensor) -> Tensor:
    """One fp32 number for each token."""
    return tensor.new_empty(tensor.shape[:-1], dtype=torch.float32)


def _new_sums(programs: int, rows: int, tensor: Tensor) -> Tensor:
    return tensor.new_empty((programs, rows, tensor.shape[-1]), dtype=torch.float32)


def _new_mix(sources: list[Tensor], training: bool) -> list[Tensor]:
    outputs = [new_like(sources[0])]
    if training:
        outputs.append(sources[0].new_empty((_tokens(sources[0]), 2, len(sources)), dtype=torch.float32))
    return outputs


def _new_phase_1(sources: list[Tensor], sites: int, training: bool) -> list[Tensor]:
    source = sources[0]
    outputs = [new_like(source) for _ in range(0 if len(sources) == 1 else sites)]
    outputs += [_new_scalars(source) for _ in range(sites)]
    if training:
        outputs.append(_new_phase_1_scalars(sources, sites))
    return outputs


def _new_phase_1_scalars(sources: list[Tensor], sites: int) -> Tensor:
    return sources[0].new_empty((len(sources), _tokens(sources[0]), sites + 1), dtype=torch.float32)


def _new_phase_2(partial: Tensor, update: Tensor | None, training: bool) -> list[Tensor]:
    outputs = [new_like(partial) for _ in range(1 if update is None else 2)]
    if training:
        outputs.append(partial.new_empty((4, _tokens(partial)), dtype=torch.float32))
    return outputs


def _new_parameter_grads(*tensors: Tensor | None) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors if tensor is not None]


def _tokens(tensor: Tensor) -> int:
    return tensor.numel() // tensor.shape[-1]


@lru_cache(maxsize=1024)
def _constants(tile: Tile, tokens: int, hidden_size: int, device: torch.device) -> tuple[dict[str, int], int]:
    block_d = power_of_2_from(hidden_size)
    block_rows = min(max(tile.rows, 1024 // block_d), power_of_2_from(tokens))
    constants = {
        "D": hidden_size,
        "BLOCK_ROWS": block_rows,
        "BLOCK_D": block_d,
        "num_warps": max(1, min(16, block_rows * block_d // (32 * tile.columns_per_thread))),
    }
    if tile.stages:
        constants["STAGES"] = tile.stages
    programs = divide_up(tokens, block_rows)
    if tile.programs_per_multiprocessor:
        programs = min(programs, tile.programs_per_multiprocessor * multiprocessors(device))
    return constants, programs


def _launch(kernel: str, tensor: Tensor) -> tuple[int, dict[str, int], int]:
    """Number of tokens, constants and number of programs. Static, so that equal shapes give equal bits."""
    tokens, hidden_size = _tokens(tensor), tensor.shape[-1]
    tile = WIDE_TILES.get(kernel, TILES[kernel]) if hidden_size > 2048 else TILES[kernel]
    return tokens, *_constants(tile, tokens, hidden_size, tensor.device)


def _save_attn_res(ctx, inputs, output):
    sources, query, gain, bias, output_norm, ctx.eps, ctx.factor, training = inputs
    ctx.set_materialize_grads(False)
    if training:
        ctx.mark_non_differentiable(output[-1])
        ctx.save_for_backward(query, gain, bias, output_norm, output[-1], *sources)


def _backward_attn_res(ctx, grads):
    query, gain, bias, output_norm, scalars, *sources = ctx.saved_tensors
    if grads[0] is None:
        return [None] * len(sources), *(None,) * 7
    grads = iter(
        _attn_res_backward(
            *(grads[0], sources, query, gain, bias, output_norm, scalars),
            *(ctx.eps, ctx.factor),
        )
    )
    source_grads = [next(grads) for _ in sources]
    query_grad, gain_grad, output_norm_grad, bias_grad = _so_far_as_given(grads, query, gain, output_norm, bias)
    return source_grads, query_grad, gain_grad, bias_grad, output_norm_grad, None, None, None


def _save_phase_1(ctx, inputs, output):
    sources, queries, gains, _, training = inputs
    ctx.set_materialize_grads(False)
    ctx.numbers = len(sources), len(queries), len(output)
    if training:
        ctx.mark_non_differentiable(output[-1])
        ctx.save_for_backward(output[-1], *sources, *queries, *gains)


def _backward_phase_1(ctx, grads):
    scalars, *saved = ctx.saved_tensors
    n, sites, outputs = ctx.numbers
    sources, queries, gains = saved[:n], saved[n : n + sites], saved[n + sites :]
    if n == 1:
        # its mixes are handed on, like itself
        handed_on = grads[outputs:] or (None,) * (sites + 1)
        grads = handed_on[:sites], grads[:sites], handed_on[sites:]
    else:
        grads = grads[:sites], grads[sites : 2 * sites], grads[outputs:]
    output_grads = [torch.zeros_like(sources[0]) if grad is None else grad for grad in grads[0]]
    log_sum_exp_grads = [
        torch.zeros_like(sources[0][..., 0], dtype=torch.float32) if grad is None else grad for grad in grads[1]
    ]
    added = list(grads[2]) if any(grad is not None for grad in grads[2]) else []
    added = [torch.zeros_like(sources[0]) if grad is None else grad for grad in added]
    grads = _attn_res_phase_1_backward(output_grads, log_sum_exp_grads, added, sources, queries, gains, scalars)
    parameter_grads = [list(grad.unbind(0)) for grad in grads[n:]]
    return grads[:n], parameter_grads[0], parameter_grads[1] if gains else [], None, None


def _save_phase_2(ctx, inputs, output):
    phase_1_output, log_sum_exp, partial, update, *parameters, sources, ctx.eps, ctx.factor, training = inputs
    ctx.set_materialize_grads(False)
    ctx.has_update = update is not None
    if training:
        ctx.mark_non_differentiable(output[-1])
        partial = output[0] if ctx.has_update else partial
        kept = None if sources else phase_1_output
        ctx.save_for_backward(kept, log_sum_exp, partial, *parameters, output[-1], *sources)


def _backward_phase_2(ctx, grads):
    output, log_sum_exp, partial, query, gain, bias, output_norm, scalars, *sources = ctx.saved_tensors
    parameters = (query, gain, bias, output_norm)
    # without an update the sum is handed on, after the mix and the scalars
    partial_grad, mixed_grad = grads[:2] if ctx.has_update else (grads[2] if len(grads) > 2 else None, grads[0])
    if mixed_grad is None:
        mixed_grad = torch.zeros_like(partial)
    output_grad, log_sum_exp_grad, partial_grad, *grads = _attn_res_phase_2_backward(
        *(partial_grad, mixed_grad, output, log_sum_exp, sources, partial, *parameters, scalars),
        *(ctx.eps, ctx.factor),
    )
    query_grad, gain_grad, output_norm_grad, bias_grad = _so_far_as_given(iter(grads), query, gain, output_norm, bias)
    update_grad = partial_grad if ctx.has_update else None
    parameter_grads = (query_grad, gain_grad, bias_grad, output_norm_grad)
    return (
        output_grad,
        log_sum_exp_grad,
        partial_grad,
        update_grad,
        *parameter_grads,
        [None] * len(sources),
        *(None,) * 3,
    )


def _so_far_as_given(grads, *inputs):
    return [None if x is None else next(grads) for x in inputs]


_attn_res_backward = Operation(
    attn_res_backward,
    lambda mixed_grad, sources, query, gain, bias, output_norm, *_: [
        *map(new_like, sources),
        *_new_parameter_grads(query, gain, output_norm, bias),
    ],
)
_attn_res_phase_1_backward = Operation(
    attn_res_phase_1_backward,
    lambda output_grads, log_sum_exp_grads, added_grads, sources, queries, gains, scalars: [
        *map(new_like, sources),
        *_new_parameter_grads(torch.stack(queries), torch.stack(gains) if gains else None),
    ],
)
_attn_res_phase_2_backward = Operation(
    attn_res_phase_2_backward,
    lambda partial_grad, mixed_grad, output, log_sum_exp, sources, partial, query, gain, bias, output_norm, *_: [
        *(new_like(partial), _new_scalars(partial), new_like(partial)),
        *_new_parameter_grads(query, gain, output_norm, bias),
    ],
)
run_attn_res = DifferentiableOperation(
    attn_res_forward,
    lambda sources, query, gain, bias, output_norm, eps, factor, training: _new_mix(sources, training),
    _save_attn_res,
    _backward_attn_res,
    lambda *inputs: [],
)
run_attn_res_phase_1 = DifferentiableOperation(
    attn_res_phase_1_forward,
    lambda sources, queries, gains, eps, training: _new_phase_1(sources, len(queries), training),
    _save_phase_1,
    _backward_phase_1,
    lambda sources, queries, *_: sources if len(sources) > 1 else sources * (len(queries) + 1),
)
run_attn_res_phase_2 = DifferentiableOperation(
    attn_res_phase_2_forward,
    lambda output, log_sum_exp, partial, update, *rest: _new_phase_2(partial, update, rest[-1]),
    _save_phase_2,
    _backward_phase_2,
    lambda output, log_sum_exp, partial, update, *_: [partial] if update is None else [],
)
