# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Conversion to mHC: from the stock models, and from the released mHC weights and their vanilla control."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from depthmix.configuration.configuration_mhc import CONFIGURATIONS

from .conversion_target import AcceptedSource, ConversionTarget
from .source_configs import read_aliased
from .source_layouts import common_refusals
from .vanilla_sources import FunctionNote, MethodSources
from .weight_maps import RELEASED_MHC


def released_fields(source: dict[str, Any]) -> dict[str, Any]:
    """The released code divides by the sums of the rows first."""
    return {
        "mhc_num_streams": read_aliased(source, "residual_baseline_num_streams", "mhc_num_streams", 4),
        "mhc_sinkhorn_iters": read_aliased(source, "mhc_sinkhorn_iters", "mhc_sinkhorn_iters", 20),
        "mhc_sinkhorn_order": "rows_first",
        "mhc_alpha_init": source.get("mhc_alpha_init", 0.01),
    }


def retrofit_fields(options: dict[str, Any]) -> dict[str, Any]:
    """
    The order after which the sums of the columns are one. With that the average of the streams stays the residual
    stream of the vanilla model whatever else the matrices become; of slow iterations the other order leaves a rest.
    """
    return {"mhc_sinkhorn_order": "rows_first"}


def vanilla_note(config: PreTrainedConfig) -> FunctionNote:
    """Whether the function of a vanilla source is kept."""
    return FunctionNote(
        True,
        "The converted model computes what the vanilla checkpoint does, up to rounding: the part of its maps that "
        "depends on the streams is zero, and what its sub-layers read is the average of the streams.",
    )


def start_values(config: PreTrainedConfig) -> "dict[str, Callable[[], torch.Tensor]]":
    """The parameters of every connection and of the readout of a model that was just built."""
    # not at the top: `inspect` needs no torch
    from depthmix.modeling.modeling_mhc import MHCConnection, MHCReadout

    connection, readout = MHCConnection(config).state_dict(), MHCReadout(config).state_dict()
    layers = range(config.num_hidden_layers)
    names = [f"model.layers.{i}.{site}_connection" for i in layers for site in ("attn", "mlp")]
    values = {f"{name}.{key}": partial(connection.__getitem__, key) for name in names for key in connection}
    return values | {f"model.stream_readout.{key}": partial(readout.__getitem__, key) for key in readout}


_SOURCES = MethodSources(CONFIGURATIONS, "mHC", vanilla_note, retrofit_fields, start_values)

TARGET = ConversionTarget(
    name="mhc",
    configurations=CONFIGURATIONS,
    sources=_SOURCES.vanilla_sources()
    | _SOURCES.released_control()
    | {"released_mhc": AcceptedSource(partial(_SOURCES.from_released, released_fields), RELEASED_MHC)},
    refusals=common_refusals("mhc", "hyper-connections", "mHC"),
    summary=(
        "MHC is a decoder with manifold-constrained hyper-connections (arXiv 2512.24880): several residual "
        "streams that each sub-layer reads as one, and that a doubly stochastic matrix mixes."
    ),
    tags=("depthmix", "mhc"),
)
