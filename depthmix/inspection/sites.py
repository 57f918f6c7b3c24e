# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
What all methods have in common for those who look inside: sites, where a layer mixes sources, and mixes themselves.

Base models are of any class here: the code of a saved model has classes of its own.

A method says in a module of its own, `sites_of_<method>`, which sites it has and how one of them is seen and changed
while a model runs. Everything else is written once, in terms of these.

Layers, blocks, loops and streams are counted from 0, as in the names of parameters.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthmix.modeling.decoder_layers import biased_attention, eager_attention


EMBEDDINGS, OWN, OUTPUT = "embeddings", "own", "output"


class NothingLeftError(ValueError):
    """The sources that are left at a site have no weight that could be scaled."""


@dataclass(frozen=True)
class Site:
    """
    A place of a model where sources are mixed.

    Args:
        target (`str`):
            What reads the mix: `"layer 3"`, `"layer 3 mlp"`, or `"output"` for the final norm.
        sources (`tuple` of `str`):
            What is mixed, oldest first: `"embeddings"`, `"layer 0"`, `"block 2"` and so on; `"own"` is what the target
            has made itself.
        number (`int`):
            Its place among all layers, or sub-layers, of the model, also of those that mix nothing.
    """

    target: str
    sources: tuple[str, ...]
    number: int


class Mix:
    """
    The sum that a site makes in one call: of each source its weight times its entry.

    Args:
        site (`Site`):
            The site.
        weights (`torch.Tensor` of shape `[B, H, T, N]`):
            A weight for each source, where H is the number of heads with weights of their own.
        entries (sequence of N `torch.Tensor` of shape `[B, H, T, d]`, or a function that makes it):
            What the weights multiply. A function is called only where entries are needed.
        scale (`float`, *optional*, defaults to 1):
            A factor of the whole sum.
        is_centred (`bool`, *optional*, defaults to `False`):
            Whether the sum has of each weight only what it has beyond the mean weight, `1 / N`.
    """

    def __init__(
        self,
        site: Site,
        weights: Tensor,
        entries: Sequence[Tensor] | Callable[[], Sequence[Tensor]],
        scale: float = 1.0,
        is_centred: bool = False,
    ):
        self.site, self.weights, self.scale = site, weights, scale
        self._entries = entries
        self._baseline = 1 / len(site.sources) if is_centred else 0.0
        self._removed: set[int] = set()
        self._replaced: dict[int, Tensor] = {}

    @property
    def is_changed(self) -> bool:
        """Whether the sum is no longer that of the model."""
        return bool(self._removed or self._replaced)

    @property
    def entries(self) -> Sequence[Tensor]:
        """What the weights multiply."""
        if callable(self._entries):
            self._entries = self._entries()
        return self._entries

    def contribution(self, source: int) -> Tensor:
        """What a source adds to the sum, `[B, H, T, d]`, in the dtype of the weights."""
        if source in self._replaced:
            return self._replaced[source]
        entry = self.entries[source].to(self.weights.dtype)
        if source in self._removed:
            return torch.zeros_like(entry)
        return (self.weights[..., source : source + 1] - self._baseline) * self.scale * entry

    def total(self) -> Tensor:
        """The sum, `[B, H, T, d]`."""
        return reduce(torch.add, (self.contribution(i) for i in range(len(self.site.sources))))

    def remove(self, sources: Collection[int], renormalise: bool) -> None:
        """
        Leaves sources out. With `renormalise` the weights of the others are scaled so that the sum of all is what it
        was, and their mean is that of the sources that are left.

        Raises:
            `NothingLeftError`: if the others have no weight that could be scaled.
        """
        total = self.weights.sum(-1, keepdim=True)
        kept = torch.tensor([i not in sources for i in range(len(self.site.sources))], device=self.weights.device)
        weights = torch.where(kept, self.weights, 0)
        if renormalise:
            rest = weights.sum(-1, keepdim=True)
            if not rest.all():
                names = ", ".join(self.site.sources[i] for i in sorted(sources))
                raise NothingLeftError(
                    f"renormalise=True: at {self.site.target} the sources besides {names} have no weight that could "
                    "be scaled. Use renormalise=False, or another target."
                )
            weights = weights * (total / rest)
            # of sources that were left out before, it is what is left of them
            self._baseline *= (len(kept) - len(self._removed)) / max(1, len(kept) - len(self._removed | {*sources}))
        self.weights = weights
        self._removed |= {*sources}
        for source in sources:
            self._replaced.pop(source, None)

    def replace(self, source: int, contribution: Tensor) -> None:
        """
        Lets a source add something else, a tensor of the shape of its contribution.

        Raises:
            `ValueError`: if it has another shape.
        """
        expected = self.contribution(source).shape
        if contribution.shape != expected:
            raise ValueError(
                f"The contribution of {self.site.sources[source]} to {self.site.target} has the shape "
                f"{list(contribution.shape)}, and must have {list(expected)}: as many rows, and tokens, as the call."
            )
        self._replaced[source] = contribution.to(self.weights)
        self._removed.discard(source)


# gets the place of a site in the list of all and its mix; returns the sum to go on with, None for the model's own
See = Callable[[int, Mix], Tensor | None]
# gets a site, the place of a source in it, and what the source adds to the hidden states
Keep = Callable[[Site, int, Tensor], None]


class MethodSites:
    """The sites of a method. A method derives a class from this one and names an object of it `SITES`."""

    def of(self, config: Any) -> tuple[Site, ...]:
        """The sites of a model with this configuration, in the order in which they run."""
        raise NotImplementedError

    def attach(self, decoder: Any, see: See, stack: ExitStack) -> None:
        """
        Lets `see` have each mix of a base model that runs, and lets the model go on with what it returns. What is done
        for that the stack undoes. The operations of the model are the reference ones by then.
        """
        raise NotImplementedError

    def splitter(self, decoder: Any, keep: Keep, stack: ExitStack) -> Callable[[int, Mix], None]:
        """
        A viewer that gives `keep`, for each source of each site, what the source alone adds to the hidden states,
        `[B, T, hidden]`. Here it is what it adds to the mix.
        """

        def split(place: int, mix: Mix) -> None:
            for i in range(len(mix.site.sources)):
                keep(mix.site, i, mix.contribution(i).squeeze(1))

        return split

    def ending(self, decoder: Any, keep: Callable[[int, Tensor], None], stack: ExitStack) -> None:
        """
        Gives `keep`, by the number of layers that have run, what the final norm would get `[B, T, hidden]` if the
        model ended after them.
        """
        count = 0

        def note(layer, args, output):
            nonlocal count
            count += 1
            keep(count, self.final_state(decoder, output[0] if isinstance(output, tuple) else output))

        def start(*_):
            nonlocal count
            count = 0

        stack.callback(decoder.register_forward_pre_hook(start).remove)
        for layer in decoder.layers:
            stack.callback(layer.register_forward_hook(note).remove)

    def final_state(self, decoder: Any, hidden_states: Tensor) -> Tensor:
        """What the final norm gets `[B, T, hidden]` of the hidden states that a layer returns."""
        return hidden_states


class ValueSites(MethodSites):
    """Sites that mix values. What a source adds to the hidden states is then what the attention makes of its part."""

    def values_of(self, attention: Any, contribution: Tensor) -> Tensor:
        """Values `[B, Hkv, T, d]` as the attention reads them, from what a source adds to the mix."""
        return contribution

    def splitter(self, decoder: Any, keep: Keep, stack: ExitStack) -> Callable[[int, Mix], None]:
        mixes: dict[int, Mix] = {}

        def split(place: int, mix: Mix) -> None:
            mixes[mix.site.number % len(decoder.layers)] = mix

        def attach(number: int, layer: Any) -> None:
            attention = layer.self_attn
            remember, options_of, project = attention.remember, attention.reading_options, attention.project_output
            # what the attention function of this call gets besides the query
            mask = keys = values = options = None

            def note_mask(_, args, kwargs):
                nonlocal mask
                mask = kwargs["attention_mask"]

            def note_keys_and_values(*args, **kwargs):
                nonlocal keys, values
                keys, values = remember(*args, **kwargs)
                return keys, values

            def note_options(kwargs):
                nonlocal options
                options = options_of(kwargs)
                return options

            def output_of(query, part):
                function = biased_attention
                if not isinstance(mask, CausalBias):
                    name = attention.config._attn_implementation
                    function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
                output, _ = function(attention, query, keys, part, mask, scaling=attention.scaling, **options)
                return project(output, query)

            def project_parts(attn_output, query):
                if (mix := mixes.pop(number, None)) is not None:
                    # a bias of the projection is no part of any
                    nothing = output_of(query, torch.zeros_like(values))
                    for i in range(len(mix.site.sources)):
                        part = self.values_of(attention, mix.contribution(i)).to(values.dtype)
                        keep(mix.site, i, after_attention(layer, output_of(query, part) - nothing))
                return project(attn_output, query)

            stack.callback(attention.register_forward_pre_hook(note_mask, with_kwargs=True).remove)
            override(attention, "remember", note_keys_and_values, stack)
            override(attention, "reading_options", note_options, stack)
            override(attention, "project_output", project_parts, stack)

        for number, layer in enumerate(decoder.layers):
            attach(number, layer)
        return split


def after_attention(layer: Any, output: Tensor) -> Tensor:
    """What the output of an attention adds to the hidden states: on some backbones a norm stands between the two."""
    return output if getattr(layer, "norms_sum", False) else layer.normalise(1, output)


def layer_names(config: Any) -> tuple[str, ...]:
    """The name of each layer of each loop."""
    loops = getattr(config, "num_loops", 1)
    return tuple(
        f"loop {loop}, layer {i}" if loops > 1 else f"layer {i}"
        for loop in range(loops)
        for i in range(config.num_hidden_layers)
    )


def sub_layer_name(number: int) -> str:
    """The name of a sub-layer, of which each layer has two."""
    return f"layer {number // 2} {'mlp' if number % 2 else 'attention'}"


def override(module: nn.Module, name: str, member: Any, stack: ExitStack) -> None:
    """Puts something in place of an attribute, or of a method, of one module, until the stack is closed."""
    members = vars(module)
    if name in members:
        stack.callback(members.__setitem__, name, members[name])
    else:
        stack.callback(members.pop, name)
    members[name] = member


def whole(parameter: Tensor) -> Tensor:
    """
    The values of a parameter, on every device also where it is sharded.

    Raises:
        `ValueError`: if they are elsewhere.
    """
    gather = getattr(parameter, "full_tensor", None)
    found: Tensor = parameter if gather is None else gather()
    if found.is_meta or not found.numel():
        raise ValueError(
            "A parameter of the mixing is offloaded or partitioned: the model must be whole to be looked into."
        )
    return found


def see_updates(decoder: Any, keep: Callable[[int, Tensor], None], stack: ExitStack) -> None:
    """
    Gives `keep` what each sub-layer adds to the hidden states, by its number, two for each layer: its output, after
    the norm that stands there on some backbones. The operations of the model are the reference ones by then.
    """

    def note(number: int, module: nn.Module) -> None:
        def hook(_, __, output):
            keep(number, output[0] if isinstance(output, tuple) else output)

        stack.callback(module.register_forward_hook(hook).remove)

    for i, layer in enumerate(decoder.layers):
        for k, module in enumerate((layer.self_attn, layer.mlp)):
            norm = layer.norm_at(2 * k + 1)
            # a norm over the sum of hidden states and update says nothing about the update
            note(2 * i + k, module if norm is None or getattr(layer, "norms_sum", False) else norm)
