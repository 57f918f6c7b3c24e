# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What a layer does between its projections and its attention: public operation."""

from collections.abc import Sequence

from torch import Tensor

from .depth_checks import check_depth_entries, check_gate, default_scaling
from .depth_dispatch import Route, route
from .norm_rotary_mix_reference import norm_rotary_mix_reference
from .norm_rotary_mix_triton import norm_rotary_mix_obstacle, run_norm_rotary_mix
from .typed_operations import needs_grad


KEY_NORM_POSITIONS = ("before_rope", "after_rope")


def norm_rotary_mix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    query_norm_weight: Tensor | None = None,
    key_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    key_norm_position: str = "before_rope",
    source_keys: Sequence[Tensor] = (),
    source_values: Sequence[Tensor] = (),
    scaling: float | None = None,
    gate: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    r"""
    Normalises and rotates query and key, and mixes the value with those of earlier layers: RMS norm over the head dim
    (where there is a weight), rotary position embedding (where there are tables) and [`depth_value_mix`] (where there
    are sources), each as the layer would do it by itself.

    Args:
        query (`torch.Tensor` of shape `[B, Hq, T, d]`):
            As projected. Heads `j * g` to `j * g + g - 1` belong to key-value head `j`, where `g = Hq / Hkv`.
        key, value (`torch.Tensor` of shape `[B, Hkv, T, d]`):
            As projected.
        cos, sin (`torch.Tensor` of shape `[B or 1, T, d]`, *optional*):
            Tables of the rotation that pairs channels `j` and `j + d / 2`.
        query_norm_weight, key_norm_weight (`torch.Tensor` of shape `[d]`, *optional*):
            Gains of the norms. The query is normalised before its rotation.
        eps (`float`, *optional*, defaults to 1e-6):
            Added to the mean square.
        key_norm_position (`str`, *optional*, defaults to `"before_rope"`):
            `"before_rope"` as Qwen3 does it, or `"after_rope"` as the released Depth-Attention code does it.
        source_keys, source_values (sequences of `torch.Tensor` of shape `[B, Hkv, T, d]`, *optional*):
            Finished keys and mixed values of the source layers.
        scaling (`float`, *optional*):
            Factor of the depth scores, `d ** -0.5` by default.
        gate (`torch.Tensor` of shape `[Hkv]`, *optional*):
            As in [`depth_value_mix`]; without sources it has no effect.
        impl (`str`, *optional*, defaults to `"auto"`):
            As in [`depth_value_mix`].

    Returns:
        The finished query `[B, Hq, T, d]`, the finished key and the mixed value `[B, Hkv, T, d]`, each in the dtype
        of the tensor that it is made from. Computed in fp32 (fp64 for fp64 inputs) and rounded once, where a layer
        that calls norm and rotation one after the other rounds several times. Without sources the value is returned
        itself.

    Raises:
        `ValueError`: if shapes do not fit together, or `key_norm_position` or `impl` is unknown.
        `RuntimeError`: if `impl="triton"` cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import norm_rotary_mix

        >>> query, key, value = (torch.randn(1, heads, 3, 8) for heads in (4, 2, 2))
        >>> angles = torch.arange(3.0).outer(torch.ones(8)).unsqueeze(0)
        >>> norms = {"query_norm_weight": torch.ones(8), "key_norm_weight": torch.ones(8)}
        >>> sources = {"source_keys": [torch.randn(1, 2, 3, 8)], "source_values": [torch.randn(1, 2, 3, 8)]}
        >>> query, key, value = norm_rotary_mix(query, key, value, angles.cos(), angles.sin(), **norms, **sources)
        >>> query.square().mean(-1).allclose(torch.ones(1, 4, 3), atol=1e-4)  # a rotation keeps the norm
        True
    """
    keys, values = [*source_keys, key], [*source_values, value]
    check_depth_entries(query, keys, values)
    if key_norm_position not in KEY_NORM_POSITIONS:
        raise ValueError(f"key_norm_position={key_norm_position!r}: must be one of {', '.join(KEY_NORM_POSITIONS)}.")
    _check_tables(query, cos, sin)
    for name, weight in (("query_norm_weight", query_norm_weight), ("key_norm_weight", key_norm_weight)):
        if weight is not None and weight.shape != query.shape[-1:]:
            raise ValueError(f"{name} has shape {list(weight.shape)}: must be [d] = [{query.shape[-1]}].")
    check_gate(gate, key.shape[1])
    gate = gate if source_keys else None
    scaling = default_scaling(query, scaling)
    constants = (query_norm_weight, key_norm_weight, cos, sin)
    obstacle = norm_rotary_mix_obstacle(query, keys, values, gate, *constants)
    if needs_grad((cos, sin)):
        obstacle = "gives cos and sin no gradient"
    if route(impl, "norm_rotary_mix", obstacle) is Route.KERNEL:
        outputs = run_norm_rotary_mix(
            query,
            keys,
            values if source_keys else [],
            *(query_norm_weight, key_norm_weight, gate, cos, sin),
            *(scaling, eps, key_norm_position == "before_rope"),
        )
        if all(constant is None for constant in constants):
            outputs = [query, key, *outputs]
        finished_query, finished_key, *mixed = outputs
        return finished_query, finished_key, mixed[0] if source_keys else value
    return norm_rotary_mix_reference(
        query,
        key,
        value,
        cos,
        sin,
        query_norm_weight=query_norm_weight,
        key_norm_weight=key_norm_weight,
        eps=eps,
        key_norm_position=key_norm_position,
        source_keys=source_keys,
        source_values=source_values,
        scaling=scaling,
        gate=gate,
    )


def _check_tables(query: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    if (cos is None) != (sin is None):
        raise ValueError(f"{'cos' if cos is None else 'sin'} is missing: there must be both tables or none.")
    batch, _, tokens, head_dim = query.shape
    for name, table in (("cos", cos), ("sin", sin)):
        if table is None:
            continue
        if table.ndim != 3 or table.shape[0] not in (1, batch) or table.shape[1:] != (tokens, head_dim):
            raise ValueError(
                f"{name} has shape {list(table.shape)}: must be [1 or {batch}, T, d] = [.., {tokens}, {head_dim}]."
            )
    if cos is not None and head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: a rotation pairs channels, so it must be even.")
