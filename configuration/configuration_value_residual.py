# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Configurations of value residual learning (ResFormer, arXiv 2410.17897)."""

from dataclasses import dataclass, field
from typing import Literal

from .configuration_depth_common import DepthMixingFields
from .depth_backbones import ConfigurationClasses


@dataclass(kw_only=True)
class ValueResidualFields(DepthMixingFields):
    r"""
    The value of every layer but the first is a sum of its own and of the first layer's value at the same token, with
    two learned numbers per layer as weights (section 3 of the paper). The keys are the layer's own. On backbones
    with a norm after the attention (OLMo2, OLMo3) only the ratio of the two numbers counts.

    Args:
        value_residual_init (`str`, *optional*, defaults to `"equal"`):
            What the weights of the first layer's value and of the own value start at: `"equal"`, 0.5 and 0.5, as in
            the paper's learnable variant, or `"identity"`, 0 and 1, with which the model is the vanilla decoder until
            it is trained.
        value_residual_learnable (`bool`, *optional*, defaults to `True`):
            Whether the weights are trained. The paper's fixed variant keeps them at 0.5 and 0.5.

    ```python
    >>> from depthmix import ValueResidualQwen3Config

    >>> ValueResidualQwen3Config(value_residual_init="identity").value_weights_start
    (0.0, 1.0)
    ```
    """

    start_fields = ("value_residual_init",)

    value_residual_init: Literal["equal", "identity"] = field(
        default="equal", metadata={"help": "what the two weights start at: 0.5 and 0.5, or 0 and 1"}
    )
    value_residual_learnable: bool = field(default=True, metadata={"help": "whether the weights are trained"})

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        # where a device has some of the heads, what it finds for the weights is the part of these heads
        if self.base_model_tp_plan["layers.*.self_attn.v_proj"] == "colwise":
            style = "replicated_with_grad_allreduce"
            self.base_model_tp_plan = self.base_model_tp_plan | {"layers.*.self_attn.value_mix": style}

    @property
    def value_weights_start(self) -> tuple[float, float]:
        """What the weights of the first layer's value and of the own value start at."""
        return (0.0, 1.0) if self.value_residual_init == "identity" else (0.5, 0.5)


CONFIGURATIONS = ConfigurationClasses(
    __name__,
    prefix="ValueResidual",
    model_type="value_residual",
    fields=ValueResidualFields,
    backbones=(
        "qwen3",
        "qwen2",
        "llama",
        "mistral",
        "smollm3",
        "olmo2",
        "olmo3",
        "qwen3_moe",
        "olmoe",
    ),
)
__getattr__ = CONFIGURATIONS.module_getattr()
__all__ = ["CONFIGURATIONS", "ValueResidualFields"]
