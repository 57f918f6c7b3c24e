# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Pure PyTorch form of the gated activation and the linear map after it: the definition that kernels are judged by."""

from torch import Tensor
from torch.nn.functional import linear, silu

from .depth_precision import accumulation_dtype, without_autocast


def gated_product_reference(gate: Tensor, up: Tensor) -> Tensor:
    """The product, of the gate's shape. See `gated_product`."""
    wide = accumulation_dtype(gate)
    return (silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def gated_linear_reference(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The map of the product. See `gated_linear`."""
    with without_autocast(gate):
        return linear(gated_product_reference(gate, up), weight, bias)
