# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Mixture-of-Depths Attention: public operations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .depth_checks import check_gate, check_heads, default_scaling
from .depth_dispatch import Route, plain_tensor_obstacle, route
from .depth_precision import autocast_dtype
from .moda_attention_joint import run_moda_attention
from .moda_attention_reference import moda_attention_reference, moda_attention_weights_reference
from .moda_attention_triton import decodes, moda_attention_obstacle
from .typed_operations import needs_grad


def moda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    depth_keys: Tensor,
    depth_values: Tensor,
    *,
    depth_query: Tensor | None = None,
    scaling: float | None = None,
    attention_mask: Tensor | None = None,
    is_causal: bool = True,
    gate: Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""
    Attention whose softmax has further columns: for each token, the depth slots, which earlier layers made of the same
    token (Mixture-of-Depths Attention, arXiv 2603.15619, equation 2). With query head \\(h\\) of token \\(t\\), its
    key-value head \\(c = \lfloor h / g \rfloor\\) and one normaliser over both parts,

    $$o_{th} = \sum_u p_u v_{uc} + \sum_j p_j v^d_{jtc}, \qquad p = \mathrm{softmax}\bigl([s\, q_{th}^\top k_{uc}]_u,
    [s\, q_{th}^\top k^d_{jtc}]_j\bigr).$$

    Args:
        query (`torch.Tensor` of shape `[B, Hq, T, d]`):
            Query heads `j * g` to `j * g + g - 1` belong to key-value head `j`, where `g = Hq / Hkv`.
        key, value (`torch.Tensor` of shape `[B, Hkv, S, d]`):
            Keys and values of the whole sequence, of which the tokens of the query are the last.
        depth_keys, depth_values (`torch.Tensor` of shape `[n, B, T, Hkv, d]`):
            The slots. There may be none.
        depth_query (`torch.Tensor` of shape `[B, Hq, T, d]`, *optional*):
            The query that the slots see, if it is another one.
        scaling (`float`, *optional*):
            Factor of all scores, `d ** -0.5` by default.
        attention_mask (`torch.Tensor` of shape `[B or 1, Hq or 1, T, S]`, *optional*):
            Booleans, true where a token sees another, or numbers that are added to the scores of the sequence. Slots
            are always seen.
        is_causal (`bool`, *optional*, defaults to `True`):
            Without `attention_mask`, whether a token sees of the sequence only itself and what comes before. A mask
            says all by itself.
        gate (`torch.Tensor` of shape `[Hq]`, *optional*):
            How much of this attention counts beside the one without slots: the result is \\(g\\) times the former and
            \\(1 - g\\) times the latter, for gates of 0 and 1 exactly one of them. Without slots it has no effect.
        return_lse (`bool`, *optional*, defaults to `False`):
            Whether to return the log-sum-exp besides.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"reference"` is pure PyTorch, holds all scores, and can be differentiated twice, which the others refuse.
            `"triton"` is PyTorch's fastest attention for the case with a fused kernel for the slots, and raises where
            that cannot run. `"auto"` is `"triton"` where that supports the tensors, and elsewhere the same with the
            slots in PyTorch.

    Returns:
        `torch.Tensor` of shape `[B, Hq, T, d]` in the dtype of the query. A row that sees nothing of the sequence is
        the mix of its slots, or zero if there are none. With `return_lse` also the natural logarithm of the sum of the
        exponentials of all scores, of shape `[B, Hq, T]` in fp32 (fp64 for fp64 inputs); it carries no gradient, and a
        gate does not change it.
        Scores, softmax and sums are in fp32. Under autocast the tensors are brought to its dtype first, as by
        `scaled_dot_product_attention`.

    Raises:
        `ValueError`: if shapes, dtypes or devices do not fit together, or `impl` is unknown.
        `RuntimeError`: if `impl="triton"` cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import moda_attention

        >>> query = torch.zeros(1, 4, 1, 8)  # equal scores for the three tokens of the sequence and the slot
        >>> key = value = torch.ones(1, 2, 3, 8)
        >>> slots = torch.full((1, 1, 1, 2, 8), 5.0)
        >>> moda_attention(query, key, value, slots, slots)[0, 0, 0, :4]
        tensor([2., 2., 2., 2.])
    """
    return attend(
        *(query, key, value, [depth_keys], [depth_values], depth_query, scaling),
        *(attention_mask, is_causal, gate, return_lse, impl),
    )


def moda_attention_weights(
    query: Tensor,
    key: Tensor,
    depth_keys: Tensor,
    *,
    depth_query: Tensor | None = None,
    scaling: float | None = None,
    attention_mask: Tensor | None = None,
    is_causal: bool = True,
    gate: Tensor | None = None,
) -> Tensor:
    """
    The weights of [`moda_attention`], for inspection.

    Args:
        query, key, depth_keys, depth_query, scaling, attention_mask, is_causal, gate: as in [`moda_attention`].

    Returns:
        `torch.Tensor` of shape `[B, Hq, T, S + n]`, fp32 (fp64 for fp64 inputs): the sequence, then the slots. Each
        row sums to one, or to zero if it sees nothing.

    Raises:
        `ValueError`: if the shapes do not fit together.

    Example:

        >>> import torch
        >>> from depthmix.kernels import moda_attention_weights

        >>> query, key, slots = torch.zeros(1, 4, 1, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 1, 1, 2, 8)
        >>> moda_attention_weights(query, key, slots)[0, 0, 0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    query, key, _, (depth_keys,), _, depth_query = check_attention(
        query, key, key, [depth_keys], [depth_keys], depth_query, attention_mask, is_causal
    )
    check_gate(gate, query.shape[1])
    weights, _ = moda_attention_weights_reference(
        *(query, key, depth_keys),
        depth_query=depth_query,
        scaling=default_scaling(query, scaling),
        attention_mask=attention_mask,
        is_causal=is_causal,
        gate=gate,
    )
    return weights


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    depth_keys: Sequence[Tensor],
    depth_values: Sequence[Tensor],
    depth_query: Tensor | None,
    scaling: float | None,
    attention_mask: Tensor | None,
    is_causal: bool,
    gate: Tensor | None,
    return_lse: bool,
    impl: str,
) -> Tensor | tuple[Tensor, Tensor]:
    """`moda_attention` with slots `[n, B, T, Hkv, d]` in several tensors, each for some of them."""
    query, key, value, depth_keys, depth_values, depth_query = check_attention(
        query, key, value, depth_keys, depth_values, depth_query, attention_mask, is_causal
    )
    check_gate(gate, query.shape[1])
    gate = gate if depth_keys else None
    scaling = default_scaling(query, scaling)
    inputs = (query, key, value, depth_keys, depth_values, depth_query, attention_mask, gate)
    implementation = choose(inputs, needs_grad(inputs), impl)
    if implementation == "reference":
        empty = query.new_empty((0, query.shape[0], query.shape[2], key.shape[1], query.shape[3]))
        output, log_sum_exp = moda_attention_reference(
            *(query, key, value),
            *(torch.cat(list(slots)) if slots else empty for slots in (depth_keys, depth_values)),
            depth_query=depth_query,
            scaling=scaling,
            attention_mask=attention_mask,
            is_causal=is_causal,
            gate=gate,
        )
    else:
        output, log_sum_exp, *_ = run_moda_attention(*inputs, scaling, is_causal, implementation)
    return (output, log_sum_exp) if return_lse else output


def choose(inputs: tuple, trained: bool, impl: str) -> str:
    """
    Who works on query, key, value, depth keys, depth values, depth query, mask and gate. "triton" or "torch" works on
    the slots, and one of PyTorch's kernels on the sequence; "decode" is a kernel that does both, if nothing is
    `trained`; "reference" is the pure PyTorch of both.
    """
    query, key, value, depth_keys, depth_values, depth_query, attention_mask, gate = inputs
    tensors = [query, key, value, *depth_keys, *depth_values, depth_query, gate]
    obstacle = plain_tensor_obstacle([*tensors, attention_mask])
    if needs_grad([attention_mask]):
        obstacle = "gives attention_mask no gradient"
    elif obstacle is None and query.device.type not in ("cpu", "cuda"):
        obstacle = f"needs a GPU, and the tensors are on {query.device}"
    way = route(impl, "moda_attention", obstacle or moda_attention_obstacle(*tensors))
    if impl == "reference" or obstacle is not None:
        return "reference"
    if way is not Route.KERNEL:
        return "torch"
    return "decode" if not trained and decodes(query, key) else "triton"


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    depth_keys: Sequence[Tensor],
    depth_values: Sequence[Tensor],
    depth_query: Tensor | None,
    attention_mask: Tensor | None,
    is_causal: bool,
) -> tuple:
    """
    All tensors but the mask, in autocast's dtype if it is on, and without slots of which there are none.

    Raises:
        `ValueError`: if shapes, dtypes or devices do not fit together.
    """
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(
            f"query has shape {list(query.shape)}, key {list(key.shape)}: must be [B, Hq, T, d] and [B, Hkv, S, d]."
        )
    batch, heads, tokens, head_dim = query.shape
    kv_heads, length = key.shape[1:3]
    check_heads(heads, kv_heads)
    sequence, slot = (batch, kv_heads, length, head_dim), (batch, tokens, kv_heads, head_dim)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape != sequence:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: must be [B, Hkv, S, d] = {list(sequence)} for a query of "
                f"shape {list(query.shape)}."
            )
    if len(depth_keys) != len(depth_values):
        raise ValueError(f"{len(depth_keys)} depth_keys and {len(depth_values)} depth_values: must be as many.")
    for name, tensors in (("depth_keys", depth_keys), ("depth_values", depth_values)):
        for tensor, other in zip(tensors, depth_keys, strict=True):
            if tensor.ndim != 5 or tensor.shape[0] != other.shape[0] or tensor.shape[1:] != slot:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}: must be [n, B, T, Hkv, d] = "
                    f"[n, {', '.join(map(str, slot))}], with one n for keys and values."
                )
    if depth_query is not None and depth_query.shape != query.shape:
        raise ValueError(
            f"depth_query has shape {list(depth_query.shape)}: must be that of query, {list(query.shape)}."
        )
    _check_mask(attention_mask, batch, heads, tokens, length)
    if attention_mask is None and is_causal and tokens > length:
        raise ValueError(f"{tokens} tokens are the last of a sequence of {length}: is_causal needs T <= S.")
    tensors = [query, key, value, *depth_keys, *depth_values]
    tensors += [] if depth_query is None else [depth_query]
    if (dtype := autocast_dtype(query)) is not None:
        tensors = [tensor.to(dtype) for tensor in tensors]
    query, key, value = tensors[:3]
    if any(tensor.dtype is not query.dtype for tensor in tensors):
        names = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
        raise ValueError(f"query, key, value and slots have the dtypes {names}: must be of one.")
    depth_query = None if depth_query is None else tensors[-1]
    end = 3 + len(depth_keys)
    keys, values = tensors[3:end], tensors[end : end + len(depth_values)]
    return query, key, value, *([x for x in group if x.shape[0]] for group in (keys, values)), depth_query


def _check_mask(attention_mask: Tensor | None, batch: int, heads: int, tokens: int, length: int) -> None:
    if attention_mask is None:
        return
    shape = attention_mask.shape
    if (
        attention_mask.ndim != 4
        or shape[0] not in (1, batch)
        or shape[1] not in (1, heads)
        or shape[2:] != (tokens, length)
    ):
        raise ValueError(
            f"attention_mask has shape {list(shape)}: must be [1 or {batch}, 1 or {heads}, T, S] = "
            f"[.., .., {tokens}, {length}]."
        )
    if attention_mask.dtype is not torch.bool and not attention_mask.is_floating_point():
        raise ValueError(f"attention_mask has dtype {attention_mask.dtype}: must be bool or floating point.")
