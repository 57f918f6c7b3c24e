# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Triton kernel of the linear maps of one token.

A program has some rows of one weight, all loads of which it starts before it needs the first. The weights are read
once; the hidden states, a few kilobytes, by each program, from the cache.

Legend: D hidden size, E rows of a weight that a program has, B columns of one step.
"""

# Only imported where Triton is. The block tells transformers that saved models load without it.
try:
    import triton
    import triton.language as tl
except ImportError:
    raise


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
        # Programs are numbered over all weights, one after the other. This is where weight i begins.
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
