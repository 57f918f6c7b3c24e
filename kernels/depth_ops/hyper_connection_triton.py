# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Manifold-constrained hyper-connections with Triton: how their kernels are launched, and their gradients."""

import torch
from torch import Tensor

from .depth_dispatch import triton, triton_obstacle
from .depth_launch import as_rows, device_of, divide_up, matrix_block, matrix_precision, multiprocessors, new_like
from .typed_operations import DifferentiableOperation, Operation


# Each thread holds a matrix of streams by streams in registers. The larger it is, the longer compilation takes.
MAX_STREAMS = 5
SCORE_TILE = {"BLOCK_T": 128, "BLOCK_D": 64, "num_warps": 4, "num_stages": 3}
# Matrix products of fp32 need more registers.
WIDE_SCORE_TILE = SCORE_TILE | {"BLOCK_D": 32}
# Each thread has one token.
MAPS_TILE = {"BLOCK_T": 32, "num_warps": 1}
# Each warp has one token.
MIX_TILE = {"BLOCK_T": 4, "BLOCK_D": 256, "num_warps": 4}
SUMS_TILE = {"BLOCK_T": 4, "BLOCK_D": 256, "num_warps": 4}
FOLD_TILE = {"BLOCK_D": 1024, "num_warps": 4}
STREAMS_GRAD_TILE = {"BLOCK_T": 64, "BLOCK_D": 128, "num_warps": 4}
if not torch.version.hip:
    # With this limit three programs fit on a multiprocessor, without it two.
    STREAMS_GRAD_TILE["maxnreg"] = 168
WIDE_STREAMS_GRAD_TILE = {"BLOCK_T": 64, "BLOCK_D": 64, "num_warps": 4}
PROJECTION_GRAD_TILE = {"BLOCK_T": 64, "BLOCK_D": 128, "num_warps": 4, "num_stages": 3}
WIDE_PROJECTION_GRAD_TILE = PROJECTION_GRAD_TILE | {"BLOCK_D": 64}
# There are only so many programs of the projection gradient that all of them run at once.
PROJECTION_GRAD_PROGRAMS_PER_MULTIPROCESSOR = 2
PARAMETER_TILE = {"BLOCK_M": 8, "BLOCK_K": 16, "BLOCK_D": 32, "BLOCK_P": 1024, "num_warps": 4}


if triton is not None:
    from .hyper_connection_jit import (
        hyper_connection_fold_kernel,
        hyper_connection_maps_bwd_kernel,
        hyper_connection_maps_fwd_kernel,
        hyper_connection_mix_kernel,
        hyper_connection_parameter_grad_kernel,
        hyper_connection_pre_grad_kernel,
        hyper_connection_projection_grad_kernel,
        hyper_connection_score_kernel,
        hyper_connection_streams_grad_kernel,
        hyper_connection_write_bwd_kernel,
        hyper_connection_write_fwd_kernel,
    )


def hyper_connection_obstacle(*tensors: Tensor) -> str | None:
    """
    Why the kernels cannot work on these tensors, the streams first, as the end of a sentence about the kernel; None if
    they can.
    """
    num_streams, size = tensors[0].shape[-2:]
    if not 0 < num_streams <= MAX_STREAMS:
        return f"supports from 1 to {MAX_STREAMS} streams, not {num_streams}"
    if not size:
        return "supports hidden sizes from 1, not 0"
    return triton_obstacle(tensors)


def hyper_connection_read_forward(
    streams: Tensor,
    norm_weight: Tensor,
    projection: Tensor,
    alphas: list[Tensor],
    logits: list[Tensor],
    eps: float,
    iterations: int,
    columns_first: bool,
    training: bool,
) -> list[Tensor]:
    """The mix, the residual matrix, the weights of the update, and, if `training`, the `scalars` of the maps."""
    outputs = _new_read(streams, True)
    mixed, residual, post, scalars = outputs
    tokens, sizes = _sizes(streams)
    entries = scalars.shape[0] - sizes["S"] - 1
    if tokens:
        scores = scalars.new_empty((sizes["S"], entries + 1, tokens))
        argument = _streams(streams)
        tile = SCORE_TILE if streams.dtype is torch.bfloat16 else WIDE_SCORE_TILE
        with device_of(streams):
            hyper_connection_score_kernel[(divide_up(tokens, tile["BLOCK_T"]), sizes["S"])](
                *(argument, norm_weight.contiguous(), projection.contiguous(), scores, tokens),
                BLOCK_M=matrix_block(entries),
                PRECISION=matrix_precision(),
                **sizes,
                **tile,
            )
            hyper_connection_maps_fwd_kernel[(divide_up(tokens, MAPS_TILE["BLOCK_T"]),)](
                *(scores, _contiguous(alphas), _contiguous(logits), scalars, residual, post),
                *(tokens, iterations, eps),
                COLUMNS_FIRST=columns_first,
                **sizes,
                **MAPS_TILE,
            )
            grid = (divide_up(tokens, MIX_TILE["BLOCK_T"]), divide_up(sizes["D"], MIX_TILE["BLOCK_D"]))
            hyper_connection_mix_kernel[grid](argument, scalars, mixed, tokens, **sizes, **MIX_TILE)
    return outputs if training else outputs[:-1]


def hyper_connection_read_backward(
    mixed_grad: Tensor,
    residual_grad: Tensor,
    post_grad: Tensor,
    added_grad: Tensor | None,
    streams: Tensor,
    norm_weight: Tensor,
    projection: Tensor,
    alphas: list[Tensor],
    logits: list[Tensor],
    scalars: Tensor,
    iterations: int,
    columns_first: bool,
) -> list[Tensor]:
    """
    Gradients of the streams, with `added_grad` added if it is given, of norm weight, projection, alphas and logits.
    """
    parameters = [norm_weight, projection, *alphas, *logits]
    tokens, sizes = _sizes(streams)
    if not tokens:
        return [new_like(streams), *map(torch.zeros_like, parameters)]
    grads = [new_like(x) for x in (streams, *parameters)]
    num_streams, size = sizes.values()
    entries = num_streams * (num_streams + 2)
    programs = divide_up(tokens, MAPS_TILE["BLOCK_T"])
    narrow = streams.dtype is torch.bfloat16
    streams_tile = STREAMS_GRAD_TILE if narrow else WIDE_STREAMS_GRAD_TILE
    projection_tile = PROJECTION_GRAD_TILE if narrow else WIDE_PROJECTION_GRAD_TILE
    columns = num_streams * divide_up(size, projection_tile["BLOCK_D"])
    steps = divide_up(tokens, projection_tile["BLOCK_T"])
    at_once = PROJECTION_GRAD_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(streams.device)
    steps_of_program = divide_up(steps, max(1, min(divide_up(steps, 2), at_once // columns)))
    splits = divide_up(steps, steps_of_program)
    pre_grad = scalars.new_empty((num_streams, tokens))
    line_sums = scalars.new_empty((iterations, 2, num_streams, tokens))
    halves, dtype = (2, torch.bfloat16) if narrow else (1, torch.float32)
    block_m = matrix_block(entries)
    weights = scalars.new_empty((halves, entries, num_streams, size), dtype=dtype)
    coefficients = scalars.new_empty((tokens, halves, block_m), dtype=dtype)
    shared = sizes | {"HALVES": halves, "BLOCK_M": block_m}
    shrink = scalars.new_empty((tokens,))
    map_sums = scalars.new_empty((2, entries, programs))
    partial_sums = scalars.new_empty((splits, entries, num_streams, size))
    argument, mixed_grad = _streams(streams), _rows(mixed_grad)
    alphas, logits, norm_weight, projection = (
        *(_contiguous(alphas), _contiguous(logits)),
        *_contiguous([norm_weight, projection]),
    )
    with device_of(streams):
        hyper_connection_pre_grad_kernel[(divide_up(tokens, SUMS_TILE["BLOCK_T"]),)](
            *(argument, mixed_grad, pre_grad, tokens), **sizes, **SUMS_TILE
        )
        hyper_connection_maps_bwd_kernel[(programs,)](
            *(pre_grad, residual_grad.contiguous(), post_grad.contiguous(), alphas, logits, scalars, line_sums),
            *(coefficients, shrink, map_sums, tokens, iterations, programs),
            COLUMNS_FIRST=columns_first,
            **shared,
            **MAPS_TILE,
        )
        hyper_connection_fold_kernel[(divide_up(num_streams * size, FOLD_TILE["BLOCK_D"]), entries)](
            *(norm_weight, projection, weights), **sizes, **FOLD_TILE
        )
        tiles = divide_up(tokens, streams_tile["BLOCK_T"]) * divide_up(size, streams_tile["BLOCK_D"])
        hyper_connection_streams_grad_kernel[(tiles * num_streams,)](
            *(mixed_grad, None if added_grad is None else _streams(added_grad), argument, weights),
            *(scalars, coefficients, shrink, grads[0], tokens),
            PRECISION=matrix_precision(),
            **shared,
            **streams_tile,
        )
        hyper_connection_projection_grad_kernel[(columns, splits)](
            *(argument, coefficients, partial_sums, tokens, steps_of_program * projection_tile["BLOCK_T"]),
            PRECISION=matrix_precision(),
            **shared,
            **projection_tile,
        )
        column_programs = divide_up(num_streams * size, PARAMETER_TILE["BLOCK_D"])
        hyper_connection_parameter_grad_kernel[(column_programs + entries + 3,)](
            *(partial_sums, map_sums, norm_weight, projection, *grads[1:3], tuple(grads[3:6]), tuple(grads[6:])),
            *(splits, programs),
            **sizes,
            **PARAMETER_TILE,
        )
    return grads


def hyper_connection_write_forward(
    streams: Tensor, update: Tensor, residual: Tensor, post: Tensor, training: bool
) -> list[Tensor]:
    """The new streams. The backward needs nothing else, so `training` makes no difference."""
    outputs = [new_like(streams)]
    tokens, sizes = _sizes(streams)
    if tokens:
        grid = (divide_up(tokens, MIX_TILE["BLOCK_T"]), divide_up(sizes["D"], MIX_TILE["BLOCK_D"]))
        with device_of(streams):
            hyper_connection_write_fwd_kernel[grid](
                *(_streams(streams), _rows(update), residual.contiguous(), post.contiguous(), outputs[0], tokens),
                **sizes,
                **MIX_TILE,
            )
    return outputs


def hyper_connection_write_backward(
    new_streams_grad: Tensor, streams: Tensor, update: Tensor, residual: Tensor, post: Tensor
) -> list[Tensor]:
    """Gradients of all inputs of the forward."""
    grads = [new_like(x) for x in (streams, update, residual, post)]
    tokens, sizes = _sizes(streams)
    if tokens:
        with device_of(streams):
            hyper_connection_write_bwd_kernel[(divide_up(tokens, SUMS_TILE["BLOCK_T"]),)](
                *(_streams(new_streams_grad), _streams(streams), _rows(update)),
                *(residual.contiguous(), post.contiguous(), *grads, tokens),
                **sizes,
                **SUMS_TILE,
            )
    return grads


def _sizes(streams: Tensor) -> tuple[int, dict[str, int]]:
    """The number of tokens, and what kernels are compiled for."""
    num_streams, size = streams.shape[-2:]
    return streams.numel() // (num_streams * size), {"S": num_streams, "D": size}


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """`[..., D]` as `[T, D]` with neighbouring columns, copied only if need be, and its stride."""
    rows = as_rows(tensor)
    return rows, rows.stride(0)


def _streams(tensor: Tensor) -> tuple[Tensor, int, int]:
    """`[..., S, D]` as `[T, S, D]` with neighbouring columns, copied only if need be, and both strides."""
    rows = tensor.reshape(-1, *tensor.shape[-2:])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return rows, rows.stride(0), rows.stride(1)


def _contiguous(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.contiguous() for tensor in tensors)


def _new_read(streams: Tensor, training: bool) -> list[Tensor]:
    *leading, num_streams, size = streams.shape
    entries = num_streams * (num_streams + 2)
    outputs = [
        streams.new_empty((*leading, size)),
        streams.new_empty((*leading, num_streams, num_streams), dtype=torch.float32),
        streams.new_empty((*leading, num_streams), dtype=torch.float32),
    ]
    if training:
        tokens = streams.numel() // (num_streams * size)
        outputs.append(streams.new_empty((entries + 1 + num_streams, tokens), dtype=torch.float32))
    return outputs


def _save_read(ctx, inputs, output):
    streams, norm_weight, projection, alphas, logits, _, ctx.iterations, ctx.columns_first, training = inputs
    ctx.set_materialize_grads(False)
    if training:
        ctx.mark_non_differentiable(output[-1])
        ctx.save_for_backward(output[-1], streams, norm_weight, projection, *alphas, *logits)


def _backward_read(ctx, grads):
    scalars, streams, norm_weight, projection, *rest = ctx.saved_tensors
    # The gradient of the streams that were handed on comes after that of the scalars.
    mixed_grad, residual_grad, post_grad, _, added_grad = (*grads, None)[:5]
    *leading, num_streams, size = streams.shape
    if mixed_grad is None:
        mixed_grad = streams.new_zeros((*leading, size))
    if residual_grad is None:
        residual_grad = scalars.new_zeros((*leading, num_streams, num_streams))
    if post_grad is None:
        post_grad = scalars.new_zeros((*leading, num_streams))
    streams_grad, norm_weight_grad, projection_grad, *rest_grads = _read_backward(
        *(mixed_grad, residual_grad, post_grad, added_grad, streams, norm_weight, projection, rest[:3], rest[3:]),
        *(scalars, ctx.iterations, ctx.columns_first),
    )
    return streams_grad, norm_weight_grad, projection_grad, rest_grads[:3], rest_grads[3:], None, None, None, None


def _save_write(ctx, inputs, output):
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward_write(ctx, grads):
    return *_write_backward(grads[0], *ctx.saved_tensors), None


_read_backward = Operation(
    hyper_connection_read_backward,
    lambda mixed_grad, residual_grad, post_grad, added_grad, streams, norm_weight, projection, alphas, logits, *_: [
        new_like(x) for x in (streams, norm_weight, projection, *alphas, *logits)
    ],
)
_write_backward = Operation(
    hyper_connection_write_backward, lambda grad, *inputs: [new_like(tensor) for tensor in inputs]
)
run_hyper_connection_read = DifferentiableOperation(
    hyper_connection_read_forward,
    lambda streams, *rest: _new_read(streams, rest[-1]),
    _save_read,
    _backward_read,
    lambda streams, *_: [streams],
)
run_hyper_connection_write = DifferentiableOperation(
    hyper_connection_write_forward, lambda streams, *_: [new_like(streams)], _save_write, _backward_write
)
