# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The sites of Attention Residuals: each sub-layer, and the final norm."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from depthmix.kernels import attn_res

from .sites import EMBEDDINGS, OUTPUT, MethodSites, Mix, See, Site, sub_layer_name


class AttnResSites(MethodSites):
    """
    Each sub-layer mixes the embeddings and blocks of sub-layers, and so does the final norm. The last source of a site
    may be a block that is still growing. With the variant `"full"` each block is a sub-layer and has its name; with
    `"cumulative"` the sources are the residual stream as it was after some layers, and as it is.
    """

    def of(self, config: Any) -> tuple[Site, ...]:
        counts = config.num_finished_sources
        is_additive = config.attnres_routing == "additive"
        # what is added to the stream is in it already when the final norm reads it, and the first attention has
        # nothing to mix
        numbers = range(1, len(counts) - 1) if is_additive else range(len(counts))
        sites = []
        for number in numbers:
            target = OUTPUT if number == len(counts) - 1 else sub_layer_name(number)
            sites.append(Site(target, self._sources(config, counts[number] + 1), number))
        return tuple(sites)

    @staticmethod
    def _sources(config: Any, count: int) -> tuple[str, ...]:
        size = config.attnres_block_size
        if config.attnres_variant == "cumulative":
            finished = (f"stream after layer {i * size // 2 - 1}" for i in range(1, count - 1))
            return (EMBEDDINGS, *finished, "stream")
        blocks = range(count - 1)
        return (EMBEDDINGS, *(f"block {i}" if size > 1 else sub_layer_name(i) for i in blocks))

    def attach(self, decoder: Any, see: See, stack: ExitStack) -> None:
        for place, (site, mixer) in enumerate(self._mixers(decoder)):

            def ask(_, args):
                # the last argument, by which the mixer returns its weights
                return (*args[:-1], True)

            def look(mixer, args, output, place=place, site=site):
                partial, mixed, weights = output
                entries = (*args[2], partial)
                found = see(place, self._mix(site, mixer, weights, entries))
                if found is None:
                    return None
                found = found.squeeze(1)
                if (norm_weight := args[4]) is not None:
                    # of a single source it is the norm alone
                    no_query = found.new_zeros(found.shape[-1])
                    found = attn_res(
                        [found], no_query, None, eps=mixer.eps, output_norm_weight=norm_weight, impl="reference"
                    )
                return partial, found.to(mixed.dtype), weights

            def look_additive(mixer, args, output, place=place, site=site):
                stream, entries = args[:2]
                mixed, weights = output
                found = see(place, self._mix(site, mixer, weights, entries, is_centred=True))
                return None if found is None else ((stream + found.squeeze(1)).to(mixed.dtype), weights)

            stack.callback(mixer.register_forward_pre_hook(ask).remove)
            stack.callback(mixer.register_forward_hook(look_additive if decoder.is_additive else look).remove)

    def ending(self, decoder: Any, keep: Callable[[int, Tensor], None], stack: ExitStack) -> None:
        if decoder.is_additive:
            super().ending(decoder, keep, stack)
            return
        mixer = decoder.output_mixer

        def note(_, args, number):
            partial, update, sources = args[:3]
            # an attention reads what the layers before it have left; the final norm would have read the same
            keep(number // 2, mixer.forward(partial, update, sources)[1])

        for site, each in self._mixers(decoder):
            if site.number > 0 and site.number % 2 == 0:

                def before(_, args, number=site.number):
                    note(_, args, number)

                stack.callback(each.register_forward_pre_hook(before).remove)

    def _mixers(self, decoder: Any) -> Iterator[tuple[Site, nn.Module]]:
        for site in self.of(decoder.config):
            if site.target == OUTPUT:
                yield site, decoder.output_mixer
            else:
                layer = decoder.layers[site.number // 2]
                yield site, layer.mlp_mixer if site.number % 2 else layer.attn_mixer

    @staticmethod
    def _mix(site: Site, mixer: Any, weights: Tensor, entries: Any, is_centred: bool = False) -> Mix:
        scale = len(entries) if mixer.scale == "sum" else 1
        entries = [entry.unsqueeze(1) for entry in entries]
        return Mix(site, weights.unsqueeze(1), entries, scale=scale, is_centred=is_centred)


SITES = AttnResSites()
__all__ = ["SITES"]
