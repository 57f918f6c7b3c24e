# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Pure PyTorch form of the linear maps of one token: the definition that the kernel is judged against.

Legend: D hidden size, E entries of a result.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import linear

from .depth_precision import accumulation_dtype


def shared_input_linear_reference(hidden_states: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Each map of the hidden states, `[..., E]`. See `shared_input_linear`."""
    wide = accumulation_dtype(hidden_states)
    x_D = hidden_states.to(wide)
    return [linear(x_D, weight_ED.to(wide)).to(hidden_states.dtype) for weight_ED in weights]
