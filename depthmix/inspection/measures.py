# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What a model does with its sources: depth weights and their maps, entropies, gates, and sizes of outputs."""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .sites import Mix, Site, layer_names, see_updates, whole
from .watch import evaluation, run, viewing, watch


PER = ("mean", "head", "token")


@dataclass(frozen=True)
class SiteWeights:
    """
    The weights of one site in one batch.

    Args:
        site (`Site`):
            The target and the names of its sources.
        weights (`torch.Tensor` of shape `[B, H, T, N]`):
            In fp32 (fp64 in a model of fp64); H is 1 where heads have no weights of their own, and N the number of
            sources.
        mask (`torch.Tensor` of shape `[B, T]`):
            Which tokens count in means: all but padding.
    """

    site: Site
    weights: Tensor
    mask: Tensor

    def mean(self) -> Tensor:
        """The mean weight of each source over tokens, for each head, `[H, N]`."""
        return _mean_over_tokens(self.weights, self.mask)

    def entropy(self) -> Tensor:
        """
        The entropy of the weights at each token, `[B, H, T]`, as a share of the largest that the number of sources
        allows: 1 is equal weights, 0 a single source. Where weights can be negative, or sum to anything, their sizes
        count, as shares of the sum of these.
        """
        shares = self.weights.abs()
        shares = shares / shares.sum(-1, keepdim=True).clamp(min=torch.finfo(shares.dtype).tiny)
        return torch.special.entr(shares).sum(-1) / math.log(max(2, shares.shape[-1]))

    def mean_entropy(self) -> float:
        """The entropy on average over tokens and heads."""
        return _mean_over_tokens(self.entropy().unsqueeze(-1), self.mask).mean().item()


@dataclass(frozen=True)
class DepthMap:
    """
    Numbers by target and source.

    Args:
        targets, sources (`tuple` of `str`):
            Names of the rows and of the columns.
        values (`torch.Tensor` of shape `[targets, ..., sources]`):
            The numbers; nan where a target does not read a source.
    """

    targets: tuple[str, ...]
    sources: tuple[str, ...]
    values: Tensor

    def __getitem__(self, names: tuple[str, str]) -> Tensor:
        """What the map has for a target and a source."""
        target, source = names
        return self.values[self.targets.index(target), ..., self.sources.index(source)]


def depth_weights(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[SiteWeights, ...]:
    """
    The weights by which each site of a model mixes its sources, in one forward without gradients.

    Args:
        model (`nn.Module`):
            A model of this package, or what wraps one, such as a PEFT model.
        inputs (`dict`):
            A batch, as the model takes it. Tokens that its `attention_mask` leaves out do not count in means.

    Returns:
        `tuple` of [`SiteWeights`], in the order in which sites run; empty if the model mixes nothing.

    Raises:
        `TypeError`: if there is no model of this package in it, or the inputs have no names.
        `ValueError`: if mixing parameters are offloaded or partitioned.
    """
    found: list[SiteWeights] = []

    def note(place: int, mix: Mix) -> None:
        # a copy: the memory of a sharded parameter is taken back after its layer
        found.append(SiteWeights(mix.site, mix.weights.detach().clone(), token_mask(inputs, mix.weights)))

    with evaluation(model), watch(model) as watched, viewing(watched.readers, note):
        run(model, inputs)
    return tuple(found)


def depth_map(model: nn.Module, inputs: Mapping[str, Tensor], per: str = "mean") -> DepthMap:
    """
    The depth weights as a map, target by source.

    Args:
        model, inputs: as in [`depth_weights`].
        per (`str`, *optional*, defaults to `"mean"`):
            `"mean"` is over tokens and heads, a map `[targets, sources]`; `"head"` over tokens, `[targets, H,
            sources]`; `"token"` over heads, `[targets, B, T, sources]`.

    Returns:
        [`DepthMap`] with nan where a target does not read a source.

    Raises:
        `ValueError`: if there is no such `per`, or the model mixes nothing.
        What [`depth_weights`] raises.
    """
    if per not in PER:
        raise ValueError(f"per={per!r}: must be one of {', '.join(PER)}.")
    rows = depth_weights(model, inputs)
    values = []
    for row in rows:
        if per == "token":
            values.append(row.weights.mean(1))
        else:
            values.append(row.mean() if per == "head" else row.mean().mean(0))
    return make_map([row.site for row in rows], values)


def source_entropy(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, float]:
    """
    How evenly each target uses its sources: [`SiteWeights.mean_entropy`] by target, of all with two sources or more.

    Args:
        model, inputs: as in [`depth_weights`].

    Returns:
        `dict` from names of targets to numbers between 0, a single source, and 1, all alike.

    Raises:
        What [`depth_weights`] raises.
    """
    rows = depth_weights(model, inputs)
    return {row.site.target: row.mean_entropy() for row in rows if len(row.site.sources) > 1}


def gates_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and values of each gate that is in use, also below an adapter."""
    for name, module in model.named_modules():
        # by the attribute, which gates of a saved model's own code have too
        if getattr(type(module), "is_gate", False) and not name.endswith("original_module"):
            yield name, module.weight


def gate_values(model: nn.Module) -> dict[str, Tensor]:
    """
    The gates of a model by the name of their layer: `"layer 3"` to a number for each head, `[H]`, fp32.

    Args:
        model (`nn.Module`):
            A model of this package, or what wraps one. Without gates there is nothing to return.

    Raises:
        `ValueError`: if gates are offloaded or partitioned.
    """
    found = {}
    for name, weight in gates_of(model):
        parts = name.split(".")
        found[f"layer {parts[parts.index('layers') + 1]}"] = whole(weight.detach()).float()
    return found


@dataclass(frozen=True)
class Magnitudes:
    """
    How large outputs are: root mean squares over tokens and channels.

    Args:
        layers (`tuple` of `str`):
            Names of the layers, of all loops.
        hidden_states (`torch.Tensor` of shape `[layers]`):
            Of what each layer returns: the residual stream, or what the method has in its place.
        attention, mlp (`torch.Tensor` of shape `[layers]`):
            Of what each sub-layer adds to that.
    """

    layers: tuple[str, ...]
    hidden_states: Tensor
    attention: Tensor
    mlp: Tensor


def output_magnitudes(model: nn.Module, inputs: Mapping[str, Tensor]) -> Magnitudes:
    """
    How large the hidden states after each layer are, and what its two sub-layers add. In a decoder that only adds, the
    first grows with depth, and what a late layer adds counts little beside it (the dilution that arXiv 2603.15031
    shows); a method that mixes can bound it.

    Args:
        model, inputs: as in [`depth_weights`].

    Returns:
        [`Magnitudes`].

    Raises:
        `TypeError`: if there is no model of this package in it, or the inputs have no names.
    """
    states: list[Tensor] = []
    updates: dict[int, list[Tensor]] = {0: [], 1: []}

    def size(tensor: Tensor) -> Tensor:
        squares = tensor.detach().float().square().flatten(2).mean(-1)
        mask = token_mask(inputs, squares.unsqueeze(1).unsqueeze(-1))
        return _mean_over_tokens(squares[:, None, :, None], mask).sqrt().reshape(()).cpu()

    def keep_state(layer, args, output):
        states.append(size(output[0] if isinstance(output, tuple) else output))

    with evaluation(model), watch(model) as watched, ExitStack() as stack:
        see_updates(watched.decoder, lambda number, update: updates[number % 2].append(size(update)), stack)
        for layer in watched.decoder.layers:
            stack.callback(layer.register_forward_hook(keep_state).remove)
        run(model, inputs)
    names = layer_names(watched.decoder.config)
    return Magnitudes(names, torch.stack(states), torch.stack(updates[0]), torch.stack(updates[1]))


def token_mask(inputs: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    """Which tokens count, `[B, T]`, of weights `[B, H, T, N]`: all that are no padding."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == (weights.shape[0], weights.shape[2]):
        return mask.to(weights.device).bool()
    return torch.ones(weights.shape[0], weights.shape[2], dtype=torch.bool, device=weights.device)


def _mean_over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of `[B, H, T, N]` over the tokens that count, `[H, N]`."""
    counted = mask[:, None, :, None].to(values.dtype)
    return (values * counted).sum((0, 2)) / counted.sum().clamp(min=1)


def make_map(sites: Sequence[Site], values: Sequence[Tensor]) -> DepthMap:
    """
    A map from what each site has for its sources, `[..., N]`.

    Raises:
        `ValueError`: if there are no sites.
    """
    if not sites:
        raise ValueError("The model mixes nothing, with its configuration: there is no map of its sources.")
    columns = _in_order([site.sources for site in sites])
    table = values[0].new_full((len(sites), *values[0].shape[:-1], len(columns)), math.nan)
    for row, site, numbers in zip(table, sites, values, strict=True):
        row[..., [columns.index(source) for source in site.sources]] = numbers
    return DepthMap(tuple(site.target for site in sites), columns, table.cpu())


def _in_order(lists: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """All names, in an order in which those of each list have theirs; where that is open, as they come first."""
    names = list(dict.fromkeys(name for each in lists for name in each))
    before: dict[str, set[str]] = {name: set() for name in names}
    for each in lists:
        for first, second in zip(each, each[1:], strict=False):
            before[second].add(first)
    ordered: list[str] = []
    ready = [i for i, name in enumerate(names) if not before[name]]
    while ready:
        name = names[heapq.heappop(ready)]
        ordered.append(name)
        for i, other in enumerate(names):
            if name in before[other]:
                before[other].remove(name)
                if not before[other]:
                    heapq.heappush(ready, i)
    return tuple(ordered)
