# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Pieces that the Triton kernels of several operations share."""

# Only imported where Triton is. The block tells transformers that saved models load without it.
try:
    import triton
    import triton.language as tl
except ImportError:
    raise


@triton.jit
def block_of(size, BLOCK: tl.constexpr):
    """The numbers, in 64 bits, of the rows or elements of this program, and which of them there are."""
    number_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return number_B, number_B < size


@triton.jit
def chosen_pointer(pointers, index):
    """Element `index` of a tuple of pointers. Triton cannot index one by a number that is known at run time only."""
    address = pointers[0].to(tl.int64)
    for i in tl.static_range(1, len(pointers)):
        address = tl.where(index == i, pointers[i].to(tl.int64), address)
    return tl.multiple_of(address.to(pointers[0].dtype), 16)
