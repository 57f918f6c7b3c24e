# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Conversion to AttnRes: from Qwen3, Qwen2 and Llama, and from the released AttnRes weights and their vanilla control.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from depthmix.configuration.configuration_attnres import AttnResConfig
from depthmix.modeling.modeling_attnres import AttnResForCausalLM, AttnResMixer

from .conversion_target import AcceptedSource, ConversionTarget
from .dense_decoder_sources import OTHER_FUNCTION, DenseDecoderTarget
from .errors import ConversionError
from .source_layouts import common_refusals
from .weight_maps import RELEASED_ATTNRES


OPTIONS = ("attnres_variant", "attnres_block_size", "attnres_recency_bias", "attnres_scale", "key_norm_position")


def released_fields(variant: str, source: dict[str, Any]) -> dict[str, Any]:
    """The variant is known from the tensors; the block size and the start of the bias are in the config."""
    size = source.get("attnres_block_size", 12)
    if type(size) is not int or size < 1:
        raise ConversionError(f"attnres_block_size is {size!r}, must be a positive integer.")
    return {
        "attnres_variant": variant,
        # the released code takes snapshots between layers of two sub-layers
        "attnres_block_size": size + size % 2 if variant == "cumulative" else size,
        "attnres_recency_bias": variant == "cumulative",
        "attnres_recency_bias_init": source.get("attnres_recency_bias_init", 3.0),
        "attnres_scale": "mean",
    }


def vanilla_fields(options: dict[str, Any]) -> dict[str, Any]:
    """The mixing starts at zero queries, and with the scale "sum" as the vanilla model."""
    return {"attnres_scale": "mean" if options.get("attnres_variant") == "cumulative" else "sum"}


def vanilla_note(config: AttnResConfig) -> str:
    """Whether the function of a vanilla source is kept."""
    if config.attnres_variant == "cumulative":
        return OTHER_FUNCTION
    if config.attnres_scale == "sum":
        return (
            "The converted model computes what the vanilla checkpoint does, up to rounding: its pseudo-queries are "
            "zero, and then the mix is the plain sum of the sources."
        )
    return (
        "The converted model computes nearly what the vanilla checkpoint does: its pseudo-queries are zero, and "
        "then the mix is the average of the sources, from which the sum that the vanilla model has differs by a "
        "factor. The norms undo it, up to their epsilon. With attnres_scale='sum' nothing changes."
    )


def start_values(config: AttnResConfig) -> dict[str, Callable[[], torch.Tensor]]:
    """The parameters of every mixer of a model that was just built."""
    mixer = AttnResMixer(config).state_dict()
    layers = range(config.num_hidden_layers)
    names = [f"model.layers.{i}.{site}_mixer" for i in layers for site in ("attn", "mlp")]
    names.append("model.output_mixer")
    return {f"{name}.{key}": partial(mixer.get, key) for name in names for key in mixer}


_ATTNRES = DenseDecoderTarget(AttnResConfig, AttnResForCausalLM, "AttnRes", vanilla_fields, vanilla_note, start_values)

TARGET = ConversionTarget(
    name=AttnResConfig.model_type,
    model_class=AttnResForCausalLM,
    options=OPTIONS,
    sources=_ATTNRES.vanilla_sources()
    | {
        layout: AcceptedSource(partial(_ATTNRES.from_released, partial(released_fields, variant)), RELEASED_ATTNRES)
        for layout, variant in (("released_attnres", "cumulative"), ("released_attnres_block", "block"))
    },
    refusals=common_refusals(AttnResConfig.model_type, "Attention Residuals", "AttnRes"),
    summary=(
        "AttnRes is a dense decoder with Attention Residuals (arXiv 2603.15031): a sub-layer reads a mix of earlier "
        "sub-layers' outputs, weighted by a softmax over depth, in place of their sum."
    ),
    tags=("depthmix", "attention-residuals"),
)
