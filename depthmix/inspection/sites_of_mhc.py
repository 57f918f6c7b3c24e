# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The sites of mHC: each sub-layer, and the readout before the final norm."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from depthmix.kernels.depth_precision import accumulation_dtype, without_autocast
from depthmix.kernels.hyper_connection_reference import hyper_connection_maps

from .sites import EMBEDDINGS, OUTPUT, MethodSites, Mix, See, Site, see_updates, sub_layer_name, whole


class MHCSites(MethodSites):
    """
    A sub-layer reads a sum of streams, and each stream is a sum of what was written to it. So what it reads is a sum
    of the embeddings and the outputs of all sub-layers before it. The weight of one of these is the product of the
    weights with which it was written, of all matrices that have mixed the streams since, and of those of the read.
    """

    def of(self, config: Any) -> tuple[Site, ...]:
        count = 2 * config.num_hidden_layers
        names = [sub_layer_name(i) for i in range(count)]
        return tuple(
            Site(target, (EMBEDDINGS, *names[:number]), number) for number, target in enumerate((*names, OUTPUT))
        )

    def attach(self, decoder: Any, see: See, stack: ExitStack) -> None:
        connections = [c for layer in decoder.layers for c in (layer.attn_connection, layer.mlp_connection)]
        sites = self.of(decoder.config)
        # of this call: what sub-layers have written, how much of each source every stream has, and what the last
        # sub-layer does to that when it writes
        updates: dict[int, Tensor] = {}
        shares: list[Tensor] = []
        last_maps: tuple[Tensor, Tensor] | None = None

        def add_up(number: int, streams: Tensor, reads: Tensor, mixed: Tensor) -> Tensor | None:
            """The mix of a site, from the weights by which it reads streams."""
            if number == 0:
                shares[:] = [torch.ones_like(reads)]
                updates[-1] = streams[..., 0, :]
            else:
                assert last_maps is not None
                residual, post = last_maps
                with without_autocast(streams):
                    shares[:] = [*((residual @ share.unsqueeze(-1)).squeeze(-1) for share in shares), post]
            weights = torch.stack([(reads * share).sum(-1) for share in shares], dim=-1)
            entries = [updates[i - 1].unsqueeze(1) for i in range(number + 1)]
            mix = Mix(sites[number], weights.unsqueeze(1), entries)
            found = see(number, mix)
            if found is None:
                return None
            # the streams, as they were rounded, stay the base
            before = Mix(mix.site, weights.unsqueeze(1), entries).total()
            return (mixed + (found - before).squeeze(1)).to(mixed.dtype)

        def look(connection, args, output, number):
            nonlocal last_maps
            mixed, residual, post, streams = output
            found = add_up(number, streams, reads_of(connection, streams), mixed)
            last_maps = residual, post
            return None if found is None else (found, residual, post, streams)

        def look_at_readout(readout, args, output):
            (streams,) = args
            shares_of_streams = whole(readout.logits).to(accumulation_dtype(streams)).softmax(-1)
            return add_up(len(connections), streams, shares_of_streams.expand(streams.shape[:-1]), output)

        see_updates(decoder, lambda number, update: updates.update({number: update}), stack)
        for number, connection in enumerate(connections):

            def look_at_connection(connection, args, output, number=number):
                return look(connection, args, output, number)

            stack.callback(connection.register_forward_hook(look_at_connection).remove)
        stack.callback(decoder.stream_readout.register_forward_hook(look_at_readout).remove)
        stack.callback(updates.clear)

    def final_state(self, decoder: Any, hidden_states: Tensor) -> Tensor:
        return decoder.stream_readout.forward(hidden_states)


def reads_of(connection: Any, streams: Tensor) -> Tensor:
    """The weights `[B, T, streams]` by which a sub-layer reads streams `[B, T, streams, hidden]`."""
    parameters = [getattr(connection, name) for name in ("norm_weight", "projection", *_ALPHAS, *_LOGITS)]
    with without_autocast(streams):
        # the matrix is not looked at
        reads, _, _ = hyper_connection_maps(
            streams.to(accumulation_dtype(streams)),
            *map(whole, parameters),
            eps=connection.eps,
            iterations=1,
            order=connection.order,
        )
    return reads


_ALPHAS = ("alpha_pre", "alpha_post", "alpha_residual")
_LOGITS = ("pre_logits", "post_logits", "residual_logits")
SITES = MHCSites()
__all__ = ["SITES"]
