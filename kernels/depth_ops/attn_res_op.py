# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Attention Residuals: public operations."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from .attn_res_reference import (
    attn_res_additive_reference,
    attn_res_phase_1_reference,
    attn_res_phase_2_reference,
    attn_res_reference,
    attn_res_weights_reference,
)
from .attn_res_triton import (
    MAX_SITES,
    RECOMPUTED_SOURCES,
    attn_res_obstacle,
    attn_res_phase_1_of_few,
    max_sources,
    run_attn_res,
    run_attn_res_phase_2,
)
from .depth_dispatch import Route, route
from .depth_precision import mix_dtype


SCALES = ("mean", "sum")


def attn_res(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    norm_weight: Tensor | None = None,
    *,
    eps: float,
    bias: Tensor | None = None,
    scale: str = "mean",
    output_norm_weight: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""
    Mixes the outputs of earlier sub-layers at the same token, weighted by how well they answer a learned query
    (Attention Residuals, arXiv 2603.15031, sections 3 and 4).

    With \\(R(v) = v / \sqrt{\mathrm{mean}(v^2) + \mathrm{eps}}\\), pseudo-query \\(w\\) and norm weight \\(g\\),

    $$h = \sum_i a_i v_i, \qquad a = \mathrm{softmax}_i\bigl((w \odot g)^\top R(v_i)\bigr).$$

    Args:
        sources (sequence of `torch.Tensor` of shape `[..., d]`):
            All of one shape; nothing is stacked.
        pseudo_query (`torch.Tensor` of shape `[d]`):
            The learned query of this site.
        norm_weight (`torch.Tensor` of shape `[d]`, *optional*):
            Gain of the RMS norm of the keys; one where it is left out.
        eps (`float`):
            Epsilon of both norms.
        bias (`torch.Tensor` of one element, *optional*):
            Added to the logit of the last source.
        scale (`str`, *optional*, defaults to `"mean"`):
            `"sum"` multiplies the result by the number of sources, so that equal weights give their plain sum.
        output_norm_weight (`torch.Tensor` of shape `[d]`, *optional*):
            If given, the result is RMS-normalised and multiplied by it, as the norm before the next sub-layer would.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"reference"` is pure PyTorch and runs anywhere. `"triton"` is one fused kernel, for fp16, bf16 and fp32 on
            a GPU, whose gradients cannot be differentiated again. `"auto"` is the kernel where it supports the
            tensors, else the reference.

    Returns:
        `torch.Tensor` of shape `[..., d]` in the dtype of the sum of the sources. Logits, softmax, sum and norm are
        computed in fp32 (fp64 for fp64 inputs). With a single source and no norm it is that source itself.

    Raises:
        `ValueError`: if shapes do not fit together, or `scale` or `impl` is unknown.
        `RuntimeError`: if `impl="triton"` cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import attn_res

        >>> sources = [torch.full((2, 8), 1.0), torch.full((2, 8), 3.0)]
        >>> attn_res(sources, torch.zeros(8), eps=1e-6)[0, :4]  # a query of zeros gives the mean
        tensor([2., 2., 2., 2.])
    """
    _check_sources(sources)
    _check_site(sources[-1], pseudo_query, norm_weight, bias, output_norm_weight)
    _check_scale(scale)
    parameters = (pseudo_query, norm_weight, bias, output_norm_weight)
    way = route(impl, "attn_res", attn_res_obstacle(*sources, *parameters))
    if len(sources) == 1 and output_norm_weight is None:
        return sources[0]
    if way is not Route.KERNEL:
        return attn_res_reference(
            sources,
            pseudo_query,
            norm_weight,
            eps=eps,
            bias=bias,
            scale=scale,
            output_norm_weight=output_norm_weight,
        )
    *finished, last = _with_one_dtype(sources)
    factor = len(sources) if scale == "sum" else 1
    if len(sources) <= max_sources(last.shape[-1]):
        return run_attn_res([*finished, last], *parameters, eps, factor)[0]
    gains = [] if norm_weight is None else [norm_weight]
    (output,), (log_sum_exp,), _ = _phase_1_in_groups(finished, [pseudo_query], gains, eps)
    return run_attn_res_phase_2(output, log_sum_exp, last, None, *parameters, [], eps, factor)[0]


def attn_res_additive(
    stream: Tensor,
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    norm_weight: Tensor | None = None,
    *,
    eps: float,
    bias: Tensor | None = None,
    scale: str = "mean",
    impl: str = "auto",
) -> Tensor:
    r"""
    Adds to the residual stream what the mix of the sources has beyond their mean: additive routing, after
    arXiv 2605.18855, but without its constant part, so that a query of zeros adds nothing, whatever the sources are:

    $$h = x + c \sum_i \bigl(a_i - \tfrac 1N\bigr) v_i.$$

    Args:
        stream (`torch.Tensor` of shape `[..., d]`):
            The residual stream \\(x\\).
        sources, pseudo_query, norm_weight, eps, bias, impl: as in [`attn_res`].
        scale (`str`, *optional*, defaults to `"mean"`):
            With `"mean"` \\(c\\) is 1, with `"sum"` the number of sources; if they add up to the stream, the result is
            then that of [`attn_res`] with `"sum"`.

    Returns:
        `torch.Tensor` of shape `[..., d]` in the dtype of the stream, to the last bit the stream itself if query and
        bias are zero. With kernels the mix and the mean are each rounded to the dtype of the sources.

    Raises:
        `ValueError`: if shapes do not fit together, or `scale` or `impl` is unknown.
        `RuntimeError`: if `impl="triton"` cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import attn_res_additive

        >>> stream, sources = torch.randn(2, 8), [torch.randn(2, 8) for _ in range(3)]
        >>> attn_res_additive(stream, sources, torch.zeros(8), eps=1e-6).equal(stream)
        True
    """
    _check_sources(sources)
    _check_shapes({"stream": stream} | {f"sources[{i}]": source for i, source in enumerate(sources)})
    _check_site(sources[-1], pseudo_query, norm_weight, bias, None)
    _check_scale(scale)
    way = route(impl, "attn_res_additive", attn_res_obstacle(*sources, pseudo_query, norm_weight, bias, None))
    options: dict[str, Any] = {"eps": eps, "scale": scale}
    if way is not Route.KERNEL:
        return attn_res_additive_reference(stream, sources, pseudo_query, norm_weight, bias=bias, **options)
    # by the same kernel, so that its difference from the mix is zero where the weights are equal
    equal, no_gain, no_bias = (
        torch.zeros_like(pseudo_query),
        *(None if each is None else torch.zeros_like(each) for each in (norm_weight, bias)),
    )
    mix = attn_res(sources, pseudo_query, norm_weight, bias=bias, **options, impl=impl)
    mean = attn_res(sources, equal, no_gain, bias=no_bias, **options, impl=impl)
    return (stream + (mix - mean)).to(stream.dtype)


def attn_res_weights(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    norm_weight: Tensor | None = None,
    *,
    eps: float,
    bias: Tensor | None = None,
) -> Tensor:
    """
    The weights `a` that [`attn_res`] gives to its sources, for inspection.

    Args:
        sources, pseudo_query, norm_weight, eps, bias: as in [`attn_res`].

    Returns:
        `torch.Tensor` of shape `[..., N]`, fp32 (fp64 for fp64 inputs); each row sums to one.

    Raises:
        `ValueError`: if the shapes do not fit together.

    Example:

        >>> import torch
        >>> from depthmix.kernels import attn_res_weights

        >>> attn_res_weights([torch.randn(2, 8), torch.randn(2, 8)], torch.zeros(8), eps=1e-6)[0]
        tensor([0.5000, 0.5000])
    """
    _check_sources(sources)
    _check_site(sources[-1], pseudo_query, norm_weight, bias, None)
    return attn_res_weights_reference(sources, pseudo_query, norm_weight, eps=eps, bias=bias)


def attn_res_phase_1(
    sources: Sequence[Tensor],
    pseudo_queries: Sequence[Tensor],
    norm_weights: Sequence[Tensor] | None = None,
    *,
    eps: float,
    impl: str = "auto",
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """
    Mixes the finished blocks for all sites of the next block at once, which is possible because the queries do not
    depend on the hidden state (phase 1 of algorithm 1 of the paper). [`attn_res_phase_2`] adds the running sum.

    Args:
        sources (sequence of `torch.Tensor` of shape `[..., d]`):
            The finished blocks.
        pseudo_queries (sequence of `torch.Tensor` of shape `[d]`):
            One for each site.
        norm_weights (sequence of `torch.Tensor` of shape `[d]`, *optional*):
            The gains of the sites' key norms.
        eps, impl: as in [`attn_res`].

    Returns:
        For each site, the mix, of shape `[..., d]` in the dtype of the sum of the sources, and the log-sum-exp of the
        logits, of shape `[...]` in fp32 (fp64 for fp64 inputs); then the sources. Whoever uses these from here on
        spares the backward additions of their gradients.

    Raises:
        `ValueError`: if shapes or numbers do not fit together, or `impl` is unknown.
        `RuntimeError`: if `impl="triton"` cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import attn_res_phase_1

        >>> blocks, queries = [torch.randn(5, 8), torch.randn(5, 8)], [torch.randn(8) for _ in range(3)]
        >>> outputs, log_sum_exps, blocks = attn_res_phase_1(blocks, queries, eps=1e-6)
        >>> len(outputs), outputs[0].shape, log_sum_exps[0].shape
        (3, torch.Size([5, 8]), torch.Size([5]))
    """
    _check_sources(sources)
    if not pseudo_queries or (norm_weights is not None and len(norm_weights) != len(pseudo_queries)):
        raise ValueError(
            f"{len(pseudo_queries)} pseudo_queries and {'no' if norm_weights is None else len(norm_weights)} "
            "norm_weights: there must be one of each per site, and at least one site."
        )
    for site, pseudo_query in enumerate(pseudo_queries):
        _check_site(sources[-1], pseudo_query, None if norm_weights is None else norm_weights[site], None, None, site)
    gains = [] if norm_weights is None else list(norm_weights)
    obstacle = attn_res_obstacle(*sources, *pseudo_queries, *gains)
    if route(impl, "attn_res_phase_1", obstacle) is not Route.KERNEL:
        return *attn_res_phase_1_reference(sources, pseudo_queries, norm_weights, eps=eps), list(sources)
    sources, outputs, log_sum_exps = _with_one_dtype(sources), [], []
    for first in range(0, len(pseudo_queries), MAX_SITES):
        sites = slice(first, first + MAX_SITES)
        *group, sources = _phase_1_in_groups(sources, list(pseudo_queries[sites]), gains[sites], eps)
        outputs += group[0]
        log_sum_exps += group[1]
    return outputs, log_sum_exps, sources


def attn_res_phase_2(
    output: Tensor,
    log_sum_exp: Tensor,
    partial: Tensor | None,
    update: Tensor | None,
    pseudo_query: Tensor,
    norm_weight: Tensor | None = None,
    *,
    eps: float,
    bias: Tensor | None = None,
    num_sources: int,
    scale: str = "mean",
    output_norm_weight: Tensor | None = None,
    sources: Sequence[Tensor] | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """
    Adds the output of the last sub-layer to the running sum of the block, and mixes the sum with the finished blocks
    (phase 2 of algorithm 1 of the paper): together with [`attn_res_phase_1`] it is
    `attn_res([*sources, partial + update], ...)`.

    Args:
        output (`torch.Tensor` of shape `[..., d]`), log_sum_exp (`torch.Tensor` of shape `[...]`):
            What phase 1 gave for this site.
        partial, update (`torch.Tensor` of shape `[..., d]`, or `None`):
            The running sum and what is to be added to it. Either may be `None`, then the other is the sum.
        pseudo_query, norm_weight, eps, bias, scale, output_norm_weight, impl: as in [`attn_res`].
        num_sources (`int`):
            The number of sources of the site, the running sum included; the factor of `scale="sum"`.
        sources (sequence of `torch.Tensor` of shape `[..., d]`, *optional*):
            The sources that phase 1 mixed. If there are at most four, the kernel keeps them for the backward instead
            of `output`, and computes that again: nearly as fast, and no memory besides the sources themselves.

    Returns:
        The new running sum, in the dtype of `partial + update`, and the mix, in the dtype of `output + partial`; both
        of shape `[..., d]`. Where there is nothing to add, the former is the tensor that was given, or a view of it:
        whoever uses it from here on spares the backward an addition.

    Raises:
        `ValueError`: if shapes do not fit together, or `scale` or `impl` is unknown.
        `RuntimeError`: if `impl="triton"` cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import attn_res, attn_res_phase_1, attn_res_phase_2

        >>> blocks, query = [torch.randn(5, 8), torch.randn(5, 8)], torch.randn(8)
        >>> (output,), (log_sum_exp,), blocks = attn_res_phase_1(blocks, [query], eps=1e-6)
        >>> partial, update = torch.randn(5, 8), torch.randn(5, 8)
        >>> partial, mixed = attn_res_phase_2(output, log_sum_exp, partial, update, query, eps=1e-6, num_sources=3)
        >>> mixed.allclose(attn_res([*blocks, partial], query, eps=1e-6), atol=1e-5)
        True
    """
    named = {"output": output, "partial": partial, "update": update}
    if partial is None:
        if update is None:
            raise ValueError("partial and update are both None: there must be a sum to mix.")
        partial, update = update, None
    _check_shapes({name: tensor for name, tensor in named.items() if tensor is not None})
    if log_sum_exp.shape != output.shape[:-1]:
        raise ValueError(
            f"log_sum_exp has shape {list(log_sum_exp.shape)}: must be {list(output.shape[:-1])} for an output of "
            f"shape {list(output.shape)}."
        )
    _check_site(output, pseudo_query, norm_weight, bias, output_norm_weight)
    _check_scale(scale)
    if sources is not None:
        _check_shapes({"output": output} | {f"sources[{i}]": source for i, source in enumerate(sources)})
    factor = num_sources if scale == "sum" else 1
    parameters = (pseudo_query, norm_weight, bias, output_norm_weight)
    obstacle = attn_res_obstacle(output, partial, update, log_sum_exp, *parameters)
    if route(impl, "attn_res_phase_2", obstacle, output) is Route.KERNEL:
        return _phase_2(output, log_sum_exp, partial, update, parameters, sources, eps, factor)
    if update is not None:
        partial = partial + update
    mixed = attn_res_phase_2_reference(
        output,
        log_sum_exp,
        partial,
        pseudo_query,
        norm_weight,
        eps=eps,
        bias=bias,
        factor=factor,
        output_norm_weight=output_norm_weight,
    )
    return partial, mixed


def _with_one_dtype(tensors: Sequence[Tensor]) -> list[Tensor]:
    dtype = mix_dtype(*tensors)
    return [tensor.to(dtype) for tensor in tensors]


def _phase_1_in_groups(
    sources: list[Tensor], pseudo_queries: list[Tensor], norm_weights: list[Tensor], eps: float
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Phase 1 of any number of sources: mixes of groups, mixed by their log-sum-exps."""
    sites, group_size = len(pseudo_queries), max_sources(sources[0].shape[-1])
    groups, handed_on = [], []
    for first in range(0, len(sources), group_size):
        group = sources[first : first + group_size]
        *mixes, group = attn_res_phase_1_of_few(group, pseudo_queries, norm_weights, eps)
        groups.append(mixes)
        handed_on += group
    if len(groups) == 1:
        outputs, log_sum_exps = groups[0]
        return outputs, log_sum_exps, handed_on
    outputs, log_sum_exps = [], []
    for site in range(sites):
        logits = torch.stack([group[1][site] for group in groups], dim=-1)
        weights = logits.softmax(-1)
        output = reduce(torch.add, (weights[..., i : i + 1] * group[0][site] for i, group in enumerate(groups)))
        outputs.append(output.to(sources[0].dtype))
        log_sum_exps.append(logits.logsumexp(-1))
    return outputs, log_sum_exps, handed_on


def _phase_2(output, log_sum_exp, partial, update, parameters, sources, eps, factor) -> tuple[Tensor, Tensor]:
    """Phase 2 with the kernel, for which all tensors are brought to one dtype."""
    if update is not None and partial.dtype is not update.dtype:
        partial, update = _with_one_dtype([partial, update])
    if output.dtype is not partial.dtype:
        # The sum is rounded to its own dtype before it is brought to that of the mix.
        new_partial = partial if update is None else partial + update
        output, partial = _with_one_dtype([output, new_partial])
        update = None
    else:
        new_partial = None
    few = min(RECOMPUTED_SOURCES, max_sources(output.shape[-1]))
    kept = [] if sources is None or len(sources) > few else list(sources)
    outputs = run_attn_res_phase_2(
        *(output, log_sum_exp, partial, update, *parameters),
        *([source.to(output.dtype) for source in kept], eps, factor),
    )
    if update is not None:
        return outputs[0], outputs[1]
    return outputs[-1] if new_partial is None else new_partial, outputs[0]


def _check_scale(scale: str) -> None:
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r}: must be one of {', '.join(SCALES)}.")


def _check_sources(sources: Sequence[Tensor]) -> None:
    if not sources:
        raise ValueError("sources is empty: there must be at least one.")
    _check_shapes({f"sources[{i}]": source for i, source in enumerate(sources)})


def _check_shapes(tensors: dict[str, Tensor]) -> None:
    (first, expected), *rest = ((name, tensor.shape) for name, tensor in tensors.items())
    if not expected:
        raise ValueError(f"{first} has shape []: must be [..., d].")
    for name, shape in rest:
        if shape != expected:
            raise ValueError(f"{name} has shape {list(shape)}: must be that of {first}, {list(expected)}.")


def _check_site(
    source: Tensor,
    pseudo_query: Tensor,
    norm_weight: Tensor | None,
    bias: Tensor | None,
    output_norm_weight: Tensor | None,
    site: int | None = None,
) -> None:
    parameters = {
        "pseudo_query" if site is None else f"pseudo_queries[{site}]": pseudo_query,
        "norm_weight" if site is None else f"norm_weights[{site}]": norm_weight,
        "output_norm_weight": output_norm_weight,
    }
    for name, parameter in parameters.items():
        if parameter is not None and parameter.shape != source.shape[-1:]:
            raise ValueError(
                f"{name} has shape {list(parameter.shape)}: must be [d] = [{source.shape[-1]}] for sources of shape "
                f"{list(source.shape)}."
            )
    if bias is not None and bias.numel() != 1:
        raise ValueError(f"bias has shape {list(bias.shape)}: must be a single number.")
