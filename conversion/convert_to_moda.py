# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Conversion to Mixture-of-Depths Attention from the stock models."""

import re
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from depthmix.configuration.configuration_moda import CONFIGURATIONS
from depthmix.families import FAMILIES

from .conversion_target import ConversionTarget, JoinedTensors, NewTensor
from .source_layouts import NO_SOFTMAX, common_refusals
from .vanilla_sources import SAME_FUNCTION, FunctionNote, MethodSources


def vanilla_note(config: PreTrainedConfig) -> FunctionNote:
    """Whether the function of a vanilla source is kept."""
    if config.depth_slots[-1][1] and config.moda_gate:
        return FunctionNote(
            True,
            f"{SAME_FUNCTION}: the gates of its depth slots are closed, and training opens them. Projections of slots "
            "start as copies of the layer's own keys and values.",
        )
    if config.depth_slots[-1][1]:
        return FunctionNote(
            False,
            "The converted model computes another function than the vanilla checkpoint: depth slots take attention "
            "away from the tokens from the start. Fine-tune it before use. With moda_gate=True they do not, and with "
            "moda_attn_slots=False and moda_ffn_slots=False it is exactly the vanilla model.",
        )
    return FunctionNote(True, f"There are no depth slots. {SAME_FUNCTION}.")


def retrofit_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Gates, where there are slots."""
    has_none = options.get("moda_attn_slots") is False and options.get("moda_ffn_slots") is False
    return {} if has_none else {"moda_gate": True}


def unused_options(config: PreTrainedConfig, options: dict[str, Any]) -> list[str]:
    """What has no effect."""
    if config.depth_slots[-1][1]:
        return []
    unused = [key for key in ("moda_depth_key_mode", "moda_depth_window") if key in options]
    return [f"{key}={options[key]!r} has no effect: there are no depth slots." for key in unused]


def start_values(config: PreTrainedConfig) -> dict[str, NewTensor]:
    """
    The projections that make slots and, if there are any, closed gates. With gates the projections are copies of the
    layer's own, which lower the loss fastest when the gates open; else they are normally distributed as the rest of a
    new model, always the same numbers.
    """
    with torch.device("meta"):
        model = FAMILIES[config.model_type].find_class("ForCausalLM")(config)
    state = model.state_dict()
    shapes = {name: tensor.shape for name, tensor in state.items() if "_depth_kv_proj." in name}
    if config.moda_gate:
        gates = {name: tensor.shape for name, tensor in state.items() if name.endswith(".depth_gate.weight")}
        own = {name: re.sub(r"\.\w+_depth_kv_proj\.weight$", ".self_attn.{}_proj.weight", name) for name in shapes}
        starts: dict[str, NewTensor] = {name: partial(torch.zeros, shape) for name, shape in gates.items()}
        starts |= {name: JoinedTensors(map(pattern.format, "kv")) for name, pattern in own.items()}
        return starts

    def make(seed: int, shape: "torch.Size") -> "torch.Tensor":
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(shape).normal_(std=config.initializer_range, generator=generator)

    return {name: partial(make, seed, shape) for seed, (name, shape) in enumerate(shapes.items())}


_SOURCES = MethodSources(
    CONFIGURATIONS,
    "Mixture-of-Depths Attention",
    vanilla_note,
    retrofit_fields,
    start_values,
    remarks=unused_options,
)

TARGET = ConversionTarget(
    name="moda",
    configurations=CONFIGURATIONS,
    sources=_SOURCES.vanilla_sources(),
    refusals=common_refusals("moda", "Mixture-of-Depths Attention", "Depth-Attention")
    | NO_SOFTMAX
    | {"released_experiment": "It does not compute Mixture-of-Depths Attention."},
    summary=(
        "It is a decoder with Mixture-of-Depths Attention (arXiv 2603.15619): an attention layer reads, in one "
        "softmax, the tokens it sees and the keys and values that earlier layers made for the same token."
    ),
    tags=("depthmix", "mixture-of-depths-attention"),
)
