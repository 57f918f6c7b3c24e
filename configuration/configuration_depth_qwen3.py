# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Qwen3 with Depth-Attention (arXiv 2606.05014)."""

import copy
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .configuration_depth_common import MAX_LAYERS, check_decoder_shape, take_model_type


@strict
class DepthQwen3Config(Qwen3Config):
    r"""
    Configuration of [`DepthQwen3Model`]: every field of [`~transformers.Qwen3Config`], and the following.

    Layer `l` mixes its value with the values of its source layers: the earlier layers `i` with
    `i % depth_stride == 0`, and the `depth_window` layers just before it (the source selection of the code released
    with arXiv 2606.05014; its 3B model has 48 layers and a stride of 24).

    Args:
        depth_stride (`int`, *optional*):
            Distance between source layers. 1 makes every earlier layer a source, 0 switches the mixing off (the
            model is then plain Qwen3, also where `depth_window` is set). `None` stands for half the number of layers
            in all passes and is replaced by that number on construction.
        depth_window (`int`, *optional*, defaults to 0):
            How many of the most recent layers are sources besides those of the stride.
        key_norm_position (`str`, *optional*, defaults to `"before_rope"`):
            `"before_rope"` normalises the key and then rotates it, as Qwen3 does; `"after_rope"` rotates first, as
            the released Depth-Attention 3B weights need. The query is normalised first in both.
        num_loops (`int`, *optional*, defaults to 1):
            How many times the stack of layers runs, with the same weights. For the mixing and for the KV cache each
            pass is a run of new layers: a looped model has `num_loops * num_hidden_layers` of them, each with a slot
            of its own, and stride and window are counted in these. There may be 4096.
        depth_impl (`str`, *optional*, defaults to `"auto"`):
            Implementation of the operations of [`~depthmix.kernels`]: `"triton"`, `"reference"` (stock modules and
            pure PyTorch) or `"auto"`.
        output_depth_weights (`bool`, *optional*, defaults to `False`):
            Whether the model returns the weights of the mixing by default.

    Raises:
        `huggingface_hub.errors.StrictDataclassError`: for a value of the wrong type or out of range; the message names
            the field, the value and the rule. (`ValueError` from the model, for one that was set later.)

    ```python
    >>> from depthmix import DepthQwen3Config

    >>> DepthQwen3Config(num_hidden_layers=8, depth_stride=4).depth_sources
    ((), (0,), (0,), (0,), (0,), (0, 4), (0, 4), (0, 4))
    >>> DepthQwen3Config(num_hidden_layers=3, num_loops=2, depth_stride=2).depth_sources
    ((), (0,), (0,), (0, 2), (0, 2), (0, 2, 4))
    ```
    """

    model_type = "depth_qwen3"
    # a stage of a pipeline would need the earlier layers' keys and values besides the hidden states
    base_model_pp_plan = None

    depth_stride: int | None = None
    depth_window: int = 0
    key_norm_position: Literal["before_rope", "after_rope"] = "before_rope"
    num_loops: int = 1
    depth_impl: Literal["auto", "triton", "reference"] = "auto"
    output_depth_weights: bool = False

    def __post_init__(self, **kwargs):
        take_model_type(self, kwargs)
        self.depth_stride = self._resolved_depth_stride
        super().__post_init__(**kwargs)

    @property
    def _resolved_depth_stride(self) -> int:
        return max(1, self.num_loops * self.num_hidden_layers // 2) if self.depth_stride is None else self.depth_stride

    def validate_depth_mixing(self):
        """Part of the `@strict` validation, which runs on construction and before saving."""
        check_decoder_shape(self)
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
        unrolled.layer_types = self.num_loops * self.layer_types
        return unrolled


__all__ = ["DepthQwen3Config"]
