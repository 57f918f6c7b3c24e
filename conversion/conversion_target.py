# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What a target of conversion is. A method has one, `TARGET` of its module `convert_to_<method>`."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from depthmix.configuration.configuration_dense_decoder import DenseDecoderConfig
from depthmix.configuration.depth_backbones import ConfigurationClasses
from depthmix.families import FAMILIES

from .weight_maps import WeightMap


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


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
        keeps_function (`bool`):
            Whether the source is a vanilla model and the converted one computes the same, up to rounding.
    """

    config: PreTrainedConfig
    stock_config: PreTrainedConfig
    function_note: str
    warnings: tuple[str, ...] = ()
    keeps_function: bool = False

    @property
    def model_class(self) -> "type[PreTrainedModel]":
        """The model whose tensors are written."""
        found: type[Any] = FAMILIES[self.config.model_type].find_class("ForCausalLM")
        return found


# takes the content of the source's config.json and the options that the user gave
TranslateFn = Callable[[dict[str, Any], dict[str, Any]], TranslatedConfig]
RetrofitFn = Callable[[dict[str, Any]], dict[str, Any]]


class JoinedTensors(tuple[str, ...]):
    """A start value that is made of other tensors of the target, by name, one below the other."""


NewTensor = Callable[[], "torch.Tensor"] | JoinedTensors
NewTensorsFn = Callable[[PreTrainedConfig], Mapping[str, NewTensor]]


@dataclass(frozen=True)
class AcceptedSource:
    """
    How checkpoints of one layout become the target. `new_tensors` takes the configuration and returns, by name, what
    makes the start values of the tensors that these checkpoints do not have: all at once, they may not fit in memory.
    `retrofit_fields` is there for vanilla models: it takes the user's options and returns the fields with which the
    target starts with their function.
    """

    translate: TranslateFn
    weight_map: WeightMap
    new_tensors: NewTensorsFn = lambda config: {}
    retrofit_fields: RetrofitFn | None = None


@dataclass(frozen=True)
class ConversionTarget:
    """
    A method that checkpoints can be converted to. The model type of the result is the method's on the source's
    backbone.

    Args:
        name (`str`):
            The method.
        configurations (`ConfigurationClasses`):
            Its configurations; their fields that have a help text are options of conversion.
        sources (`Mapping`):
            Layout name to [`AcceptedSource`].
        refusals (`Mapping`):
            Layout name to the reason why it is not accepted, and what to use instead.
        summary (`str`), tags (`tuple` of `str`):
            What the model is, and the tags, for the model card.
    """

    name: str
    configurations: ConfigurationClasses
    sources: Mapping[str, AcceptedSource]
    refusals: Mapping[str, str]
    summary: str
    tags: tuple[str, ...]

    @property
    def model_types(self) -> list[str]:
        """Model types that it can result in."""
        return [model_type for model_type, family in FAMILIES.items() if family.method == self.name]

    @property
    def options(self) -> dict[str, dataclasses.Field]:
        """Fields of its configurations that the user may set, by name. Not every backbone has each."""
        classes = [self.configurations.fields]
        if "dense" in self.configurations.backbones:
            classes.append(DenseDecoderConfig)
        return {
            field.name: field for each in classes for field in dataclasses.fields(each) if "help" in field.metadata
        }
