# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Pure PyTorch form of the value mixing of Depth-Attention: the definition that every kernel is judged against.

Legend: B batch, H query heads, K key-value heads, G = H / K, T tokens, D head dim, N depth entries (own layer last).
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from .depth_precision import accumulation_dtype


def depth_value_weights_reference(
    query: Tensor, keys: Sequence[Tensor], *, scaling: float, gate: Tensor | None = None
) -> Tensor:
    """Softmax over depth, `[B, K, T, N]`, in the accumulation dtype. See `depth_value_weights`."""
    dtype = accumulation_dtype(query)
    query_BKTD = query.unflatten(1, (keys[-1].shape[1], -1)).to(dtype).mean(2)
    # Autocast would round the inputs of a matrix product. It leaves products and sums in fp32.
    scores_BKTN = torch.cat([(query_BKTD * key.to(dtype)).sum(-1, keepdim=True) for key in keys], dim=-1) * scaling
    weights_BKTN = scores_BKTN.softmax(-1)
    if gate is None:
        return weights_BKTN
    # In this order, a gate of 0 gives the own entry exactly one, and a gate of 1 changes nothing.
    gate_K11 = gate.to(dtype)[:, None, None]
    gated_BKTN = weights_BKTN * gate_K11
    return torch.cat([gated_BKTN[..., :-1], gated_BKTN[..., -1:] + (1 - gate_K11)], dim=-1)


def depth_value_mix_reference(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], *, scaling: float, gate: Tensor | None = None
) -> Tensor:
    """Values averaged over depth with these weights, `[B, K, T, D]`. See `depth_value_mix`."""
    weights_BKTN = depth_value_weights_reference(query, keys, scaling=scaling, gate=gate)
    # These are slices, since Inductor (torch 2.11, CUDA) compiles the backward of unbind to wrong gradients.
    weighted = (
        weights_BKTN[..., entry : entry + 1] * value.to(weights_BKTN.dtype) for entry, value in enumerate(values)
    )
    mixed_BKTD = reduce(torch.add, weighted)
    return mixed_BKTD.to(values[-1].dtype)
