# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The depth-weighted average with Triton: how its kernels are launched, and their gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .depth_dispatch import triton, triton_obstacle
from .depth_launch import device_of, divide_up, new_like
from .typed_operations import DifferentiableOperation, Operation


# GROUP sources are in flight at once, and BLOCK elements of each: 16 bytes of each thread if they are bf16.
FWD_TILE = {"GROUP": 8, "BLOCK": 1024, "num_warps": 4}
BWD_TILE = {"GROUP": 8, "BLOCK": 1024, "num_warps": 4}
MAX_SOURCES = 128
# The kernels are compiled for these numbers of sources. A number in between takes the next one, and the last source
# stands for those that are missing.
_SIZES = (4, 16, 64, MAX_SOURCES)


if triton is not None:
    from .depth_average_jit import depth_average_bwd_kernel, depth_average_fwd_kernel


def depth_average_obstacle(sources: Sequence[Tensor], weight: Tensor) -> str | None:
    """Why the kernels cannot work on these tensors, as the end of a sentence about them; None if they can."""
    if len(sources) > MAX_SOURCES:
        return f"takes up to {MAX_SOURCES} sources, not {len(sources)}"
    if len(dtypes := {source.dtype for source in sources}) > 1:
        return f"needs sources of one dtype, not of {', '.join(sorted(map(str, dtypes)))}"
    return triton_obstacle((*sources, weight))


def depth_average_forward(sources: list[Tensor], weight: Tensor, training: bool = False) -> list[Tensor]:
    """The weighted sum of `sources`, in their dtype."""
    average = new_like(sources[0])
    size = average.numel()
    if size:
        padded = _padded(sources)
        with device_of(average):
            depth_average_fwd_kernel[(divide_up(size, FWD_TILE["BLOCK"]),)](
                *(padded, weight.contiguous(), average, len(sources), size), **_tile(FWD_TILE, len(padded))
            )
    return [average]


def depth_average_backward(average_grad: Tensor, sources: list[Tensor], weight: Tensor) -> list[Tensor]:
    """The gradients of the sources, and last that of the weight."""
    grads = [*map(new_like, sources)]
    size = average_grad.numel()
    programs = divide_up(size, BWD_TILE["BLOCK"])
    weight_grad_PN = weight.new_empty((programs, len(sources)), dtype=torch.float32)
    if size:
        padded = _padded(sources)
        with device_of(average_grad):
            depth_average_bwd_kernel[(programs,)](
                *(padded, _padded(grads), weight.contiguous(), _flat(average_grad), weight_grad_PN),
                *(len(sources), size),
                **_tile(BWD_TILE, len(padded)),
            )
    return [*grads, weight_grad_PN.sum(0).to(weight.dtype)]


def _tile(tile: dict[str, int], sources: int) -> dict[str, int]:
    return tile | {"GROUP": min(tile["GROUP"], sources)}


def _flat(tensor: Tensor) -> Tensor:
    """The tensor without gaps and aligned to 16 bytes, as wide loads need it: copied only if need be."""
    flat = tensor.contiguous()
    return flat.clone() if flat.data_ptr() % 16 else flat


def _padded(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    number = next(size for size in _SIZES if size >= len(tensors))
    flat = [_flat(tensor) for tensor in tensors]
    return (*flat, *flat[-1:] * (number - len(flat)))


def _save(ctx, inputs, output):
    sources, weight, _ = inputs
    ctx.save_for_backward(weight, *sources)


def _backward(ctx, grads):
    weight, *sources = ctx.saved_tensors
    *source_grads, weight_grad = _run_backward(grads[0], sources, weight)
    return source_grads, weight_grad, None


_run_backward = Operation(
    depth_average_backward, lambda average_grad, sources, weight: [*map(new_like, sources), new_like(weight)]
)
run_depth_average = DifferentiableOperation(
    depth_average_forward, lambda sources, *_: [new_like(sources[0])], _save, _backward
)
