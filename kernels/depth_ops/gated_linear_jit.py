# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Triton kernels of the gated activation.

Bytes, in units of one gate: the forward reads 2 and writes 1; the backward reads 3 and writes 2, and the product once
more if it is asked for.

Legend: B elements of a program.
"""

from .depth_jit import block_of


# Only imported where Triton is. The block tells transformers that saved models load without it.
try:
    import triton
    import triton.language as tl
except ImportError:
    raise


@triton.jit
def gated_product_fwd_kernel(gate, up, product, size, BLOCK: tl.constexpr):
    offset_B, inside_B = block_of(size, BLOCK)
    gate_B = tl.load(gate + offset_B, mask=inside_B, other=0.0).to(tl.float32)
    up_B = tl.load(up + offset_B, mask=inside_B, other=0.0).to(tl.float32)
    tl.store(product + offset_B, gate_B * tl.sigmoid(gate_B) * up_B, mask=inside_B)


@triton.jit
def gated_product_bwd_kernel(product_grad, gate, up, gate_grad, up_grad, product, size, BLOCK: tl.constexpr):
    """`product` is None, or memory that takes the product; it may be that of its gradient, which is read first."""
    offset_B, inside_B = block_of(size, BLOCK)
    grad_B = tl.load(product_grad + offset_B, mask=inside_B, other=0.0).to(tl.float32)
    gate_B = tl.load(gate + offset_B, mask=inside_B, other=0.0).to(tl.float32)
    up_B = tl.load(up + offset_B, mask=inside_B, other=0.0).to(tl.float32)
    sigmoid_B = tl.sigmoid(gate_B)
    silu_B = gate_B * sigmoid_B
    tl.store(up_grad + offset_B, grad_B * silu_B, mask=inside_B)
    slope_B = sigmoid_B + silu_B * (1.0 - sigmoid_B)
    tl.store(gate_grad + offset_B, grad_B * up_B * slope_B, mask=inside_B)
    if product is not None:
        tl.store(product + offset_B, silu_B * up_B, mask=inside_B)
