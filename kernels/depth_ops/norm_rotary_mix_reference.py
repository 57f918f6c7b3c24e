# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Pure PyTorch form of `norm_rotary_mix`: the definition that its kernels are judged against.

Legend: B batch, H query heads, K key-value heads, T tokens, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .depth_precision import accumulation_dtype
from .depth_value_mix_reference import depth_value_mix_reference


def norm_rotary_mix_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    query_norm_weight: Tensor | None,
    key_norm_weight: Tensor | None,
    eps: float,
    key_norm_position: str,
    source_keys: Sequence[Tensor],
    source_values: Sequence[Tensor],
    scaling: float,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Finished query `[B, H, T, D]`, finished key and mixed value `[B, K, T, D]`. See `norm_rotary_mix`."""
    query_BHTD = _rotate(_normalise(_widen(query), query_norm_weight, eps), cos, sin).to(query.dtype)
    key_BKTD = _widen(key)
    if key_norm_position == "before_rope":
        key_BKTD = _normalise(key_BKTD, key_norm_weight, eps)
    key_BKTD = _rotate(key_BKTD, cos, sin)
    if key_norm_position == "after_rope":
        key_BKTD = _normalise(key_BKTD, key_norm_weight, eps)
    key_BKTD = key_BKTD.to(key.dtype)
    if source_keys:
        value = depth_value_mix_reference(
            query_BHTD, [*source_keys, key_BKTD], [*source_values, value], scaling=scaling, gate=gate
        )
    return query_BHTD, key_BKTD, value


def _widen(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x))


def _normalise(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None or sin is None:
        return x
    first, second = x.chunk(2, dim=-1)
    cos_B1TD, sin_B1TD = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    return x * cos_B1TD + torch.cat([-second, first], dim=-1) * sin_B1TD
