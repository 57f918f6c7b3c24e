# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What all configurations share."""

from typing import Any

from transformers import PreTrainedConfig


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


def take_model_type(config: PreTrainedConfig, fields: dict[str, Any]) -> None:
    """
    Takes `model_type` out of the fields that a configuration is read from, since that of a vanilla checkpoint must not
    stay on the instance.

    Raises:
        `ValueError`: if it is neither the configuration's own nor its backbone's. Other models have the same fields
            with other defaults, or the same weights and another function, and have to be converted.
    """
    classes, model_type = type(config).__mro__, fields.pop("model_type", None)
    if model_type not in (None, *(getattr(each, "model_type", None) for each in classes)):
        backbone = next(each for each in classes if each.__module__.startswith("transformers.models."))
        raise ValueError(
            f"model_type={model_type!r}: {classes[0].__name__} reads configurations of its own and of "
            f"{backbone.__name__.removesuffix('Config')}. To get a {config.model_type} model from another checkpoint, "
            f"convert it: depthmix convert SOURCE DEST --to {config.model_type}"
        )
