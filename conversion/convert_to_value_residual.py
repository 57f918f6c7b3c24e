# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Conversion to value residual learning from the stock models."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from depthmix.configuration.configuration_value_residual import CONFIGURATIONS

from .conversion_target import ConversionTarget
from .source_layouts import NO_SOFTMAX, common_refusals
from .vanilla_sources import OTHER_FUNCTION, SAME_FUNCTION, FunctionNote, MethodSources


def retrofit_fields(options: dict[str, Any]) -> dict[str, Any]:
    """The start at which each value is the layer's own."""
    return {"value_residual_init": "identity"}


def vanilla_note(config: PreTrainedConfig) -> FunctionNote:
    """Whether the function of a vanilla source is kept."""
    if config.value_residual_init == "identity":
        return FunctionNote(True, f"{SAME_FUNCTION}: the first layer's value starts with the weight 0.")
    return FunctionNote(False, OTHER_FUNCTION)


def start_values(config: PreTrainedConfig) -> "dict[str, Callable[[], torch.Tensor]]":
    """The weights of every layer but the first, of a model that was just built."""
    # not at the top: `inspect` needs no torch
    from depthmix.modeling.modeling_value_residual import ValueMix

    weight = ValueMix(config).weight.detach()
    layers = range(1, config.num_hidden_layers)
    return {f"model.layers.{i}.self_attn.value_mix.weight": partial(torch.clone, weight) for i in layers}


_SOURCES = MethodSources(CONFIGURATIONS, "Value residual learning", vanilla_note, retrofit_fields, start_values)

TARGET = ConversionTarget(
    name="value_residual",
    configurations=CONFIGURATIONS,
    sources=_SOURCES.vanilla_sources(),
    refusals=common_refusals("value_residual", "value residuals", "Depth-Attention") | NO_SOFTMAX,
    summary=(
        "It is a decoder with value residual learning (ResFormer, arXiv 2410.17897): each layer adds the first "
        "layer's value at the same token to its own, with learned weights."
    ),
    tags=("depthmix", "value-residual"),
)
