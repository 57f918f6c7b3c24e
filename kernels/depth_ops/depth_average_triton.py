# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Triton kernels of the depth-weighted average.

Bytes, in units of one hidden state, with N sources: the forward reads N and writes 1, the backward reads N + 1 and
writes N. A program holds a piece of the flat hidden states and runs over the sources, which stay separate tensors, in
groups: all loads of a group are issued before the first is used, and its sums for the gradients of the weights are
taken in one reduction. These are sums of each program, added up by a second kernel.

Legend: N sources, G sources of a group, P programs, B elements of a program.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .depth_implementations import device_of, divide_up, triton_obstacle
from .typed_operations import DifferentiableOperation, Operation, new_like


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# how many sources are in flight at once, and how many elements a program holds: of bf16, 16 bytes of each thread
FWD_TILE = {"GROUP": 8, "BLOCK": 1024, "num_warps": 4}
BWD_TILE = {"GROUP": 8, "BLOCK": 1024, "num_warps": 4}
MAX_SOURCES = 128
# the kernels are compiled for so many, and for runs of so many more; the last source stands for those that are missing
_SIZES = (4, 16, 64, MAX_SOURCES)

if triton is not None:

    @triton.jit
    def _one_of(pointers, index):
        """Element `index`, known at run time only, of a tuple of pointers."""
        address = pointers[0].to(tl.int64)
        for i in tl.static_range(1, len(pointers)):
            address = tl.where(index == i, pointers[i].to(tl.int64), address)
        return tl.multiple_of(address.to(pointers[0].dtype), 16)

    @triton.jit
    def _load_group(sources, first, num_sources, offset_B, inside_B, GROUP: tl.constexpr):
        """
        GROUP sources from `first` on, a multiple of GROUP, as a tuple; zeros after the last one. A pointer is picked
        among those that can stand at its place of a group: there are fewer of them.
        """
        values = ()
        for j in tl.static_range(GROUP):
            source = _one_of(sources[j::GROUP], first // GROUP)
            values += (tl.load(source + offset_B, mask=inside_B & (first + j < num_sources), other=0.0),)
        return values

    @triton.jit
    def _load_weight(weight, index, num_sources):
        return tl.load(weight + index, mask=index < num_sources, other=0.0).to(tl.float32)

    @triton.jit
    def _stacked(values):
        """A power of two of tensors, stacked along new last axes: `[B, 2, 2, ...]`."""
        if len(values) == 1:
            return values[0]
        else:
            return tl.join(_stacked(values[0::2]), _stacked(values[1::2]))

    @triton.jit(do_not_specialize=["num_sources"])
    def depth_average_fwd_kernel(
        sources, weight, average, num_sources, size, GROUP: tl.constexpr, BLOCK: tl.constexpr
    ):
        offset_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside_B = offset_B < size
        sum_B = tl.zeros([BLOCK], tl.float32)
        for first in range(0, num_sources, GROUP):
            values = _load_group(sources, first, num_sources, offset_B, inside_B, GROUP)
            # No load moves across it. Without it the assembler puts each source's load next to its use, to save
            # registers, and two are in flight at once instead of all.
            tl.debug_barrier()
            for j in tl.static_range(GROUP):
                sum_B += _load_weight(weight, first + j, num_sources) * values[j].to(tl.float32)
        tl.store(average + offset_B, sum_B, mask=inside_B)

    @triton.jit(do_not_specialize=["num_sources"])
    def depth_average_bwd_kernel(
        sources,
        grads,
        weight,
        average_grad,
        weight_grad_PN,
        num_sources,
        size,
        GROUP: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        VECTOR: tl.constexpr = 128 // average_grad.dtype.element_ty.primitive_bitwidth
        program = tl.program_id(0).to(tl.int64)
        offset_B = program * BLOCK + tl.arange(0, BLOCK)
        inside_B = offset_B < size
        grad_B = tl.load(average_grad + offset_B, mask=inside_B, other=0.0).to(tl.float32)
        for first in range(0, num_sources, GROUP):
            values = _load_group(sources, first, num_sources, offset_B, inside_B, GROUP)
            # while the sources are on their way
            for j in tl.static_range(GROUP):
                grad = _one_of(grads[j::GROUP], first // GROUP)
                source_grad_B = _load_weight(weight, first + j, num_sources) * grad_B
                tl.store(grad + offset_B, source_grad_B, mask=inside_B & (first + j < num_sources))
            sums = ()
            for j in tl.static_range(GROUP):
                product_B = grad_B * values[j].to(tl.float32)
                # first what one thread has loaded
                sums += (tl.sum(tl.reshape(product_B, [BLOCK // VECTOR, VECTOR]), 1),)
            # in one reduction: each makes the warps wait for one another
            sum_G = tl.reshape(tl.sum(_stacked(sums), 0), [GROUP])
            source_G = first + tl.arange(0, GROUP)
            tl.store(weight_grad_PN + program * num_sources + source_G, sum_G, mask=source_G < num_sources)


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
    """The tensor or a copy of it, without gaps and as the kernels' wide loads need it."""
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
