# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The logit lens: what the head would predict after a layer or a loop, or from a source alone."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .sites import EMBEDDINGS, layer_names
from .watch import evaluation, run, viewing, watch


OVER = ("layers", "loops", "sources")


@dataclass(frozen=True)
class Lens:
    """
    Predictions from inside of a model.

    Args:
        labels (`tuple` of n `str`):
            From what: `"embeddings"`, `"layer 3"`, `"loop 1"`, or `"layer 0 in layer 3"` for a source of a target.
        logits (`torch.Tensor` of shape `[n, B, T, vocab]`):
            Logits of the next token.
    """

    labels: tuple[str, ...]
    logits: Tensor

    def __getitem__(self, label: str) -> Tensor:
        """The logits `[B, T, vocab]` of a label."""
        return self.logits[self.labels.index(label)]


def logit_lens(
    model: nn.Module, inputs: Mapping[str, Tensor], over: str = "layers", positions: Sequence[int] | None = None
) -> Lens:
    """
    What the final norm and the head predict from inside of a model, in one forward without gradients.

    Args:
        model (`nn.Module`):
            A model of this package with a language-model head, or what wraps one, such as a PEFT model.
        inputs (`dict`):
            A batch, as the model takes it.
        over (`str`, *optional*, defaults to `"layers"`):
            `"layers"`: from the embeddings and after each layer, as if the model ended there. The streams of mHC are
            read out for it, and sources of Attention Residuals mixed as for the final norm. `"loops"`: after each pass
            of a looped model. `"sources"`: from what each source alone adds to the mix of each site. Where values are
            mixed, that is what the attention makes of this part, by its weights over tokens, its output projection
            and the norm after it, if there is one.
        positions (sequence of `int`, *optional*):
            For which tokens, by their places; for all by default. All logits of a large model take much memory.

    Returns:
        [`Lens`].

    Raises:
        `TypeError`: if there is no model of this package in it, or the inputs have no names.
        `ValueError`: if it has no such head, if there is no such `over` or position, if the layers of the model run
            once and it is `"loops"`, or if the model mixes nothing and it is `"sources"`.
    """
    if over not in OVER:
        raise ValueError(f"over={over!r}: must be one of {', '.join(OVER)}.")
    states: dict[str, Tensor] = {}
    with evaluation(model), watch(model) as watched, ExitStack() as stack:
        decoder, method = watched.decoder, watched.method
        head = _head_of(model, decoder)
        loops, names = getattr(decoder.config, "num_loops", 1), layer_names(decoder.config)
        if over == "loops" and loops == 1:
            raise ValueError("over='loops': the layers of this model run once; use 'layers'.")
        if over == "sources" and not watched.sites:
            raise ValueError("over='sources': the model mixes nothing, with its configuration.")

        def take(state: Tensor) -> Tensor:
            tokens = state.shape[1]
            if positions is None:
                return state
            for position in positions:
                if not -tokens <= position < tokens:
                    raise ValueError(f"positions={list(positions)}: must be places of {tokens} tokens.")
            return state[:, list(positions)]

        def keep_state(count: int, state: Tensor) -> None:
            if over == "layers":
                states[names[count - 1]] = take(state)
            elif count % (len(names) // loops) == 0:
                states[f"loop {count * loops // len(names) - 1}"] = take(state)

        def keep_part(site: Any, source: int, state: Tensor) -> None:
            states[f"{site.sources[source]} in {site.target}"] = take(state)

        def keep_embeddings(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            if EMBEDDINGS not in states:
                states[EMBEDDINGS] = take(method.final_state(decoder, args[0]))

        if over == "sources":
            stack.enter_context(viewing(watched.readers, method.splitter(decoder, keep_part, stack)))
        else:
            method.ending(decoder, keep_state, stack)
        if over == "layers":
            stack.callback(decoder.layers[0].register_forward_pre_hook(keep_embeddings).remove)
        run(model, inputs)
        stack.close()
        logits = [head(decoder.norm(state.to(decoder.dtype))) for state in states.values()]
    return Lens(tuple(states), torch.stack([each.to(logits[-1].device) for each in logits]))


def _head_of(model: nn.Module, decoder: Any) -> nn.Module:
    for module in model.modules():
        if getattr(module, "model", None) is decoder and isinstance(
            head := getattr(module, "lm_head", None), nn.Module
        ):
            return head
    raise ValueError(f"model is a {type(model).__name__}: must have a language-model head.")
