# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The maps between sub-layers and residual streams (mHC) as they are, where depth weights have them multiplied out."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor, nn

from .sites import sub_layer_name
from .sites_of_mhc import reads_of
from .watch import evaluation, run, watch


@dataclass(frozen=True)
class StreamMaps:
    """
    The maps of one connection in one batch, all in fp32 (fp64 in a model of fp64).

    Args:
        target (`str`):
            The sub-layer, such as `"layer 3 mlp"`.
        reads (`torch.Tensor` of shape `[B, T, S]`):
            The weights by which it reads each of S streams, between 0 and 1.
        writes (`torch.Tensor` of shape `[B, T, S]`):
            The weights by which its output is written to each, between 0 and 2.
        matrix (`torch.Tensor` of shape `[B, T, S, S]`):
            What mixes the streams when it writes; a row for each new stream.
    """

    target: str
    reads: Tensor
    writes: Tensor
    matrix: Tensor


def stream_maps(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[StreamMaps, ...]:
    """
    The maps of all connections of a model with residual streams, in one forward without gradients.

    Args:
        model (`nn.Module`):
            A model of this package with the method mHC, or what wraps one, such as a PEFT model.
        inputs (`dict`):
            A batch, as the model takes it.

    Returns:
        `tuple` of [`StreamMaps`], one for each sub-layer, in their order.

    Raises:
        `TypeError`: if there is no model of this package in it, or the inputs have no names.
        `ValueError`: if its method has no streams.
    """
    found: list[StreamMaps] = []

    def note(connection, args, output):
        _, matrix, writes, streams = output
        found.append(StreamMaps(sub_layer_name(len(found)), reads_of(connection, streams), writes, matrix))

    with evaluation(model), watch(model) as watched, ExitStack() as stack:
        if not hasattr(watched.decoder, "num_streams"):
            raise ValueError(f"model is a {type(watched.decoder).__name__}: has no residual streams, which mHC has.")
        for layer in watched.decoder.layers:
            for connection in (layer.attn_connection, layer.mlp_connection):
                stack.callback(connection.register_forward_hook(note).remove)
        run(model, inputs)
    return tuple(found)
