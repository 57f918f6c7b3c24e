# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the configurations of all methods share."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from transformers import PreTrainedConfig


# a method derives from it and adds its own; the documentation of the made classes ends with this one
@dataclass(kw_only=True)
class DepthMixingFields:
    """
    depth_impl (`str`, *optional*, defaults to `"auto"`):
        Implementation of the operations of [`~depthmix.kernels`]: `"triton"`, fused kernels, and an error where they
        cannot run; `"reference"`, stock arithmetic and pure PyTorch; `"auto"`, kernels on a GPU where Triton is
        installed.
    """

    depth_impl: Literal["auto", "triton", "reference"] = field(
        default="auto", metadata={"help": "implementation of the operations"}
    )

    def __post_init__(self, **kwargs):
        take_model_type(self, kwargs)
        super().__post_init__(**kwargs)

    def validate_depth_mixing(self):
        """Part of the `@strict` validation, which runs on construction and before saving."""
        check_decoder_shape(self)
        check_layer_kinds(self)


def check_decoder_shape(config: PreTrainedConfig) -> None:
    """
    Raises:
        `ValueError`: if no decoder has such a shape.
    """
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    for name in sizes:
        value = getattr(config, name, None)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be positive.")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        raise ValueError(
            f"num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}, since each key-value head "
            "has a group of query heads of its own."
        )


def check_layer_kinds(config: PreTrainedConfig) -> None:
    """
    Raises:
        `ValueError`: if there are fields of other models, which caches and masks would take notice of, and which the
            backbone's own model ignores.
    """
    declared = {each.name for each in fields(config)}
    window, kinds = getattr(config, "sliding_window", None), set(getattr(config, "layer_types", None) or ())
    if ("sliding_window" not in declared and window is not None) or (
        "layer_types" not in declared and kinds - {"full_attention", *(["sliding_attention"] if window else [])}
    ):
        raise ValueError(
            f"sliding_window={window}, layer_types={sorted(kinds)}: must not be set, since "
            f"{config.depth_backbone.prefix.replace('Olmo', 'OLMo')} attends to all earlier tokens in every layer."
        )


def take_model_type(config: PreTrainedConfig, values: dict[str, Any]) -> None:
    """
    Takes `model_type` out of the values that a configuration is read from, since that of a vanilla checkpoint must not
    stay on the instance.

    Raises:
        `ValueError`: if it is neither the configuration's own nor its backbone's. Other models have the same fields
            with other defaults, or the same weights and another function, and have to be converted.
    """
    classes, model_type = type(config).__mro__, values.pop("model_type", None)
    if model_type not in (None, *(getattr(each, "model_type", None) for each in classes)):
        stock = next(each for each in classes if each.__module__.startswith("transformers.models."))
        raise ValueError(
            f"model_type={model_type!r}: {classes[0].__name__} reads configurations of its own and of "
            f"{stock.__name__.removesuffix('Config')}. To get a {config.model_type} model from another checkpoint, "
            f"convert it: depthmix convert SOURCE DEST --to {config.model_type}"
        )
