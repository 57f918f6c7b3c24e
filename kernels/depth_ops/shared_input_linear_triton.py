# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Triton kernel of the linear maps of one token.

A program has some rows of one weight, all loads of which it starts before it needs the first. The weights are read
once; the hidden states, a few kilobytes, by each program, from the cache.

Legend: D hidden size, E rows of a weight that a program has, B columns of one step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .depth_implementations import device_of, divide_up, triton_obstacle
from .typed_operations import Operation


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# for rows up to so long, and for longer ones
NARROW = 1024
NARROW_TILE = {"BLOCK_E": 4, "BLOCK_B": 512, "num_warps": 4}
TILE = {"BLOCK_E": 2, "BLOCK_B": 512, "num_warps": 2}

if triton is not None:

    @triton.jit
    def shared_input_linear_kernel(
        hidden_states,
        weights,
        outputs,
        strides,
        SIZES: tl.constexpr,
        D: tl.constexpr,
        BLOCK_E: tl.constexpr,
        BLOCK_B: tl.constexpr,
    ):
        program = tl.program_id(0)
        for i in tl.static_range(len(weights)):
            # before these programs come those of earlier weights
            if (program >= 0) & (program * BLOCK_E < SIZES[i]):
                row_E = program * BLOCK_E + tl.arange(0, BLOCK_E)
                start_E1 = weights[i] + (row_E.to(tl.int64) * strides[i])[:, None]
                sum_EB = tl.zeros([BLOCK_E, BLOCK_B], tl.float32)
                for start in tl.static_range(0, D, BLOCK_B):
                    column_B = start + tl.arange(0, BLOCK_B)
                    inside_EB = (row_E < SIZES[i])[:, None] & (column_B < D)[None, :]
                    weight_EB = tl.load(start_E1 + column_B[None, :], mask=inside_EB, other=0.0)
                    x_B = tl.load(hidden_states + column_B, mask=column_B < D, other=0.0)
                    sum_EB += weight_EB.to(tl.float32) * x_B.to(tl.float32)[None, :]
                tl.store(outputs[i] + row_E, tl.sum(sum_EB, 1), mask=row_E < SIZES[i])
            program -= (SIZES[i] + BLOCK_E - 1) // BLOCK_E


def shared_input_linear_obstacle(hidden_states: Tensor, weights: Sequence[Tensor]) -> str | None:
    """Why the kernel cannot work on these tensors, as the end of a sentence about it; None if it can."""
    tensors = (hidden_states, *weights)
    if hidden_states.numel() != hidden_states.shape[-1]:
        return f"works on one row of hidden states, not on shape {list(hidden_states.shape)}"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "has no gradient"
    return triton_obstacle(tensors)


def shared_input_linear_forward(hidden_states: Tensor, weights: list[Tensor]) -> list[Tensor]:
    outputs = _new_outputs(hidden_states, weights)
    weights = [weight if weight.stride(1) == 1 else weight.contiguous() for weight in weights]
    sizes, hidden_size = tuple(weight.shape[0] for weight in weights), hidden_states.shape[-1]
    tile = NARROW_TILE if hidden_size <= NARROW else TILE
    with device_of(hidden_states):
        shared_input_linear_kernel[(sum(divide_up(size, tile["BLOCK_E"]) for size in sizes),)](
            *(hidden_states.contiguous(), tuple(weights), tuple(outputs)),
            tuple(weight.stride(0) for weight in weights),
            SIZES=sizes,
            D=hidden_size,
            **tile,
        )
    return outputs


def _new_outputs(hidden_states: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [hidden_states.new_empty((*hidden_states.shape[:-1], weight.shape[0])) for weight in weights]


run_shared_input_linear = Operation(shared_input_linear_forward, _new_outputs)
