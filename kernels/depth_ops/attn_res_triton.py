# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Triton kernels of Attention Residuals.

Bytes, in units of one hidden state (tokens x hidden size), with N finished blocks and S sites:

    kernel               reads              writes
    single site          N                  1
    single site, bwd     N + 1              N
    phase 1              N                  S
    phase 1, bwd         N + S, then N      N
    phase 2              3                  2       (2 and 1 where there is nothing to add)
    phase 2, bwd         4                  2       (3 + N and 2 where phase 1's output is computed again)

The rest is small: logits, inverse root mean squares, log-sum-exps and their gradients are scalars per token, and the
gradients of queries and norms are sums over tokens, first within a program and then over programs.

A program holds whole rows, one for each token. A tensor `[tokens, D]` is handed to a kernel as the tuple of its
pointer and its row stride; sources stay separate tensors.

Legend: T tokens, D hidden size, N sources, S sites, P programs; in the kernels R rows of a program.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .depth_implementations import device_of, is_recorded, multiprocessors, operation_namespace, triton_obstacle


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:

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
    def attn_res_phase_1_fwd_kernel(
        sources,
        queries,
        outputs,
        log_sum_exps,
        scalars,
        tokens,
        eps,
        ALIGNMENT: tl.constexpr,
        D: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_D: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        N: tl.constexpr = len(sources)
        S: tl.constexpr = len(outputs)
        row_R = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        valid_R = row_R < tokens
        values = ()
        for i in tl.static_range(N):
            values += (_load(sources[i], row_R, valid_R, D, BLOCK_D),)
        terms = ()
        for i in tl.static_range(N):
            terms += (values[i].to(tl.float32) * values[i].to(tl.float32),)
        squares = _row_sums(terms)
        inverses = ()
        for i in tl.static_range(N):
            inverses += (tl.rsqrt(squares[i] / D + eps),)
        for site in tl.range(S, num_stages=STAGES):
            query_D = _load_vector(queries + site * D, D, BLOCK_D)
            terms = ()
            for i in tl.static_range(N):
                terms += (values[i].to(tl.float32) * query_D,)
            products = _row_sums(terms)
            logits = ()
            highest_R = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
            for i in tl.static_range(N):
                logits += (products[i] * inverses[i],)
                highest_R = tl.maximum(highest_R, logits[i])
            total_R = tl.zeros([BLOCK_ROWS], tl.float32)
            mixed = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
            for i in tl.static_range(N):
                odds_R = tl.exp(logits[i] - highest_R)
                total_R += odds_R
                mixed += odds_R[:, None] * values[i].to(tl.float32)
            output = _one_of(outputs, site, ALIGNMENT)
            _store(output, mixed / total_R[:, None], row_R, valid_R, D, BLOCK_D)
            log_sum_exp, _ = _one_of(log_sum_exps, site, 16)
            tl.store(log_sum_exp + row_R, highest_R + tl.log(total_R), mask=valid_R)
            if scalars is not None:
                # [T, S + 1, N], the inverse root mean squares last
                for i in tl.static_range(N):
                    tl.store(scalars + (row_R * (S + 1) + site) * N + i, logits[i], mask=valid_R)
        if scalars is not None:
            for i in tl.static_range(N):
                tl.store(scalars + (row_R * (S + 1) + S) * N + i, inverses[i], mask=valid_R)

    @triton.jit(do_not_specialize=["tokens"])
    def attn_res_phase_1_bwd_kernel(
        output_grads,
        log_sum_exp_grads,
        sources,
        queries,
        scalars,
        source_grads,
        coefficients,
        tokens,
        ALIGNMENT: tl.constexpr,
        D: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_D: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        N: tl.constexpr = len(sources)
        S: tl.constexpr = len(output_grads)
        row_R = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        valid_R = row_R < tokens
        values = ()
        inverses = ()
        value_grads = ()
        moments = ()
        for i in tl.static_range(N):
            values += (_load(sources[i], row_R, valid_R, D, BLOCK_D),)
            inverses += (tl.load(scalars + (row_R * (S + 1) + S) * N + i, mask=valid_R, other=0.0),)
            value_grads += (tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32),)
            moments += (tl.zeros([BLOCK_ROWS], tl.float32),)
        for site in tl.range(S, num_stages=STAGES):
            grad = _load(_one_of(output_grads, site, ALIGNMENT), row_R, valid_R, D, BLOCK_D).to(tl.float32)
            log_sum_exp_grad, _ = _one_of(log_sum_exp_grads, site, 4)
            log_sum_exp_grad_R = tl.load(log_sum_exp_grad + row_R, mask=valid_R, other=0.0)
            query_D = _load_vector(queries + site * D, D, BLOCK_D)
            logits = ()
            highest_R = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
            for i in tl.static_range(N):
                logits += (tl.load(scalars + (row_R * (S + 1) + site) * N + i, mask=valid_R, other=0.0),)
                highest_R = tl.maximum(highest_R, logits[i])
            total_R = tl.zeros([BLOCK_ROWS], tl.float32)
            for i in tl.static_range(N):
                total_R += tl.exp(logits[i] - highest_R)
            terms = ()
            for i in tl.static_range(N):
                terms += (grad * values[i].to(tl.float32),)
            products = _row_sums(terms)
            weights = ()
            mean_R = tl.zeros([BLOCK_ROWS], tl.float32)
            for i in tl.static_range(N):
                weights += (tl.exp(logits[i] - highest_R) / total_R,)
                mean_R += weights[i] * products[i]
            added_grads = ()
            added_moments = ()
            for i in tl.static_range(N):
                logit_grad_R = weights[i] * (products[i] - mean_R + log_sum_exp_grad_R)
                coefficient_R = logit_grad_R * inverses[i]
                # [N, T, S]
                address_R = coefficients + (i * tokens.to(tl.int64) + row_R) * S + site
                tl.store(address_R, coefficient_R, mask=valid_R)
                added_grads += (value_grads[i] + weights[i][:, None] * grad + coefficient_R[:, None] * query_D,)
                added_moments += (moments[i] + logit_grad_R * logits[i],)
            value_grads = added_grads
            moments = added_moments
        for i in tl.static_range(N):
            shrink_R = inverses[i] * inverses[i] * moments[i] / D
            value_grad = value_grads[i] - shrink_R[:, None] * values[i].to(tl.float32)
            _store(source_grads[i], value_grad, row_R, valid_R, D, BLOCK_D)

    @triton.jit(do_not_specialize=["tokens", "tokens_of_program"])
    def attn_res_phase_1_query_grad_kernel(
        sources,
        coefficients,
        partial_sums,
        tokens,
        tokens_of_program,
        S: tl.constexpr,
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
                    coefficients + (i * tokens.to(tl.int64) + token_T)[:, None] * S + site_S[None, :],
                    mask=valid_T[:, None] & (site_S < S)[None, :],
                    other=0.0,
                )
                value_TD = tl.load(
                    sources[i][0] + (token_T * sources[i][1])[:, None] + column_D[None, :],
                    mask=valid_T[:, None] & (column_D < D)[None, :],
                    other=0.0,
                )
                sums_SD = tl.dot(
                    tl.trans(coefficient_TS), value_TD.to(tl.float32), acc=sums_SD, input_precision=PRECISION
                )
        tl.store(
            partial_sums + (tl.program_id(0).to(tl.int64) * S + site_S)[:, None] * D + column_D[None, :],
            sums_SD,
            mask=(site_S < S)[:, None] & (column_D < D)[None, :],
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
            result = _norm(result, _load_vector(output_norm, D, BLOCK_D), eps, D)
        if update is not None:
            _store(new_partial, value, row_R, valid_R, D, BLOCK_D)
        _store(mixed, result, row_R, valid_R, D, BLOCK_D)
        if scalars is not None:
            # [3, T]
            tl.store(scalars + row_R, weight_R, mask=valid_R)
            tl.store(scalars + tokens + row_R, inverse_R, mask=valid_R)
            tl.store(scalars + 2 * tokens.to(tl.int64) + row_R, logit_R, mask=valid_R)

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
        for block in tl.range(tl.program_id(0), tl.cdiv(tokens, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
            row_R = (block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
            valid_R = row_R < tokens
            grad = _load(mixed_grad, row_R, valid_R, D, BLOCK_D).to(tl.float32)
            value = _load(partial, row_R, valid_R, D, BLOCK_D).to(tl.float32)
            value_grad = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
            if partial_grad is not None:
                value_grad = _load(partial_grad, row_R, valid_R, D, BLOCK_D).to(tl.float32)
            weight_R = tl.load(scalars + row_R, mask=valid_R, other=0.0)
            inverse_R = tl.load(scalars + tokens + row_R, mask=valid_R, other=0.0)
            logit_R = tl.load(scalars + 2 * tokens.to(tl.int64) + row_R, mask=valid_R, other=0.0)
            if output is not None:
                finished = _load(output, row_R, valid_R, D, BLOCK_D).to(tl.float32)
            else:
                values = ()
                for i in tl.static_range(len(sources)):
                    values += (_load(sources[i], row_R, valid_R, D, BLOCK_D),)
                finished, _, _, _ = _mix(values, query_D, None, eps, D, BLOCK_ROWS, BLOCK_D)
                finished = finished.to(partial[0].dtype.element_ty).to(tl.float32)

            difference = value - finished
            if output_norm is not None:
                mixed = FACTOR * (finished + weight_R[:, None] * difference)
                grad, norm_sum = _norm_backward(grad, mixed, _load_vector(output_norm, D, BLOCK_D), eps, D)
                norm_sums += norm_sum
            grad *= FACTOR
            logit_grad_R = weight_R * (1.0 - weight_R) * tl.sum(grad * difference, 1)
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
    "attn_res_phase_1_fwd": Tile(8, stages=2),
    "attn_res_phase_1_bwd": Tile(8, stages=3),
    "attn_res_phase_2_fwd": Tile(16),
    "attn_res_phase_2_bwd": Tile(16, programs_per_multiprocessor=4, stages=1),
}
QUERY_GRAD_TILE = {"BLOCK_TOKENS": 32, "BLOCK_D": 128, "num_warps": 8, "num_stages": 3}
# of one launch: what a program holds must fit into registers
MAX_SOURCES = 16
MAX_SITES = 16
MAX_HIDDEN_SIZE = 32768
MAX_ELEMENTS = 65536


def max_sources(hidden_size: int) -> int:
    """The number of sources that one launch takes; more are mixed in groups."""
    return max(1, min(MAX_SOURCES, MAX_ELEMENTS // 2 // _power_of_2_from(hidden_size)))


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
    source_grads = [_new_like(source) for source in sources]
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
    The mixes of all sites, their log-sum-exps, and, if `training`, logits and inverse root mean squares of the
    sources, `[T, S + 1, N]`.
    """
    sites = len(pseudo_queries)
    outputs = _new_phase_1(sources, sites, training)
    tokens, constants, programs = _launch("attn_res_phase_1_fwd", sources[0])
    if tokens:
        with device_of(sources[0]):
            attn_res_phase_1_fwd_kernel[(programs,)](
                tuple(map(_argument, sources)),
                _fold(pseudo_queries, norm_weights),
                tuple(map(_argument, outputs[:sites])),
                tuple((log_sum_exp, 1) for log_sum_exp in outputs[sites : 2 * sites]),
                outputs[-1] if training else None,
                tokens,
                eps,
                ALIGNMENT=16,
                **constants,
            )
    return outputs


def attn_res_phase_1_backward(
    output_grads: list[Tensor],
    log_sum_exp_grads: list[Tensor],
    sources: list[Tensor],
    pseudo_queries: list[Tensor],
    norm_weights: list[Tensor],
    scalars: Tensor,
) -> list[Tensor]:
    """Gradients of the sources, and of the queries and norm weights of all sites, `[S, D]`, the latter if any."""
    sites, source = len(pseudo_queries), sources[0]
    hidden_size = source.shape[-1]
    source_grads = [_new_like(source) for source in sources]
    tokens, constants, programs = _launch("attn_res_phase_1_bwd", source)
    coefficients = source.new_empty((len(sources), tokens, sites), dtype=torch.float32)
    # few enough programs that their sums are small beside the sources, enough to fill the device
    columns = _divide_up(hidden_size, QUERY_GRAD_TILE["BLOCK_D"])
    splits = max(1, min(_divide_up(tokens, 128), _divide_up(2 * multiprocessors(source.device), columns)))
    partial_sums = _new_sums(splits if tokens else 0, sites, source)
    if tokens:
        output_grads = _with_equal_strides([_as_rows(grad) for grad in output_grads])
        aligned = all(grad.data_ptr() % 16 == 0 for grad in output_grads)
        with device_of(source):
            attn_res_phase_1_bwd_kernel[(programs,)](
                tuple(map(_argument, output_grads)),
                tuple((grad.reshape(-1).contiguous(), 1) for grad in log_sum_exp_grads),
                tuple(map(_argument, sources)),
                _fold(pseudo_queries, norm_weights),
                scalars,
                tuple(map(_argument, source_grads)),
                coefficients,
                tokens,
                ALIGNMENT=16 if aligned else source.element_size(),
                **constants,
            )
            attn_res_phase_1_query_grad_kernel[(splits, columns)](
                tuple(map(_argument, sources)),
                coefficients,
                partial_sums,
                tokens,
                _divide_up(tokens, splits),
                S=sites,
                D=hidden_size,
                BLOCK_S=max(16, _power_of_2_from(sites)),
                # fp32 products of tensor cores, where there is that choice
                PRECISION="ieee" if torch.version.hip else "tf32x3",
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
    and logit, `[3, T]`. Of `sources` only the backward makes use.
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
    weight and bias, so far as there are any. Without `output` it is computed again from `sources`.
    """
    output_grad, new_partial_grad = _new_like(partial), _new_like(partial)
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
            attn_res_parameter_grad_kernel[(_divide_up(hidden_size, 32), rows)](
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


def _with_equal_strides(tensors: list[Tensor]) -> list[Tensor]:
    if len({tensor.stride(0) for tensor in tensors}) == 1:
        return tensors
    return [tensor.contiguous() for tensor in tensors]


def _argument(tensor: Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
    rows = _as_rows(tensor)
    return rows, rows.stride(0)


def _vector(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _new_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _new_scalars(tensor: Tensor) -> Tensor:
    """One fp32 number for each token."""
    return tensor.new_empty(tensor.shape[:-1], dtype=torch.float32)


def _new_sums(programs: int, rows: int, tensor: Tensor) -> Tensor:
    return tensor.new_empty((programs, rows, tensor.shape[-1]), dtype=torch.float32)


def _new_mix(sources: list[Tensor], training: bool) -> list[Tensor]:
    outputs = [_new_like(sources[0])]
    if training:
        outputs.append(sources[0].new_empty((_tokens(sources[0]), 2, len(sources)), dtype=torch.float32))
    return outputs


def _new_phase_1(sources: list[Tensor], sites: int, training: bool) -> list[Tensor]:
    source = sources[0]
    outputs = [_new_like(source) for _ in range(sites)]
    outputs += [_new_scalars(source) for _ in range(sites)]
    if training:
        outputs.append(source.new_empty((_tokens(source), sites + 1, len(sources)), dtype=torch.float32))
    return outputs


def _new_phase_2(partial: Tensor, update: Tensor | None, training: bool) -> list[Tensor]:
    outputs = [_new_like(partial) for _ in range(1 if update is None else 2)]
    if training:
        outputs.append(partial.new_empty((3, _tokens(partial)), dtype=torch.float32))
    return outputs


def _new_parameter_grads(*tensors: Tensor | None) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors if tensor is not None]


def _tokens(tensor: Tensor) -> int:
    return tensor.numel() // tensor.shape[-1]


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2_from(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=1024)
def _constants(tile: Tile, tokens: int, hidden_size: int, device: torch.device) -> tuple[dict[str, int], int]:
    block_d = _power_of_2_from(hidden_size)
    block_rows = min(max(tile.rows, 1024 // block_d), _power_of_2_from(tokens))
    constants = {
        "D": hidden_size,
        "BLOCK_ROWS": block_rows,
        "BLOCK_D": block_d,
        "num_warps": max(1, min(16, block_rows * block_d // (32 * tile.columns_per_thread))),
    }
    if tile.stages:
        constants["STAGES"] = tile.stages
    programs = _divide_up(tokens, block_rows)
    if tile.programs_per_multiprocessor:
        programs = min(programs, tile.programs_per_multiprocessor * multiprocessors(device))
    return constants, programs


def _launch(kernel: str, tensor: Tensor) -> tuple[int, dict[str, int], int]:
    """Number of tokens, constants and number of programs. Static, so that equal shapes give equal bits."""
    tokens = _tokens(tensor)
    return tokens, *_constants(TILES[kernel], tokens, tensor.shape[-1], tensor.device)


def _is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether nothing watches or replaces these tensors, so that the dispatcher, which takes time, may be left out."""
    return not is_recorded() and all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)


def _tensors(inputs: Sequence) -> list[Tensor]:
    flat = [x for entry in inputs for x in (entry if isinstance(entry, list) else [entry])]
    return [x for x in flat if isinstance(x, Tensor)]


class _Operation:
    """
    A function of tensors and lists of tensors that gives a list of tensors, also typed, for the compiler to see it.

    Args:
        function (callable): What runs.
        new_outputs (callable): With the same arguments, gives tensors like its results.
    """

    def __init__(self, function: Callable, new_outputs: Callable):
        self.function = function
        name = f"{operation_namespace(__name__)}::{function.__name__}"
        self.typed = torch.library.custom_op(name, function, mutates_args=())
        self.typed.register_fake(new_outputs)

    def __call__(self, *inputs) -> list[Tensor]:
        return self.function(*inputs) if _is_plain(_tensors(inputs)) else self.typed(*inputs)


class _DifferentiableOperation(_Operation):
    """
    One whose last argument, `training`, asks for another output, which the backward needs.

    Args:
        save, backward (callable): As `torch.library.register_autograd` takes them.
    """

    def __init__(self, function: Callable, new_outputs: Callable, save: Callable, backward: Callable):
        super().__init__(function, new_outputs)
        self.save, self.backward = save, backward
        self.typed.register_autograd(backward, setup_context=save)

    def __call__(self, *inputs) -> list[Tensor]:
        tensors = _tensors(inputs)
        training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if not (training and _is_plain(tensors)):
            return super().__call__(*inputs, training)
        lengths = tuple(len(x) if isinstance(x, list) else None for x in inputs)
        flat = [x for entry in inputs for x in (entry if isinstance(entry, list) else [entry])]
        return list(_PlainFunction.apply(self, lengths, *flat))


class _PlainFunction(torch.autograd.Function):
    """A differentiable operation without the dispatcher."""

    @staticmethod
    def forward(ctx, operation, lengths, *flat):
        flat = iter(flat)
        inputs = [next(flat) if length is None else [next(flat) for _ in range(length)] for length in lengths]
        outputs = operation.function(*inputs, True)
        operation.save(ctx, (*inputs, True), output=outputs)
        ctx.operation = operation
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        grads = ctx.operation.backward(ctx, grads)[:-1]
        return None, None, *(grad for entry in grads for grad in (entry if isinstance(entry, list) else [entry]))


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
    ctx.numbers = len(sources), len(queries)
    if training:
        ctx.mark_non_differentiable(output[-1])
        ctx.save_for_backward(output[-1], *sources, *queries, *gains)


def _backward_phase_1(ctx, grads):
    scalars, *saved = ctx.saved_tensors
    n, sites = ctx.numbers
    sources, queries, gains = saved[:n], saved[n : n + sites], saved[n + sites :]
    output_grads = [torch.zeros_like(sources[0]) if grad is None else grad for grad in grads[:sites]]
    log_sum_exp_grads = [
        torch.zeros_like(sources[0][..., 0], dtype=torch.float32) if grad is None else grad
        for grad in grads[sites : 2 * sites]
    ]
    grads = _attn_res_phase_1_backward(output_grads, log_sum_exp_grads, sources, queries, gains, scalars)
    parameter_grads = [list(grad.unbind(0)) for grad in grads[n:]]
    return grads[:n], parameter_grads[0], parameter_grads[1] if gains else [], None, None


def _save_phase_2(ctx, inputs, output):
    phase_1_output, _, partial, update, query, gain, bias, output_norm, sources, ctx.eps, ctx.factor, training = inputs
    ctx.set_materialize_grads(False)
    ctx.has_update = update is not None
    if training:
        ctx.mark_non_differentiable(output[-1])
        partial = output[0] if ctx.has_update else partial
        kept = None if sources else phase_1_output
        ctx.save_for_backward(kept, partial, query, gain, bias, output_norm, output[-1], *sources)


def _backward_phase_2(ctx, grads):
    output, partial, query, gain, bias, output_norm, scalars, *sources = ctx.saved_tensors
    partial_grad, mixed_grad = grads[:2] if ctx.has_update else (None, grads[0])
    if mixed_grad is None:
        mixed_grad = torch.zeros_like(partial)
    output_grad, log_sum_exp_grad, partial_grad, *grads = _attn_res_phase_2_backward(
        *(partial_grad, mixed_grad, output, sources, partial, query, gain, bias, output_norm, scalars),
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


_attn_res_backward = _Operation(
    attn_res_backward,
    lambda mixed_grad, sources, query, gain, bias, output_norm, *_: [
        *map(_new_like, sources),
        *_new_parameter_grads(query, gain, output_norm, bias),
    ],
)
_attn_res_phase_1_backward = _Operation(
    attn_res_phase_1_backward,
    lambda output_grads, log_sum_exp_grads, sources, queries, gains, scalars: [
        *map(_new_like, sources),
        *_new_parameter_grads(torch.stack(queries), torch.stack(gains) if gains else None),
    ],
)
_attn_res_phase_2_backward = _Operation(
    attn_res_phase_2_backward,
    lambda partial_grad, mixed_grad, output, sources, partial, query, gain, bias, output_norm, *_: [
        *(_new_like(partial), _new_scalars(partial), _new_like(partial)),
        *_new_parameter_grads(query, gain, output_norm, bias),
    ],
)
run_attn_res = _DifferentiableOperation(
    attn_res_forward,
    lambda sources, query, gain, bias, output_norm, eps, factor, training: _new_mix(sources, training),
    _save_attn_res,
    _backward_attn_res,
)
run_attn_res_phase_1 = _DifferentiableOperation(
    attn_res_phase_1_forward,
    lambda sources, queries, gains, eps, training: _new_phase_1(sources, len(queries), training),
    _save_phase_1,
    _backward_phase_1,
)
run_attn_res_phase_2 = _DifferentiableOperation(
    attn_res_phase_2_forward,
    lambda output, log_sum_exp, partial, update, *rest: _new_phase_2(partial, update, rest[-1]),
    _save_phase_2,
    _backward_phase_2,
)
