# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Attention Residuals with Triton: how its kernels are launched, and their gradients."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .depth_dispatch import triton, triton_obstacle
from .depth_launch import (
    as_rows,
    device_of,
    divide_up,
    matrix_block,
    matrix_precision,
    multiprocessors,
    new_like,
    power_of_2_from,
)
from .typed_operations import DifferentiableOperation, Operation


if triton is not None:
    from .attn_res_jit import (
        attn_res_bwd_kernel,
        attn_res_fwd_kernel,
        attn_res_parameter_grad_kernel,
        attn_res_phase_1_bwd_kernel,
        attn_res_phase_1_few_fwd_kernel,
        attn_res_phase_1_fwd_kernel,
        attn_res_phase_1_query_grad_kernel,
        attn_res_phase_1_score_kernel,
        attn_res_phase_2_bwd_kernel,
        attn_res_phase_2_fwd_kernel,
    )


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
# These replace the tiles above where a row has more than 2048 columns.
WIDE_TILES = {"attn_res_fwd": Tile(32), "attn_res_bwd": Tile(16, programs_per_multiprocessor=2, stages=1)}
SCORE_TILE = {"BLOCK_T": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
PHASE_1_FWD_TILE = {"BLOCK_ROWS": 1, "BLOCK_D": 2048, "num_warps": 4}
PHASE_1_BWD_TILE = {"BLOCK_K": 64, "num_warps": 2, "STAGES": 3}
# A program has so many pairs of a token and a source: the rows of a matrix product's smallest matrix.
PHASE_1_BWD_ROWS = 16
QUERY_GRAD_TILE = {"BLOCK_TOKENS": 32, "BLOCK_D": 128, "num_warps": 4, "num_stages": 3}
# From so many tokens on, phase 1 reads the sources twice. For fewer, it reads them once for every site.
MANY_TOKENS = 256
# One launch takes no more, since what a program holds must fit into registers.
MAX_SOURCES = 16
MAX_SITES = 16
MAX_HIDDEN_SIZE = 32768
# Up to so many sources, phase 2's backward computes the mix of phase 1 again from them, where it is allowed to. For
# more, reading them costs more than reading a mix that was kept.
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
    return triton_obstacle(tensors)


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
    The mixes that have to be made; the log-sum-exps of all sites; and, if `training`, logits and inverse root mean
    squares of the sources, `[N, T, S + 1]`.
    """
    sites, source = len(pseudo_queries), sources[0]
    outputs = _new_phase_1(sources, sites, training)
    tokens, hidden_size = _tokens(source), source.shape[-1]
    if not tokens:
        return outputs
    mixes = _new_mixes(sources, sites)
    results = tuple(map(_argument, outputs[:mixes])), tuple((x, 1) for x in outputs[mixes : mixes + sites])
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
            BLOCK_S=matrix_block(sites),
            PRECISION=matrix_precision(),
            **SCORE_TILE,
        )
        if mixes:
            rows, columns = PHASE_1_FWD_TILE["BLOCK_ROWS"], PHASE_1_FWD_TILE["BLOCK_D"]
            attn_res_phase_1_fwd_kernel[(divide_up(tokens, rows), divide_up(hidden_size, columns))](
                *(tuple(map(_argument, sources)), scalars, *results, tokens),
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
    # There are enough programs to fill the device, and so few that their partial sums are small beside the sources.
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
                BLOCK_S=matrix_block(sites),
                BLOCK_N=block_sources,
                PRECISION=matrix_precision(),
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
                BLOCK_S=matrix_block(sites),
                PRECISION=matrix_precision(),
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
    """Gradients of `queries`, `gains` and `output_norm_weight`, as far as given, from partial sums `[P, rows, D]`."""
    programs, rows, hidden_size = partial_sums.shape
    # Without tokens there is nothing to add up.
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


def _of_equal_strides(tensors: list[Tensor]) -> list[Tensor]:
    rows = [as_rows(tensor) for tensor in tensors]
    return rows if len({row.stride(0) for row in rows}) == 1 else [row.contiguous() for row in rows]


def _alignment(tensors: list[Tensor]) -> int:
    """To how many bytes all rows are aligned: 16, or else the size of an element."""
    size = tensors[0].element_size()
    return 16 if all(x.data_ptr() % 16 == 0 and x.stride(0) * size % 16 == 0 for x in tensors) else size


def _argument(tensor: Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
    rows = as_rows(tensor)
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
    outputs = [new_like(source) for _ in range(_new_mixes(sources, sites))]
    outputs += [_new_scalars(source) for _ in range(sites)]
    if training:
        outputs.append(_new_phase_1_scalars(sources, sites))
    return outputs


def _new_mixes(sources: list[Tensor], sites: int) -> int:
    """
    How many mixes phase 1 makes. A single source is its own mix at every site: it is handed on as each of them, before
    the sources themselves.
    """
    return 0 if len(sources) == 1 else sites


def attn_res_phase_1_of_few(
    sources: list[Tensor], pseudo_queries: list[Tensor], norm_weights: list[Tensor], eps: float
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Mixes, log-sum-exps, and the sources handed on, of as many sources and sites as one launch takes."""
    results = run_attn_res_phase_1(sources, pseudo_queries, norm_weights, eps)
    sites, mixes = len(pseudo_queries), _new_mixes(sources, len(pseudo_queries))
    handed_on = results[len(results) - (sites - mixes) - len(sources) :]
    outputs = results[:mixes] + handed_on[: sites - mixes]
    return outputs, results[mixes : mixes + sites], handed_on[sites - mixes :]


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
    """Number of tokens, constants and number of programs. They follow from shapes: equal shapes give equal bits."""
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
        _attn_res_backward(*(grads[0], sources, query, gain, bias, output_norm, scalars), *(ctx.eps, ctx.factor))
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
    # Called through the dispatcher, the operation hands nothing on, and gets no gradients of that.
    grads = (*grads, *(None,) * (n + sites))
    mixes = _new_mixes(sources, sites)
    handed_on = grads[mixes + sites + 1 :]
    output_grads = [_or_zeros(grad, sources[0]) for grad in (*grads[:mixes], *handed_on[: sites - mixes])]
    log_sum_exp_grads = [_or_zeros(grad, sources[0][..., 0], torch.float32) for grad in grads[mixes : mixes + sites]]
    added = handed_on[sites - mixes :][:n]
    added = [_or_zeros(grad, sources[0]) for grad in added] if any(grad is not None for grad in added) else []
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
    # Without an update, the sum is handed on after the mix and the scalars.
    partial_grad, mixed_grad = grads[:2] if ctx.has_update else (grads[2] if len(grads) > 2 else None, grads[0])
    mixed_grad = _or_zeros(mixed_grad, partial)
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


def _or_zeros(grad: Tensor | None, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros_like(like, dtype=dtype) if grad is None else grad


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
    lambda sources, queries, *_: sources[:1] * (len(queries) - _new_mixes(sources, len(queries))) + sources,
)
run_attn_res_phase_2 = DifferentiableOperation(
    attn_res_phase_2_forward,
    lambda output, log_sum_exp, partial, update, *rest: _new_phase_2(partial, update, rest[-1]),
    _save_phase_2,
    _backward_phase_2,
    lambda output, log_sum_exp, partial, update, *_: [partial] if update is None else [],
)
