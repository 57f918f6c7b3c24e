# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
What sources are good for: models that run without one of them, or with what it says of another prompt.

A weight says how much of a source is mixed, not whether anything depends on it. These say the latter.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.kernels.depth_precision import accumulation_dtype

from .measures import DepthMap, make_map, token_mask
from .sites import Mix, NothingLeftError, Site
from .watch import evaluation, run, viewing, watch


Names = str | Sequence[str]


@contextmanager
def ablated(
    model: nn.Module, source: Names, target: Names | None = None, renormalise: bool = False
) -> Iterator[nn.Module]:
    """
    The model without a source, as long as the context lasts: for forwards, generation and evaluations of any kind,
    also with gradients. What is within it runs with the reference operations, uncompiled. Contexts can be nested.

    Args:
        model (`nn.Module`):
            A model of this package, or what wraps one, such as a PEFT model.
        source (`str` or sequence of `str`):
            Names of sources, as [`depth_map`] has them.
        target (`str` or sequence of `str`, *optional*):
            Where it is left out; everywhere it is read, by default.
        renormalise (`bool`, *optional*, defaults to `False`):
            Whether the weights of the other sources are scaled so that their sum is what it was. Otherwise what the
            source adds is missing.

    Raises:
        `TypeError`: if there is no model of this package in it.
        `ValueError`: if there is no such source or target, or the source is not read there; in a forward, if other
            sources are to be scaled and have no weight.
        `RuntimeError`: in a forward, if layers would be computed again for their gradients (gradient checkpointing).

    ```python
    with inspection.ablated(model, "layer 0", target="layer 3"):
        loss = model(**inputs, labels=labels).loss
    ```
    """
    with watch(model) as watched:
        chosen = choose(watched.sites, source, target)

        def remove(place: int, mix: Mix) -> None:
            if place in chosen:
                mix.remove(chosen[place], renormalise)

        with viewing(watched.editors, remove):
            yield model


@contextmanager
def patched(
    model: nn.Module, other_inputs: Mapping[str, Tensor], source: Names, target: Names | None = None
) -> Iterator[nn.Module]:
    """
    The model with what a source adds in another prompt in place of what it adds itself, as long as the context lasts.
    The other prompt runs once, when the context begins; a forward within it must have as many rows and tokens.

    Args:
        model, source, target: as in [`ablated`].
        other_inputs (`dict`):
            The other prompt, as the model takes it.

    Raises:
        `TypeError`, `RuntimeError`: as [`ablated`].
        `ValueError`: if there is no such source or target, or the source is not read there; in a forward, if it has
            another number of rows or tokens.
    """
    contributions: dict[tuple[int, int], Tensor] = {}
    with watch(model) as watched:
        chosen = choose(watched.sites, source, target)

        def keep(place: int, mix: Mix) -> None:
            for i in chosen.get(place, ()):
                contributions[place, i] = mix.contribution(i)

        def replace(place: int, mix: Mix) -> None:
            for i in chosen.get(place, ()):
                mix.replace(i, contributions[place, i])

        with evaluation(model), viewing(watched.readers, keep):
            run(model, other_inputs)
        with viewing(watched.editors, replace):
            yield model


def ablate(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    source: Names,
    target: Names | None = None,
    renormalise: bool = False,
) -> Any:
    """
    The outputs of the model without a source: one forward in [`ablated`], in eval mode and without gradients.

    Args:
        inputs (`dict`):
            A batch, as the model takes it.
        model, source, target, renormalise: as in [`ablated`].

    Returns:
        What the model returns.

    Raises:
        What [`ablated`] raises.
    """
    with evaluation(model), ablated(model, source, target, renormalise):
        return run(model, inputs)


def patch(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    other_inputs: Mapping[str, Tensor],
    source: Names,
    target: Names | None = None,
) -> Any:
    """
    The outputs of the model with what a source adds in another prompt: one forward in [`patched`], in eval mode and
    without gradients.

    Args:
        inputs, other_inputs (`dict`):
            Two batches with as many rows and tokens, as the model takes them.
        model, source, target: as in [`ablated`].

    Returns:
        What the model returns.

    Raises:
        What [`patched`] raises.
    """
    with evaluation(model), patched(model, other_inputs, source, target):
        return run(model, inputs)


def importance_map(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    renormalise: bool = False,
    measure: Callable[[Any], float | Tensor] | None = None,
) -> DepthMap:
    """
    What each source is worth to each target: by how much a measure of the outputs changes where that target does
    without that source. It takes a forward for each of them.

    Args:
        model, inputs, renormalise: as in [`ablate`].
        measure (function, *optional*):
            A number from what the model returns. Left out, it is the mean loss of the next token, in nats, over those
            that are no padding.

    Returns:
        [`DepthMap`] `[targets, sources]` of differences, ablated less whole; nan where a target does not read a
        source, or with `renormalise` could not do without it.

    Raises:
        `ValueError`: if the model mixes nothing, or has no logits and no measure is given.
        What [`ablate`] raises.
    """
    if measure is None:

        def measure(output):
            return next_token_loss(output, inputs)

    with evaluation(model), watch(model) as watched:
        whole = float(measure(run(model, inputs)))
        rows = []
        for site in watched.sites:
            row = []
            for source in site.sources:
                try:
                    outputs = ablate(model, inputs, source, site.target, renormalise)
                    row.append(float(measure(outputs)) - whole)
                except NothingLeftError:
                    row.append(math.nan)
            rows.append(torch.tensor(row))
    return make_map(watched.sites, rows)


def next_token_loss(output: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """
    The mean loss of the next token, where neither it nor the one before is padding.

    Raises:
        `ValueError`: if there are no logits of all tokens, or no tokens.
    """
    ids, logits = inputs.get("input_ids"), getattr(output, "logits", None)
    if ids is None or logits is None or logits.shape[:-1] != ids.shape:
        raise ValueError(
            "The loss of the next token needs input_ids and a model with a language-model head: give a measure."
        )
    mask = token_mask(inputs, logits.unsqueeze(1))
    counts = mask[:, 1:] & mask[:, :-1]
    loss = nn.functional.cross_entropy(
        logits[:, :-1].to(accumulation_dtype(logits)).transpose(1, 2), ids[:, 1:].to(logits.device), reduction="none"
    )
    return (loss * counts).sum() / counts.sum().clamp(min=1)


def choose(sites: Sequence[Site], source: Names, target: Names | None) -> dict[int, set[int]]:
    """
    The places of sources in the sites that are meant, by the place of the site.

    Raises:
        `ValueError`: for a name that does not exist, or a source that no target that is meant reads.
    """
    sources = [source] if isinstance(source, str) else list(source)
    targets = [target] if isinstance(target, str) else target
    every_source = list(dict.fromkeys(name for site in sites for name in site.sources))
    for name, given, known in (
        ("source", sources, every_source),
        ("target", targets or (), [site.target for site in sites]),
    ):
        for each in given:
            if each not in known:
                names = ", ".join(known) or "none, since the model mixes nothing"
                raise ValueError(f"{name}={each!r}: must be one of {names}.")
    if not sources or (targets is not None and not targets):
        raise ValueError(f"source={source!r}, target={target!r}: must name at least one.")
    meant = [(place, site) for place, site in enumerate(sites) if targets is None or site.target in targets]
    for each in sources:
        if not any(each in site.sources for _, site in meant):
            raise ValueError(
                f"source={each!r}: is not read by {', '.join(site.target for _, site in meant)}, whose sources are "
                f"{', '.join(dict.fromkeys(name for _, site in meant for name in site.sources))}."
            )
    found = {place: {i for i, name in enumerate(site.sources) if name in sources} for place, site in meant}
    return {place: chosen for place, chosen in found.items() if chosen}
