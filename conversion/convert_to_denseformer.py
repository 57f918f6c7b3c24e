# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Conversion to DenseFormer: from the stock models, from Qwen3, Qwen2 and Llama with the module of DenseFormer's own
code, and from the released DenseFormer weights and their vanilla control.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from depthmix.configuration.configuration_denseformer import CONFIGURATIONS
from depthmix.configuration.depth_backbones import BACKBONES, Backbone

from .conversion_target import AcceptedSource, ConversionTarget, TranslatedConfig
from .source_configs import check_vanilla, read_aliased
from .source_layouts import common_refusals
from .vanilla_sources import DENSE_FIELDS, SAME_FUNCTION, FunctionNote, MethodSources
from .weight_maps import DWA_MODULES, RELEASED_DENSEFORMER


def released_fields(source: dict[str, Any]) -> dict[str, Any]:
    """The released code takes less than one for one."""
    return {
        f"dwa_{name}": max(read_aliased(source, f"denseformer_dwa_{name}", f"densetransformer_dwa_{name}", 1), 1)
        for name in ("dilation", "period")
    }


def from_dwa_modules(stock: Backbone, source: dict[str, Any], options: dict[str, Any]) -> TranslatedConfig:
    """Only the module that holds the averages is known; its spacing is in its tensors' shapes, or in these keys."""
    warnings = check_vanilla(source, stock)
    spacing = {
        f"dwa_{name}": options.get(f"dwa_{name}") or read_aliased(source, f"dwa_{name}", f"denseformer_dwa_{name}", 1)
        for name in ("dilation", "period")
    }
    trained = {"key_norm_position": "before_rope", **DENSE_FIELDS[stock.model_type], **spacing}
    return _SOURCES.from_trained(stock.stock_config_class(), trained, "the source", source, options, warnings)


def vanilla_note(config: PreTrainedConfig) -> FunctionNote:
    """Whether the function of a vanilla source is kept."""
    return FunctionNote(True, f"{SAME_FUNCTION}: an average starts as its layer's output.")


def start_values(config: PreTrainedConfig) -> "dict[str, Callable[[], torch.Tensor]]":
    """The weights of every average of a model that was just built."""
    # not at the top: `inspect` needs no torch
    from depthmix.modeling.modeling_denseformer import DepthAverage

    return {
        f"model.layers.{i}.depth_average.weight": partial(DepthAverage.identity, len(read))
        for i, read in enumerate(config.average_sources)
        if read
    }


_SOURCES = MethodSources(CONFIGURATIONS, "DenseFormer", vanilla_note, start_values=start_values)

TARGET = ConversionTarget(
    name="denseformer",
    configurations=CONFIGURATIONS,
    sources=_SOURCES.vanilla_sources()
    | _SOURCES.released_control()
    | {"released_denseformer": AcceptedSource(partial(_SOURCES.from_released, released_fields), RELEASED_DENSEFORMER)}
    | {
        f"{name}_dwa": AcceptedSource(partial(from_dwa_modules, BACKBONES[name]), DWA_MODULES) for name in DENSE_FIELDS
    },
    refusals=common_refusals("denseformer", "DenseFormer's averages", "DenseFormer"),
    summary=(
        "DenseFormer is a decoder with depth-weighted averages (arXiv 2402.02622): after a layer the hidden "
        "states are a sum, with learned weights, of the embedding and all layers' outputs so far."
    ),
    tags=("depthmix", "denseformer"),
)
