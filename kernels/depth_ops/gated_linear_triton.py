# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The gated activation with Triton: how its kernels are launched, and their gradients."""

from torch import Tensor
from torch.nn.functional import linear

from .depth_dispatch import triton, triton_obstacle
from .depth_launch import as_rows, device_of, divide_up, new_like
from .depth_precision import without_autocast
from .typed_operations import DifferentiableOperation, Operation


# each thread has 16 bytes of each tensor if they are bf16
TILE = {"BLOCK": 1024, "num_warps": 4}


if triton is not None:
    from .gated_linear_jit import gated_product_bwd_kernel, gated_product_fwd_kernel


def gated_obstacle(*tensors: Tensor | None) -> str | None:
    """Why the kernels cannot work on these tensors, as the end of a sentence about them; None if they can."""
    return triton_obstacle(tensors)


def gated_product_forward(gate: Tensor, up: Tensor, training: bool = False) -> list[Tensor]:
    product = new_like(gate)
    if size := product.numel():
        with device_of(product):
            gated_product_fwd_kernel[(divide_up(size, TILE["BLOCK"]),)](*_flat(gate, up), product, size, **TILE)
    return [product]


def gated_product_backward(product_grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    """The gradients of gate and up."""
    grads = [new_like(gate), new_like(up)]
    _launch_backward(product_grad, gate, up, grads, None)
    return grads


def gated_linear_forward(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, training: bool = False
) -> list[Tensor]:
    with without_autocast(gate):
        return [linear(gated_product_forward(gate, up)[0], weight, bias)]


def gated_linear_backward(
    output_grad: Tensor, gate: Tensor, up: Tensor, weight: Tensor, with_weight: bool, with_bias: bool
) -> list[Tensor]:
    """The gradients of gate and up, and, where they are wanted, those of weight and bias."""
    output_grad_TD, grads = as_rows(output_grad), [new_like(gate), new_like(up)]
    with without_autocast(gate):
        # this is memory of our own: the product takes the place of its gradient
        product_TC = output_grad_TD @ weight
        _launch_backward(product_TC, gate, up, grads, product_TC if with_weight else None)
        if with_weight:
            grads.append(output_grad_TD.t() @ product_TC)
    if with_bias:
        grads.append(output_grad_TD.sum(0))
    return grads


def _launch_backward(product_grad: Tensor, gate: Tensor, up: Tensor, grads: list[Tensor], product: Tensor | None):
    if size := gate.numel():
        with device_of(gate):
            gated_product_bwd_kernel[(divide_up(size, TILE["BLOCK"]),)](
                *_flat(product_grad, gate, up), *grads, product, size, **TILE
            )


def _flat(*tensors: Tensor) -> list[Tensor]:
    """The tensors without gaps: copied only if need be."""
    return [tensor.contiguous() for tensor in tensors]


def _save_product(ctx, inputs, output):
    gate, up, _ = inputs
    ctx.save_for_backward(gate, up)


def _product_backward(ctx, grads):
    return *_run_product_backward(grads[0], *ctx.saved_tensors), None


def _save_linear(ctx, inputs, output):
    gate, up, weight, bias, _ = inputs
    ctx.wanted = weight.requires_grad, bias is not None and bias.requires_grad
    ctx.save_for_backward(gate, up, weight)


def _linear_backward(ctx, grads):
    gate_grad, up_grad, *others = _run_linear_backward(grads[0], *ctx.saved_tensors, *ctx.wanted)
    weight_grad, bias_grad = (others.pop(0) if wanted else None for wanted in ctx.wanted)
    return gate_grad, up_grad, weight_grad, bias_grad, None


def _new_linear_grads(output_grad, gate, up, weight, with_weight, with_bias) -> list[Tensor]:
    grads = [new_like(gate), new_like(up)]
    if with_weight:
        grads.append(new_like(weight))
    if with_bias:
        grads.append(weight.new_empty(weight.shape[0]))
    return grads


_run_product_backward = Operation(
    gated_product_backward, lambda product_grad, gate, up: [new_like(gate), new_like(up)]
)
run_gated_product = DifferentiableOperation(
    gated_product_forward, lambda gate, *_: [new_like(gate)], _save_product, _product_backward
)
_run_linear_backward = Operation(gated_linear_backward, _new_linear_grads)
run_gated_linear = DifferentiableOperation(
    gated_linear_forward,
    lambda gate, up, weight, *_: [gate.new_empty((*gate.shape[:-1], weight.shape[0]))],
    _save_linear,
    _linear_backward,
)
