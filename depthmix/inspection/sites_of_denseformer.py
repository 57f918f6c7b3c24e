# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The sites of DenseFormer: the average after a layer."""

from contextlib import ExitStack
from typing import Any

from .sites import EMBEDDINGS, MethodSites, Mix, See, Site, layer_names, whole


class DenseFormerSites(MethodSites):
    """An average has the embeddings and outputs of layers, its own layer's last, with weights that are parameters."""

    def of(self, config: Any) -> tuple[Site, ...]:
        names = layer_names(config)
        outputs = (EMBEDDINGS, *names)
        return tuple(
            Site(names[i], tuple(outputs[source] for source in sources), i)
            for i, sources in enumerate(config.average_sources)
            if sources
        )

    def attach(self, decoder: Any, see: See, stack: ExitStack) -> None:
        for place, site in enumerate(self.of(decoder.config)):

            def look(average, sources, output, place=place, site=site):
                weights = whole(average.weight).expand(output.shape[0], 1, output.shape[1], len(sources))
                mixed = see(place, Mix(site, weights, [source.unsqueeze(1) for source in sources]))
                return None if mixed is None else mixed.squeeze(1).to(output.dtype)

            average = decoder.layers[site.number].depth_average
            stack.callback(average.register_forward_hook(look).remove)


SITES = DenseFormerSites()
__all__ = ["SITES"]
