# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The sites of value residual learning: the attention of each layer but the first."""

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from .sites import OWN, Mix, See, Site, ValueSites, layer_names, whole


class ValueResidualSites(ValueSites):
    """Each layer but the first adds the first layer's value to its own, with two weights that are parameters."""

    def of(self, config: Any) -> tuple[Site, ...]:
        first, *others = layer_names(config)
        return tuple(Site(name, (first, OWN), i) for i, name in enumerate(others, start=1))

    def attach(self, decoder: Any, see: See, stack: ExitStack) -> None:
        for place, site in enumerate(self.of(decoder.config)):

            def look(value_mix, values, output, place=place, site=site):
                weights = whole(value_mix.weight).expand(output.shape[0], 1, output.shape[1], 2)
                mixed = see(place, Mix(site, weights, [value.unsqueeze(1) for value in values]))
                return None if mixed is None else mixed.squeeze(1).to(output.dtype)

            value_mix = decoder.layers[site.number].self_attn.value_mix
            stack.callback(value_mix.register_forward_hook(look).remove)

    def values_of(self, attention: Any, contribution: Tensor) -> Tensor:
        flat = contribution.squeeze(1)
        flat = flat if attention.clip is None else flat.clamp(-attention.clip, attention.clip)
        return flat.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)


SITES = ValueResidualSites()
__all__ = ["SITES"]
