# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Configurations of Depth-Attention (arXiv 2606.05014)."""

import copy
from dataclasses import dataclass, field
from typing import Literal

from .configuration_depth_common import MAX_LAYERS, DepthMixingFields, plan_with_whole_heads
from .depth_backbones import ConfigurationClasses


@dataclass(kw_only=True)
class DepthAttentionFields(DepthMixingFields):
    r"""
    Layer `l` mixes its value with the values of its source layers: the earlier layers `i` with
    `i % depth_stride == 0`, and the `depth_window` layers just before it (the source selection of the code released
    with arXiv 2606.05014; its 3B model has 48 layers and a stride of 24).

    Args:
        depth_stride (`int`, *optional*):
            Distance between source layers. 1 makes every earlier layer a source, 0 switches the mixing off (the
            model is then its vanilla one, also where `depth_window` is set). `None` stands for half the number of
            layers in all passes and is replaced by that number on construction.
        depth_window (`int`, *optional*, defaults to 0):
            How many of the most recent layers are sources besides those of the stride.
        key_norm_position (`str`, *optional*, defaults to `"before_rope"`):
            `"before_rope"` normalises the key and then rotates it, as Qwen3 does; `"after_rope"` rotates first, as
            the released Depth-Attention 3B weights need. The query is normalised first in both. Of the backbones
            here, those whose attention normalises each head by itself take `"after_rope"`.
        num_loops (`int`, *optional*, defaults to 1):
            How many times the stack of layers runs, with the same weights. For the mixing and for the KV cache each
            pass is a run of new layers: a looped model has `num_loops * num_hidden_layers` of them, each with a slot
            of its own, and stride and window are counted in these. There may be 4096.
        depth_gate (`bool`, *optional*, defaults to `False`):
            Whether each layer with sources has a number for each key-value head, its gate `g`, by which the mix
            counts: the value becomes `g` times the mix plus `1 - g` times the layer's own. Gates start at 0, where the
            model is its vanilla one; at 1 it is the same as without gates. Both hold bit for bit.
        output_depth_weights (`bool`, *optional*, defaults to `False`):
            Whether the model returns the weights of the mixing by default.

    ```python
    >>> from depthmix import DepthQwen3Config

    >>> DepthQwen3Config(num_hidden_layers=8, depth_stride=4).depth_sources
    ((), (0,), (0,), (0,), (0,), (0, 4), (0, 4), (0, 4))
    >>> DepthQwen3Config(num_hidden_layers=3, num_loops=2, depth_stride=2).depth_sources
    ((), (0,), (0,), (0, 2), (0, 2), (0, 2, 4))
    ```
    """

    shape_fields = ("depth_gate",)

    depth_stride: int | None = field(
        default=None, metadata={"help": "every N-th layer is a source; 0: no mixing at all"}
    )
    depth_window: int = field(default=0, metadata={"help": "so many of the most recent layers are sources too"})
    key_norm_position: Literal["before_rope", "after_rope"] = field(
        default="before_rope", metadata={"help": "whether a key is normalised before or after its rotation"}
    )
    num_loops: int = field(default=1, metadata={"help": "how many times the stack of layers runs"})
    depth_gate: bool = field(
        default=False, metadata={"help": "whether the mix has a gate for each key-value head, which starts closed"}
    )
    output_depth_weights: bool = False

    def __post_init__(self, **kwargs):
        self.depth_stride = self._resolved_depth_stride
        super().__post_init__(**kwargs)
        if self.depth_gate:
            # a device that has some of the heads only would need to know which
            self.base_model_tp_plan = plan_with_whole_heads(self.base_model_tp_plan)

    @property
    def _resolved_depth_stride(self) -> int:
        return max(1, self.num_loops * self.num_hidden_layers // 2) if self.depth_stride is None else self.depth_stride

    def validate_depth_mixing(self):
        """Part of the `@strict` validation, which runs on construction and before saving."""
        super().validate_depth_mixing()
        if self.key_norm_position != "before_rope" and self.depth_backbone.qk_norm != "head":
            raise ValueError(
                f"key_norm_position={self.key_norm_position!r}: must be 'before_rope' on "
                f"{self.depth_backbone.model_type}, whose attention does not normalise each key head by itself."
            )
        if self.depth_stride is not None and self.depth_stride < 0:
            raise ValueError(
                f"depth_stride={self.depth_stride}: must be a positive number of layers, 0 for no mixing, or None for "
                "half the number of layers."
            )
        if self.depth_window < 0:
            raise ValueError(f"depth_window={self.depth_window}: must be a number of layers, at least 0.")
        if self.num_loops < 1:
            raise ValueError(f"num_loops={self.num_loops}: must be a positive number of passes.")
        if self.num_loops * self.num_hidden_layers > MAX_LAYERS:
            raise ValueError(
                f"num_loops={self.num_loops}: must be at most {MAX_LAYERS // self.num_hidden_layers} with "
                f"num_hidden_layers={self.num_hidden_layers}, {MAX_LAYERS} layers in all passes."
            )

    def ineffective_values(self):
        stride, layers = self._resolved_depth_stride, self.num_loops * self.num_hidden_layers
        if stride >= layers > 1:
            yield (
                f"depth_stride={stride}: with {layers} layers the first is the only source, as with a stride of "
                f"{layers}."
            )
        if stride == 0 and self.depth_window:
            yield f"depth_window={self.depth_window} has no effect: depth_stride=0 switches the mixing off."

    @property
    def depth_sources(self) -> tuple[tuple[int, ...], ...]:
        """For each layer of each pass, the indices of those whose keys and values it mixes in, ascending."""
        # fields may have changed since, without validation: `from_pretrained(path, depth_stride=...)` sets them late
        self.validate_depth_mixing()
        stride = self._resolved_depth_stride
        layers = self.num_loops * self.num_hidden_layers
        if stride == 0:
            return ((),) * layers
        return tuple(
            tuple(i for i in range(layer) if i % stride == 0 or i >= layer - self.depth_window)
            for layer in range(layers)
        )

    def get_text_config(self, decoder=None, encoder=None):
        """
        The configuration itself. To caches, which ask for that of the decoder, a looped model is one that has the
        layers of all passes.
        """
        config = super().get_text_config(decoder=decoder, encoder=encoder)
        if not decoder or self.num_loops == 1:
            return config
        unrolled = copy.copy(config)
        unrolled.num_loops = 1
        unrolled.num_hidden_layers = self.num_loops * self.num_hidden_layers
        # not every backbone has kinds of layers
        if getattr(self, "layer_types", None) is not None:
            unrolled.layer_types = self.num_loops * self.layer_types[: self.num_hidden_layers]
        return unrolled


CONFIGURATIONS = ConfigurationClasses(
    __name__,
    prefix="Depth",
    model_type="depth",
    fields=DepthAttentionFields,
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
__all__ = ["CONFIGURATIONS", "DepthAttentionFields"]
