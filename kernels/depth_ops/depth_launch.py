# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the launches of kernels share."""

import contextlib
from functools import lru_cache

import torch
from torch import Tensor


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager:
    """The context in which kernels for this tensor are launched: Triton launches on the current device."""
    index = tensor.get_device()
    if index < 0 or index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(index)


def divide_up(dividend: int, divisor: int) -> int:
    """The quotient, rounded up. Triton's `cdiv` would cost a microsecond for each call from the host."""
    return -(-dividend // divisor)


def power_of_2_from(size: int) -> int:
    """The least power of two that is not less than this: what Triton's `next_power_of_2` gives, in less time."""
    return 1 << max(size - 1, 0).bit_length()


def matrix_block(size: int) -> int:
    """The least power of two from `size` on that a matrix product of Triton takes."""
    return max(16, power_of_2_from(size))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """The device's number of multiprocessors; a small number where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def matrix_precision() -> str:
    """How kernels multiply fp32 matrices: in three TF32 products on tensor cores, where Triton offers these."""
    return "ieee" if torch.version.hip else "tf32x3"


def strided(tensor: Tensor | None) -> tuple | None:
    """A tensor as kernels take it that work on any layout: the pointer, then all strides."""
    return None if tensor is None else (tensor, *tensor.stride())


def as_rows(tensor: Tensor) -> Tensor:
    """`[..., D]` as `[T, D]` with neighbouring columns, copied only if need be."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def new_like(tensor: Tensor) -> Tensor:
    """Fresh memory of the tensor's shape and dtype, without gaps."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def new_heads_like(tensor: Tensor) -> Tensor:
    """Fresh memory for `[B, H, T, D]`, in the order `[B, T, H, D]` that a projection gives and the next one reads."""
    _, heads, tokens, head_dim = tensor.shape
    return tensor.new_empty_strided(tensor.shape, (tokens * heads * head_dim, head_dim, heads * head_dim, 1))
