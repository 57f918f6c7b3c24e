# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The sites of Depth-Attention: the attention of each layer that has source layers."""

from contextlib import ExitStack
from typing import Any

from depthmix.kernels import depth_value_mix, depth_value_weights

from .sites import OWN, Mix, See, Site, ValueSites, layer_names, override


class DepthAttentionSites(ValueSites):
    """
    Each layer with sources mixes values, those of the source layers, as these have mixed them, and its own, with
    weights for each key-value head. With a gate, its own weight holds what the gate keeps from the others.
    """

    def of(self, config: Any) -> tuple[Site, ...]:
        names = layer_names(config)
        return tuple(
            Site(names[step], (*(names[source] for source in sources), OWN), step)
            for step, sources in enumerate(config.depth_sources)
            if sources
        )

    def attach(self, decoder: Any, see: See, stack: ExitStack) -> None:
        sites = {site.number: (i, site) for i, site in enumerate(self.of(decoder.config))}
        for i, layer in enumerate(decoder.layers):
            self._attach_to(layer.self_attn, i, sites, see, stack)

    @staticmethod
    def _attach_to(
        attention: Any, layer_idx: int, sites: dict[int, tuple[int, Site]], see: See, stack: ExitStack
    ) -> None:
        step, finish = layer_idx, attention.finish

        def note_step(_, args, kwargs):
            nonlocal step
            slot = kwargs.get("cache_slot")
            step = layer_idx if slot is None else slot

        def finish_and_see(query, key, value, position_embeddings, source_keys=(), source_values=(), gate=None):
            query, key, value = finish(query, key, value, position_embeddings)
            if not source_keys:
                return query, key, value
            keys, values = [*source_keys, key], [*source_values, value]
            options = {"scaling": attention.scaling, "gate": gate}
            place, site = sites[step]
            mixed = see(place, Mix(site, depth_value_weights(query, keys, **options), values))
            if mixed is None:
                mixed = depth_value_mix(query, keys, values, **options, impl="reference")
            return query, key, mixed.to(value.dtype)

        stack.callback(attention.register_forward_pre_hook(note_step, with_kwargs=True).remove)
        override(attention, "finish", finish_and_see, stack)


SITES = DepthAttentionSites()
__all__ = ["SITES"]
