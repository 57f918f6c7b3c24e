# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The linear maps of one token with Triton: how their kernel is launched."""

from collections.abc import Sequence

from torch import Tensor

from .depth_dispatch import triton, triton_obstacle
from .depth_launch import device_of, divide_up
from .typed_operations import Operation, needs_grad


# Rows of up to so many columns have a tile of their own.
NARROW = 1024
NARROW_TILE = {"BLOCK_E": 4, "BLOCK_B": 512, "num_warps": 4}
TILE = {"BLOCK_E": 2, "BLOCK_B": 512, "num_warps": 2}


if triton is not None:
    from .shared_input_linear_jit import shared_input_linear_kernel


def shared_input_linear_obstacle(hidden_states: Tensor, weights: Sequence[Tensor]) -> str | None:
    """Why the kernel cannot work on these tensors, as the end of a sentence about it; None if it can."""
    tensors = (hidden_states, *weights)
    if hidden_states.numel() != hidden_states.shape[-1]:
        return f"works on one row of hidden states, not on shape {list(hidden_states.shape)}"
    if needs_grad(tensors):
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
