# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Conversion to MoDAOlmo2 from OLMo2."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import Olmo2Config

from depthmix.configuration.configuration_moda import MoDAOlmo2Config
from depthmix.modeling.modeling_moda import MoDAOlmo2ForCausalLM

from .conversion_target import AcceptedSource, ConversionTarget, TranslatedConfig
from .source_configs import all_fields, build_config, check_vanilla, read_stock
from .source_layouts import common_refusals
from .weight_maps import BASE_MODEL, CAUSAL_LM


OPTIONS = ("moda_attn_slots", "moda_ffn_slots", "moda_attn_depth_proj", "moda_depth_key_mode", "moda_depth_window")


def from_olmo2(source: dict[str, Any], options: dict[str, Any]) -> TranslatedConfig:
    """Every field is carried; those of the slots come from the options, or are this package's defaults."""
    warnings = check_vanilla(source, "Olmo2")
    config = build_config(MoDAOlmo2Config, MoDAOlmo2ForCausalLM, {**all_fields(Olmo2Config, source), **options})
    if config.depth_slots[-1][1]:
        note = (
            "The converted model computes another function than the vanilla checkpoint: depth slots take their share "
            "of every softmax from the start. Fine-tune it before use. With moda_attn_slots=False and "
            "moda_ffn_slots=False it is exactly the vanilla model."
        )
    else:
        note = "There are no depth slots: the converted model computes exactly what the vanilla checkpoint does."
        unused = [key for key in ("moda_depth_key_mode", "moda_depth_window") if key in options]
        warnings += [f"{key}={options[key]!r} has no effect: there are no depth slots." for key in unused]
    return TranslatedConfig(config, read_stock(Olmo2Config, source), note, tuple(warnings))


def start_values(config: MoDAOlmo2Config) -> dict[str, Callable[[], torch.Tensor]]:
    """The projections that make slots, normally distributed as the rest of a new model; always the same numbers."""
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in MoDAOlmo2ForCausalLM(config).state_dict().items()
            if "_depth_kv_proj." in name
        }

    def make(seed: int, shape: torch.Size) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(shape).normal_(std=config.initializer_range, generator=generator)

    return {name: partial(make, seed, shape) for seed, (name, shape) in enumerate(shapes.items())}


TARGET = ConversionTarget(
    name=MoDAOlmo2Config.model_type,
    model_class=MoDAOlmo2ForCausalLM,
    options=OPTIONS,
    sources={
        "olmo2": AcceptedSource(from_olmo2, CAUSAL_LM, start_values),
        "olmo2_base": AcceptedSource(from_olmo2, BASE_MODEL, start_values),
    },
    refusals=common_refusals(MoDAOlmo2Config.model_type, "Mixture-of-Depths Attention", "Depth-Attention")
    | {
        "released_experiment": "It does not compute Mixture-of-Depths Attention.",
        "moda_olmo2": (
            "It already is what it would become: load it as it is, or with another window, "
            "`from_pretrained(path, moda_depth_window=...)`."
        ),
    },
    summary=(
        "MoDAOlmo2 is OLMo2 with Mixture-of-Depths Attention (arXiv 2603.15619): an attention layer reads, in one "
        "softmax, the tokens it sees and the keys and values that earlier layers made for the same token."
    ),
    tags=("depthmix", "mixture-of-depths-attention"),
)
