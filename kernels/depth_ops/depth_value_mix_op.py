# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The value mixing of Depth-Attention: public operations."""

from collections.abc import Sequence

from torch import Tensor

from .depth_checks import check_depth_entries, check_gate, default_scaling
from .depth_dispatch import Route, route
from .depth_value_mix_reference import depth_value_mix_reference, depth_value_weights_reference
from .norm_rotary_mix_triton import norm_rotary_mix_obstacle, run_norm_rotary_mix


def depth_value_mix(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    scaling: float | None = None,
    gate: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""
    Mixes the values of several layers at the same token, weighted by how well their keys answer this layer's query
    (Depth-Attention, arXiv 2606.05014).

    With \\(\bar q\\) the mean of the query heads that share a key-value head, and entry \\(N-1\\) the layer's own,

    $$u = \sum_{i} a_i v_i, \qquad a = \mathrm{softmax}_i(\mathrm{scaling} \cdot \bar q^\top k_i).$$

    Args:
        query (`torch.Tensor` of shape `[B, Hq, T, d]`):
            The layer's query, normalised and rotated. Query heads `j * g` to `j * g + g - 1` belong to key-value head
            `j`, where `g = Hq / Hkv`.
        keys (sequence of `torch.Tensor` of shape `[B, Hkv, T, d]`):
            Keys of the source layers, normalised and rotated, and last the layer's own. The order of the sources does
            not matter.
        values (sequence of `torch.Tensor` of shape `[B, Hkv, T, d]`):
            The values that belong to `keys`: those of the sources already mixed, the layer's own as projected.
        scaling (`float`, *optional*):
            Factor of the scores, `d ** -0.5` by default.
        gate (`torch.Tensor` of shape `[Hkv]`, *optional*):
            By how much the mix counts: with the gate \\(g\\) the result is \\(g u + (1 - g) v_{N-1}\\): for 0 the
            layer's own value and for 1 the whole mix, bit for bit. Other numbers, negative ones too, are as good.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"reference"` is pure PyTorch and runs anywhere. `"triton"` is one fused kernel, for fp16, bf16 and fp32 on
            a GPU and head dims up to 256, whose gradients cannot be differentiated again. `"auto"` is the kernel where
            it supports the tensors, else the reference.

    Returns:
        `torch.Tensor` of shape `[B, Hkv, T, d]` in the dtype of `values[-1]`, which may differ from that of the keys,
        as it does under autocast. Scores, softmax and sum are computed in fp32 (fp64 for fp64 inputs). With a single
        entry the result is `values[-1]` itself.

    Raises:
        `ValueError`: if shapes or the number of keys and values do not fit together, or `impl` is unknown.
        `RuntimeError`: if `impl="triton"` cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import depth_value_mix

        >>> query = torch.zeros(1, 4, 3, 8)  # of equal scores, so that the result is the mean
        >>> keys = [torch.randn(1, 2, 3, 8) for _ in range(3)]
        >>> values = [torch.full((1, 2, 3, 8), float(i)) for i in range(3)]
        >>> depth_value_mix(query, keys, values)[0, 0, 0, :4]
        tensor([1., 1., 1., 1.])
    """
    check_depth_entries(query, keys, values)
    check_gate(gate, keys[-1].shape[1])
    scaling = default_scaling(query, scaling)
    way = route(impl, "depth_value_mix", norm_rotary_mix_obstacle(query, keys, values, gate))
    if len(keys) == 1:
        return values[-1]
    if way is Route.KERNEL:
        parameters = None, None, gate, None, None
        (mixed,) = run_norm_rotary_mix(query, list(keys), list(values), *parameters, scaling, 0.0, True)
        return mixed
    return depth_value_mix_reference(query, keys, values, scaling=scaling, gate=gate)


def depth_value_weights(
    query: Tensor, keys: Sequence[Tensor], *, scaling: float | None = None, gate: Tensor | None = None
) -> Tensor:
    r"""
    The weights that [`depth_value_mix`] gives to its entries, for inspection.

    Args:
        query, keys, scaling, gate: as in [`depth_value_mix`].

    Returns:
        `torch.Tensor` of shape `[B, Hkv, T, N]`, fp32 (fp64 for fp64 inputs), the layer's own weight last; each row
        sums to one. With a gate they are \\(g a\\), and \\(g a + 1 - g\\) of the layer itself.

    Raises:
        `ValueError`: if the shapes do not fit together.

    Example:

        >>> import torch
        >>> from depthmix.kernels import depth_value_weights

        >>> keys = [torch.randn(1, 2, 3, 8) for _ in range(4)]
        >>> depth_value_weights(torch.zeros(1, 4, 3, 8), keys)[0, 0, 0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    check_depth_entries(query, keys, keys)
    check_gate(gate, keys[-1].shape[1])
    return depth_value_weights_reference(query, keys, scaling=default_scaling(query, scaling), gate=gate)
