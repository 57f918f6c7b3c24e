# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Configuration of the dense pre-norm decoder that Qwen3, Qwen2 and Llama share."""

from dataclasses import field
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config


@strict
class DenseDecoderConfig(Qwen3Config):
    r"""
    The backbone `dense`: every field of [`~transformers.Qwen3Config`], and the following, which select Qwen3, Qwen2 or
    Llama.

    | | `use_qk_norm` | `attention_bias` | `attention_output_bias` | `mlp_bias` |
    |---|---|---|---|---|
    | Qwen3 | `True` | as configured | the same | `False` |
    | Qwen2 | `False` | `True` | `False` | `False` |
    | Llama | `False` | as configured | the same | as configured |

    Args:
        use_qk_norm (`bool`, *optional*, defaults to `True`):
            Whether each head's queries and keys go through an RMS norm.
        key_norm_position (`str`, *optional*, defaults to `"before_rope"`):
            `"before_rope"` normalises the key and then rotates it, as Qwen3 does; `"after_rope"` rotates first. The
            query is normalised first in both. Without effect if `use_qk_norm=False`.
        attention_output_bias (`bool`, *optional*):
            Whether the output projection of the attention has a bias. `None` stands for the value of
            `attention_bias`, which is that of the other three projections, and is replaced by it on construction.
        mlp_bias (`bool`, *optional*, defaults to `False`):
            Whether the projections of the MLP have biases.
    """

    model_type = "dense_decoder"

    # as `shape_fields` of a method
    decoder_shape_fields = ("use_qk_norm", "attention_bias", "attention_output_bias", "mlp_bias")

    use_qk_norm: bool = True
    key_norm_position: Literal["before_rope", "after_rope"] = field(
        default="before_rope", metadata={"help": "whether a key is normalised before or after its rotation"}
    )
    attention_output_bias: bool | None = None
    mlp_bias: bool = False

    def __post_init__(self, **kwargs):
        if self.attention_output_bias is None:
            self.attention_output_bias = self.attention_bias
        if not self.use_qk_norm:
            self.base_model_tp_plan = {
                name: style
                for name, style in self.base_model_tp_plan.items()
                if not name.endswith(("q_norm", "k_norm"))
            }
        super().__post_init__(**kwargs)


__all__ = ["DenseDecoderConfig"]
