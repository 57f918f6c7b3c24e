# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What a target has to provide. A new one is a file that fills in a [`ConversionTarget`], listed in converter.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .weight_maps import WeightMap


@dataclass(frozen=True)
class TranslatedConfig:
    """
    A source's configuration in terms of the target.

    Args:
        config (`PreTrainedConfig`):
            Configuration of the converted model.
        stock_config (`PreTrainedConfig`):
            The source's configuration as transformers reads it, for showing the differences.
        function_note (`str`):
            Whether the converted model computes what the source did.
        warnings (`tuple` of `str`):
            What the user should know.
    """

    config: PreTrainedConfig
    stock_config: PreTrainedConfig
    function_note: str
    warnings: tuple[str, ...] = ()


# takes the content of the source's config.json and the options that the user gave
TranslateFn = Callable[[dict[str, Any], dict[str, Any]], TranslatedConfig]
NewTensorsFn = Callable[[PreTrainedConfig], dict[str, Callable[[], torch.Tensor]]]


@dataclass(frozen=True)
class AcceptedSource:
    """
    How checkpoints of one layout become the target. `new_tensors` takes the configuration and returns, by name, what
    makes the start values of the tensors that these checkpoints do not have: all at once, they may not fit in memory.
    """

    translate: TranslateFn
    weight_map: WeightMap
    new_tensors: NewTensorsFn = lambda config: {}


@dataclass(frozen=True)
class ConversionTarget:
    """
    A model type that checkpoints can be converted to.

    Args:
        name (`str`):
            Its model type.
        model_class (`type`):
            The model whose tensors are written.
        options (`tuple` of `str`):
            Configuration fields that the user may set.
        sources (`Mapping`):
            Layout name to [`AcceptedSource`].
        refusals (`Mapping`):
            Layout name to the reason why it is not accepted, and what to use instead.
        summary (`str`), tags (`tuple` of `str`):
            What the model is, and the tags, for the model card.
    """

    name: str
    model_class: type[PreTrainedModel]
    options: tuple[str, ...]
    sources: Mapping[str, AcceptedSource]
    refusals: Mapping[str, str]
    summary: str
    tags: tuple[str, ...]
