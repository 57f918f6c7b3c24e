# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Checks of arguments, and defaults of them, that several operations share."""

from collections.abc import Sequence

from torch import Tensor


def default_scaling(query: Tensor, scaling: float | None) -> float:
    """`d ** -0.5` if none is given."""
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def check_heads(heads: int, kv_heads: int) -> None:
    """
    Raises:
        `ValueError`: if query heads cannot share key-value heads evenly.
    """
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads, {kv_heads} key-value heads: the latter must divide the former.")


def check_gate(gate: Tensor | None, heads: int) -> None:
    """
    Raises:
        `ValueError`: if there is a gate, and it has not one number for each head.
    """
    if gate is not None and gate.shape != (heads,):
        raise ValueError(f"gate has shape {list(gate.shape)}: must be [{heads}], one number for each head.")


def check_depth_entries(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """
    Raises:
        `ValueError`: if the shapes do not fit together.
    """
    if not keys or len(keys) != len(values):
        raise ValueError(
            f"{len(keys)} keys and {len(values)} values: there must be one of each per entry, and at least one."
        )
    if query.ndim != 4 or keys[-1].ndim != 4:
        raise ValueError(
            f"query has shape {list(query.shape)}, keys[-1] {list(keys[-1].shape)}: must be [B, Hq, T, d] and "
            "[B, Hkv, T, d]."
        )
    batch, heads, tokens, head_dim = query.shape
    kv_heads = keys[-1].shape[1]
    check_heads(heads, kv_heads)
    expected = (batch, kv_heads, tokens, head_dim)
    for name, tensors in (("keys", keys), ("values", values)):
        for i, tensor in enumerate(tensors):
            if tensor.shape != expected:
                raise ValueError(
                    f"{name}[{i}] has shape {list(tensor.shape)}: must be [B, Hkv, T, d] = {list(expected)} for a "
                    f"query of shape {list(query.shape)}."
                )
