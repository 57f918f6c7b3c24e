# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Conversion to Attention Residuals: from the stock models, and from the released AttnRes weights and their vanilla
control.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from depthmix.configuration.configuration_attnres import CONFIGURATIONS

from .conversion_target import AcceptedSource, ConversionTarget
from .errors import ConversionError
from .source_layouts import common_refusals
from .vanilla_sources import OTHER_FUNCTION, SAME_FUNCTION, FunctionNote, MethodSources
from .weight_maps import RELEASED_ATTNRES


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
        "attnres_routing": "replace",
    }


def retrofit_fields(options: dict[str, Any]) -> dict[str, Any]:
    """
    The mixing starts at zero queries. With the scale "sum" it is the vanilla model then, if the sources add up to the
    residual stream, and with additive routing always.
    """
    if options.get("attnres_routing") == "additive":
        return {}
    if options.get("attnres_variant") == "cumulative":
        return {"attnres_routing": "additive"}
    return {"attnres_scale": "sum"}


def vanilla_note(config: PreTrainedConfig) -> FunctionNote:
    """Whether the function of a vanilla source is kept."""
    if config.attnres_routing == "additive":
        is_vanilla = not config.attnres_recency_bias or config.recency_bias_start == 0
        zero = f"{SAME_FUNCTION}: its pseudo-queries are zero, and then nothing is added to the residual stream."
        return FunctionNote(True, zero) if is_vanilla else FunctionNote(False, OTHER_FUNCTION)
    has_norms = config.depth_backbone.norms[0] is not None
    biased = config.attnres_recency_bias and config.recency_bias_start != 0
    if biased or config.attnres_variant == "cumulative" or (config.attnres_scale == "mean" and not has_norms):
        return FunctionNote(False, OTHER_FUNCTION)
    if config.attnres_scale == "sum":
        return FunctionNote(
            True,
            "The converted model computes what the vanilla checkpoint does, up to rounding: its pseudo-queries are "
            "zero, and then the mix is the plain sum of the sources.",
        )
    return FunctionNote(
        False,
        "The converted model computes nearly what the vanilla checkpoint does: its pseudo-queries are zero, and "
        "then the mix is the average of the sources, from which the sum that the vanilla model has differs by a "
        "factor. The norms undo it, up to their epsilon. With attnres_scale='sum' nothing changes.",
    )


def start_values(config: PreTrainedConfig) -> "dict[str, Callable[[], torch.Tensor]]":
    """The parameters of every mixer of a model that was just built."""
    # not at the top: `inspect` needs no torch
    from depthmix.modeling.modeling_attnres import AttnResMixer

    mixer = AttnResMixer(config).state_dict()
    layers = range(config.num_hidden_layers)
    names = [f"model.layers.{i}.{site}_mixer" for i in layers for site in ("attn", "mlp")]
    # with additive routing the first and the last have nothing to mix
    names = names[1:] if config.attnres_routing == "additive" else [*names, "model.output_mixer"]
    return {f"{name}.{key}": partial(mixer.__getitem__, key) for name in names for key in mixer}


_SOURCES = MethodSources(
    CONFIGURATIONS,
    "AttnRes",
    vanilla_note,
    retrofit_fields,
    start_values,
    refused_keys=("scale_embeds", "use_p2n"),
)

TARGET = ConversionTarget(
    name="attnres",
    configurations=CONFIGURATIONS,
    sources=_SOURCES.vanilla_sources()
    | _SOURCES.released_control()
    | {
        layout: AcceptedSource(partial(_SOURCES.from_released, partial(released_fields, variant)), RELEASED_ATTNRES)
        for layout, variant in (("released_attnres", "cumulative"), ("released_attnres_block", "block"))
    },
    refusals=common_refusals("attnres", "Attention Residuals", "AttnRes"),
    summary=(
        "AttnRes is a decoder with Attention Residuals (arXiv 2603.15031): a sub-layer reads a mix of earlier "
        "sub-layers' outputs, weighted by a softmax over depth, in place of their sum."
    ),
    tags=("depthmix", "attention-residuals"),
)
