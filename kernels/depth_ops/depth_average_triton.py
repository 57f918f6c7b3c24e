# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Triton kernels of the depth-weighted average.

Bytes, in units of one hidden state, with N sources: the forward reads N and writes 1, the backward reads N + 1 and
writes N. A program holds a piece of the flat hidden states and runs over the sources, which stay separate tensors. The
gradients of the weights are sums of each program, added up by a second reduction.

Legend: N sources, P programs, B elements of a program.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .depth_implementations import device_of, operation_namespace, triton_obstacle


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK = 4096
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
    def depth_average_fwd_kernel(sources, weight, average, num_sources, size, BLOCK: tl.constexpr):
        offset_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside_B = offset_B < size
        sum_B = tl.zeros([BLOCK], tl.float32)
        for i in range(num_sources):
            source_B = tl.load(_one_of(sources, i) + offset_B, mask=inside_B, other=0.0).to(tl.float32)
            sum_B += tl.load(weight + i).to(tl.float32) * source_B
        tl.store(average + offset_B, sum_B, mask=inside_B)

    @triton.jit
    def depth_average_bwd_kernel(
        sources, grads, weight, average_grad, weight_grad_PN, num_sources, size, BLOCK: tl.constexpr
    ):
        program = tl.program_id(0).to(tl.int64)
        offset_B = program * BLOCK + tl.arange(0, BLOCK)
        inside_B = offset_B < size
        grad_B = tl.load(average_grad + offset_B, mask=inside_B, other=0.0).to(tl.float32)
        for i in range(num_sources):
            source_B = tl.load(_one_of(sources, i) + offset_B, mask=inside_B, other=0.0).to(tl.float32)
            tl.store(weight_grad_PN + program * num_sources + i, tl.sum(grad_B * source_B))
            tl.store(_one_of(grads, i) + offset_B, tl.load(weight + i).to(tl.float32) * grad_B, mask=inside_B)


def depth_average_obstacle(sources: Sequence[Tensor], weight: Tensor) -> str | None:
    """Why the kernels cannot work on these tensors, as the end of a sentence about them; None if they can."""
    if len(sources) > MAX_SOURCES:
        return f"takes up to {MAX_SOURCES} sources, not {len(sources)}"
    if len(dtypes := {source.dtype for source in sources}) > 1:
        return f"needs sources of one dtype, not of {', '.join(sorted(map(str, dtypes)))}"
    return triton_obstacle((*sources, weight))


def depth_average_forward(sources: list[Tensor], weight: Tensor) -> Tensor:
    """The weighted sum of `sources`, in their dtype."""
    average = torch.empty_like(sources[0], memory_format=torch.contiguous_format)
    size = average.numel()
    if size:
        with device_of(average):
            depth_average_fwd_kernel[(_programs(size),)](
                _padded(sources), weight.contiguous(), average, len(sources), size, BLOCK=BLOCK, num_warps=8
            )
    return average


def depth_average_backward(average_grad: Tensor, sources: list[Tensor], weight: Tensor) -> list[Tensor]:
    """The gradients of the sources, and last that of the weight."""
    grads = [torch.empty_like(source, memory_format=torch.contiguous_format) for source in sources]
    size = average_grad.numel()
    weight_grad_PN = weight.new_empty((_programs(size), len(sources)), dtype=torch.float32)
    if size:
        with device_of(average_grad):
            depth_average_bwd_kernel[(_programs(size),)](
                *(_padded(sources), _padded(grads), weight.contiguous(), average_grad.contiguous(), weight_grad_PN),
                *(len(sources), size),
                BLOCK=BLOCK,
                num_warps=8,
            )
    return [*grads, weight_grad_PN.sum(0).to(weight.dtype)]


def _programs(size: int) -> int:
    return -(-size // BLOCK)


def _padded(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    number = next(size for size in _SIZES if size >= len(tensors))
    flat = [tensor.contiguous() for tensor in tensors]
    return (*flat, *flat[-1:] * (number - len(flat)))


def _save(ctx, inputs, output):
    sources, weight = inputs
    ctx.save_for_backward(weight, *sources)


def _backward(ctx, grad):
    weight, *sources = ctx.saved_tensors
    *grads, weight_grad = _depth_average_backward(grad, sources, weight)
    return grads, weight_grad


_NAMESPACE = operation_namespace(__name__)
_depth_average_backward = torch.library.custom_op(
    f"{_NAMESPACE}::depth_average_backward", depth_average_backward, mutates_args=()
)
_depth_average_backward.register_fake(
    lambda average_grad, sources, weight: [
        *(torch.empty_like(source, memory_format=torch.contiguous_format) for source in sources),
        torch.empty_like(weight, memory_format=torch.contiguous_format),
    ]
)
run_depth_average = torch.library.custom_op(
    f"{_NAMESPACE}::depth_average_forward", depth_average_forward, mutates_args=()
)
run_depth_average.register_fake(
    lambda sources, weight: torch.empty_like(sources[0], memory_format=torch.contiguous_format)
)
run_depth_average.register_autograd(_backward, setup_context=_save)
