# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Triton kernels of the depth-weighted average.

Bytes, in units of one hidden state, with N sources: the forward reads N and writes 1, the backward reads N + 1 and
writes N. A program holds a piece of the flat hidden states and runs over the sources, which stay separate tensors, in
groups: all loads of a group are issued before the first is used, and its sums for the gradients of the weights are
taken in one reduction. These are sums of each program, added up by a second kernel.

Legend: N sources, G sources of a group, P programs, B elements of a program.
"""

from .depth_jit import block_of, chosen_pointer


# Only imported where Triton is. The block tells transformers that saved models load without it.
try:
    import triton
    import triton.language as tl
except ImportError:
    raise


@triton.jit
def _load_group(sources, first, num_sources, offset_B, inside_B, GROUP: tl.constexpr):
    """
    GROUP sources from `first` on, a multiple of GROUP, as a tuple; zeros after the last one. A pointer is picked
    among those that can stand at its place of a group: there are fewer of them.
    """
    values = ()
    for j in tl.static_range(GROUP):
        source = chosen_pointer(sources[j::GROUP], first // GROUP)
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
def depth_average_fwd_kernel(sources, weight, average, num_sources, size, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    offset_B, inside_B = block_of(size, BLOCK)
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
    sources, grads, weight, average_grad, weight_grad_PN, num_sources, size, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    VECTOR: tl.constexpr = 128 // average_grad.dtype.element_ty.primitive_bitwidth
    program = tl.program_id(0).to(tl.int64)
    offset_B = program * BLOCK + tl.arange(0, BLOCK)
    inside_B = offset_B < size
    grad_B = tl.load(average_grad + offset_B, mask=inside_B, other=0.0).to(tl.float32)
    for first in range(0, num_sources, GROUP):
        values = _load_group(sources, first, num_sources, offset_B, inside_B, GROUP)
        # This does not need the sources, which are still on their way.
        for j in tl.static_range(GROUP):
            grad = chosen_pointer(grads[j::GROUP], first // GROUP)
            source_grad_B = _load_weight(weight, first + j, num_sources) * grad_B
            tl.store(grad + offset_B, source_grad_B, mask=inside_B & (first + j < num_sources))
        sums = ()
        for j in tl.static_range(GROUP):
            product_B = grad_B * values[j].to(tl.float32)
            # What a thread has loaded is added up in the thread first.
            sums += (tl.sum(tl.reshape(product_B, [BLOCK // VECTOR, VECTOR]), 1),)
        # All sums are one reduction, since each reduction makes the warps wait for one another.
        sum_G = tl.reshape(tl.sum(_stacked(sums), 0), [GROUP])
        source_G = first + tl.arange(0, GROUP)
        tl.store(weight_grad_PN + program * num_sources + source_G, sum_G, mask=source_G < num_sources)
