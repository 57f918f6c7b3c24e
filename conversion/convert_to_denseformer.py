# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Conversion to DenseFormer: from Qwen3, Qwen2 and Llama, from such models with the module of DenseFormer's own code, and
from the released DenseFormer weights and their vanilla control.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from depthmix.configuration.configuration_denseformer import DenseFormerConfig
from depthmix.modeling.modeling_denseformer import DenseFormerForCausalLM, DepthAverage

from .conversion_target import AcceptedSource, ConversionTarget, TranslatedConfig
from .dense_decoder_sources import STOCK, DenseDecoderTarget
from .source_configs import check_vanilla, read_aliased
from .source_layouts import common_refusals
from .weight_maps import DWA_MODULES, RELEASED_DENSEFORMER


OPTIONS = ("dwa_dilation", "dwa_period", "key_norm_position")


def released_fields(source: dict[str, Any]) -> dict[str, Any]:
    """The released code takes less than one for one."""
    return {
        f"dwa_{name}": max(read_aliased(source, f"denseformer_dwa_{name}", f"densetransformer_dwa_{name}", 1), 1)
        for name in ("dilation", "period")
    }


def from_dwa_modules(
    config_class: type[PreTrainedConfig], backbone: dict[str, Any], source: dict[str, Any], options: dict[str, Any]
) -> TranslatedConfig:
    """Only the module that holds the averages is known; its spacing is in its tensors' shapes, or in these keys."""
    warnings = check_vanilla(source, config_class.__name__.removesuffix("Config"))
    spacing = {
        f"dwa_{name}": options.get(f"dwa_{name}") or read_aliased(source, f"dwa_{name}", f"denseformer_dwa_{name}", 1)
        for name in ("dilation", "period")
    }
    trained = {"key_norm_position": "before_rope", **backbone, **spacing}
    return _DENSEFORMER.from_trained(config_class, trained, "the source", source, options, warnings)


def vanilla_note(config: DenseFormerConfig) -> str:
    """Whether the function of a vanilla source is kept."""
    return (
        "The converted model computes exactly what the vanilla checkpoint does: an average starts as its layer's "
        "output."
    )


def start_values(config: DenseFormerConfig) -> dict[str, Callable[[], torch.Tensor]]:
    """The weights of every average of a model that was just built."""
    return {
        f"model.layers.{i}.depth_average.weight": partial(DepthAverage.identity, len(read))
        for i, read in enumerate(config.average_sources)
        if read
    }


_DENSEFORMER = DenseDecoderTarget(
    DenseFormerConfig,
    DenseFormerForCausalLM,
    "DenseFormer",
    lambda options: {},
    vanilla_note,
    start_values,
    ("scale_embeds", "use_p2n", "no_residual"),
)

TARGET = ConversionTarget(
    name=DenseFormerConfig.model_type,
    model_class=DenseFormerForCausalLM,
    options=OPTIONS,
    sources=_DENSEFORMER.vanilla_sources()
    | {
        "released_denseformer": AcceptedSource(
            partial(_DENSEFORMER.from_released, released_fields), RELEASED_DENSEFORMER
        )
    }
    | {f"{name}_dwa": AcceptedSource(partial(from_dwa_modules, *stock), DWA_MODULES) for name, stock in STOCK.items()},
    refusals=common_refusals(DenseFormerConfig.model_type, "DenseFormer's averages", "DenseFormer"),
    summary=(
        "DenseFormer is a dense decoder with depth-weighted averages (arXiv 2402.02622): after a layer the hidden "
        "states are a sum, with learned weights, of the embedding and all layers' outputs so far."
    ),
    tags=("depthmix", "denseformer"),
)
