# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The sites of Mixture-of-Depths Attention: the attention of each layer that reads depth slots."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from depthmix.modeling.decoder_layers import repeat_heads
from depthmix.modeling.modeling_moda import eager_moda_attention

from .sites import Keep, MethodSites, Mix, See, Site, after_attention, layer_names, override


TOKENS = "tokens"


class MoDASites(MethodSites):
    """
    The softmax of a layer runs over the tokens and over depth slots. All tokens together are the first source, and
    each slot is one, with weights for each query head. With a gate, the weights are those of the gated attention.
    """

    def of(self, config: Any) -> tuple[Site, ...]:
        names = layer_names(config)
        kinds = [
            kind
            for kind, is_made in (("attention", config.moda_attn_slots), ("mlp", config.moda_ffn_slots))
            if is_made
        ]
        slots = [f"{name} {kind}" for name in names for kind in kinds]
        return tuple(
            Site(names[i], (TOKENS, *slots[first:last]), i)
            for i, (first, last) in enumerate(config.depth_slots)
            if first < last
        )

    def attach(self, decoder: Any, see: See, stack: ExitStack) -> None:
        # the joint softmax has weights to show in its eager form only, for which masks have another form too
        config = decoder.config
        stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
        config._attn_implementation = "eager"
        for place, site in enumerate(self.of(config)):
            self._attach_to(decoder.layers[site.number].self_attn, place, site, see, stack)

    @staticmethod
    def _attach_to(attention: Any, place: int, site: Site, see: See, stack: ExitStack) -> None:
        def read_and_see(query, keys, values, depth_query, attention_mask, handle, depth_stream, is_causal):
            gate = None if attention.depth_gate is None else attention.depth_gate()
            slots = depth_stream.slots(handle, attention.first_slot, attention.last_slot)
            if attention_mask is not None and attention_mask.dtype is torch.bool:
                hidden, lowest = ~attention_mask, torch.finfo(query.dtype).min
                attention_mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, lowest)
            output, weights = eager_moda_attention(
                query, keys, values, depth_query, *slots, attention_mask, attention.scaling, gate
            )
            groups, tokens = query.shape[1] // keys.shape[1], keys.shape[2]
            of_tokens, of_slots = weights[..., :tokens].float(), weights[..., tokens:].float()
            share = of_tokens.sum(-1, keepdim=True)

            def entries() -> list[Tensor]:
                # padding may read no token at all
                shares = of_tokens / torch.where(share > 0, share, 1)
                read = torch.matmul(shares, repeat_heads(values, groups).float())
                return [read, *(repeat_heads(slot.transpose(1, 2), groups) for slot in slots[1])]

            mix = Mix(site, torch.cat([share, of_slots], dim=-1), entries)
            found = see(place, mix)
            return (output if found is None else found.to(output.dtype)), weights

        override(attention, "read_with_slots", read_and_see, stack)

    def splitter(self, decoder: Any, keep: Keep, stack: ExitStack) -> Callable[[int, Mix], None]:
        def split(place: int, mix: Mix) -> None:
            layer = decoder.layers[mix.site.number]
            for i in range(len(mix.site.sources)):
                # it has the shape of the query
                part = mix.contribution(i).to(decoder.dtype)
                projected, bias = (
                    layer.self_attn.project_output(each.transpose(1, 2), part)
                    for each in (part, torch.zeros_like(part))
                )
                keep(mix.site, i, after_attention(layer, projected - bias))

        return split


SITES = MoDASites()
__all__ = ["SITES"]
