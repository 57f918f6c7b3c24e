# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Configurations of depth-weighted averages (DenseFormer, arXiv 2402.02622)."""

from dataclasses import dataclass, field

from .configuration_depth_common import DepthMixingFields
from .depth_backbones import ConfigurationClasses


@dataclass(kw_only=True)
class DenseFormerFields(DepthMixingFields):
    r"""
    After a decoder layer the hidden states are replaced by an average of the embedding and of the outputs of this and
    all earlier layers, whose weights are learned numbers: they do not depend on the input and are not normalised. At
    the start it is the layer's own output, so that the model is the vanilla decoder (section 3 of the paper).

    Args:
        dwa_dilation (`int`, *optional*, defaults to 1):
            An average reads every n-th of them, the layer's own output among them.
        dwa_period (`int`, *optional*, defaults to 1):
            There is an average after every n-th layer.

    ```python
    >>> from depthmix import DenseFormerConfig

    >>> DenseFormerConfig(num_hidden_layers=4, dwa_dilation=2).average_sources
    ((1,), (0, 2), (1, 3), (0, 2, 4))
    ```
    """

    shape_fields = ("dwa_dilation", "dwa_period")

    dwa_dilation: int = field(default=1, metadata={"help": "an average reads every N-th layer"})
    dwa_period: int = field(default=1, metadata={"help": "there is an average after every N-th layer"})

    def validate_depth_mixing(self):
        """Part of the `@strict` validation, which runs on construction and before saving."""
        super().validate_depth_mixing()
        for name in ("dwa_dilation", "dwa_period"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be a positive number of layers.")

    def ineffective_values(self):
        if self.dwa_period > self.num_hidden_layers:
            yield f"dwa_period={self.dwa_period}: none of {self.num_hidden_layers} layers has an average after it."
        elif self.dwa_dilation > self.num_hidden_layers:
            yield (
                f"dwa_dilation={self.dwa_dilation}: with {self.num_hidden_layers} layers no average reads anything "
                "but its own layer's output."
            )

    @property
    def average_sources(self) -> tuple[tuple[int, ...], ...]:
        """
        For each layer, what the average after it reads, ascending: 0 is the embedding and `i` the output of the
        `i`-th layer, so that the layer's own is last. Empty where there is no average.
        """
        # fields may have changed since, without validation: `from_pretrained(path, dwa_period=...)` sets them late
        self.validate_depth_mixing()
        return tuple(
            () if own % self.dwa_period else tuple(range(own % self.dwa_dilation, own + 1, self.dwa_dilation))
            for own in range(1, self.num_hidden_layers + 1)
        )


CONFIGURATIONS = ConfigurationClasses(
    __name__,
    prefix="DenseFormer",
    model_type="denseformer",
    fields=DenseFormerFields,
    backbones=(
        "dense",
        "mistral",
        "smollm3",
        "olmo2",
        "olmo3",
        "qwen3_moe",
        "olmoe",
        "kimi_linear",
    ),
)
__getattr__ = CONFIGURATIONS.module_getattr()
__all__ = ["CONFIGURATIONS", "DenseFormerFields"]
