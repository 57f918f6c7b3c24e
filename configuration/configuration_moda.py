# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Configurations of Mixture-of-Depths Attention (arXiv 2603.15619)."""

from dataclasses import dataclass, field
from typing import Literal

from .configuration_depth_common import DepthMixingFields, plan_with_whole_heads
from .depth_backbones import ConfigurationClasses


@dataclass(kw_only=True)
class MoDAFields(DepthMixingFields):
    r"""
    The attention of a layer reads, besides the tokens that it sees, depth slots: pairs of a key and a value that the
    layers before it made for the same token. The variants of the paper's Table 3 are

    | | `moda_attn_slots` | `moda_ffn_slots` | `moda_attn_depth_proj` |
    |---|---|---|---|
    | row 3, "Depth KV" | `True` | `False` | `False` |
    | row 4, "+ Extra FFN KV Proj." | `True` | `True` | `False` |
    | row 5, "+ Extra Attn KV Proj." | `True` | `True` | `True` |

    and with no slots at all the model is its vanilla one.

    Args:
        moda_attn_slots (`bool`, *optional*, defaults to `True`):
            Whether each attention makes a slot.
        moda_ffn_slots (`bool`, *optional*, defaults to `True`):
            Whether each feed-forward network makes a slot, by a projection of its input.
        moda_attn_depth_proj (`bool`, *optional*, defaults to `False`):
            Whether the slot of an attention comes from a projection of its own. Otherwise it is the key and the value
            that the attention has anyway.
        moda_depth_key_mode (`str`, *optional*, defaults to `"sequence"`):
            `"sequence"` reads slots as the paper describes it: their keys get the usual norm, that of the layer that
            made them, and the rotation of their position. `"reader_norm"` reads them as the released small language
            model does: keys that are normalised without a gain and not rotated, under the gain of the layer that reads
            them and its rotated query. The two are different functions, and the second needs a backbone that
            normalises keys.
        moda_depth_window (`int`, *optional*):
            Each layer reads so many of the most recent slots only. `None` stands for all.
        moda_gate (`bool`, *optional*, defaults to `False`):
            Whether each layer with slots has a number for each query head, its gate `g`: the attention is `g` times
            that with slots plus `1 - g` times that without. Gates start at 0, where the model is its vanilla one; at 1
            it is the same as without gates. Both hold bit for bit, where one kernel does not do both attentions.

    ```python
    >>> from depthmix import MoDAOlmo2Config

    >>> MoDAOlmo2Config(num_hidden_layers=4, moda_depth_window=3).depth_slots
    ((0, 0), (0, 2), (1, 4), (3, 6))
    ```
    """

    shape_fields = ("moda_ffn_slots", "moda_attn_depth_proj", "moda_gate")

    moda_attn_slots: bool = field(default=True, metadata={"help": "whether attentions make depth slots"})
    moda_ffn_slots: bool = field(default=True, metadata={"help": "whether feed-forward networks make depth slots"})
    moda_attn_depth_proj: bool = field(
        default=False, metadata={"help": "whether the slots of attentions come from projections of their own"}
    )
    moda_depth_key_mode: Literal["sequence", "reader_norm"] = field(
        default="sequence", metadata={"help": "how the keys of depth slots are finished"}
    )
    moda_depth_window: int | None = field(
        default=None, metadata={"help": "layers read so many of the most recent slots only"}
    )
    moda_gate: bool = field(
        default=False, metadata={"help": "whether slots have a gate for each query head, which starts closed"}
    )

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.base_model_tp_plan = self._tp_plan_with_whole_slots()

    def _tp_plan_with_whole_slots(self) -> dict[str, str]:
        """The slots are whole on every device, and so must be the keys and values that join them in a softmax."""
        plan = plan_with_whole_heads(self.base_model_tp_plan)
        if self.moda_attn_depth_proj:
            plan["layers.*.attn_depth_kv_proj"] = "colwise_gather_output"
        if self.moda_ffn_slots:
            plan["layers.*.mlp_depth_kv_proj"] = "colwise_gather_output"
        return plan

    @property
    def depth_slots_per_layer(self) -> int:
        """How many slots a layer makes; the last layer makes none."""
        return self.moda_attn_slots + self.moda_ffn_slots

    def validate_depth_mixing(self):
        """Part of the `@strict` validation, which runs on construction and before saving."""
        super().validate_depth_mixing()
        if self.moda_attn_depth_proj and not self.moda_attn_slots:
            raise ValueError(
                "moda_attn_depth_proj=True: must be False with moda_attn_slots=False, which leaves nothing to project."
            )
        window, made = self.moda_depth_window, self.depth_slots_per_layer
        if window is not None and window < max(made, 1):
            raise ValueError(
                f"moda_depth_window={window}: must be None or at least {max(made, 1)}, the number of slots that a "
                "layer makes, or some of them would never be read."
            )
        if made and self.attention_dropout:
            raise ValueError(
                f"attention_dropout={self.attention_dropout}: must be 0 with depth slots, since the joint softmax has "
                "no dropout."
            )
        if self.moda_depth_key_mode == "reader_norm" and self.depth_backbone.qk_norm is None:
            raise ValueError(
                f"moda_depth_key_mode='reader_norm': must be 'sequence' on {self.depth_backbone.model_type}, whose "
                "attention has no key norm that could read the slots."
            )

    def ineffective_values(self):
        if self.depth_slots_per_layer == 0:
            if self.moda_depth_window is not None:
                yield f"moda_depth_window={self.moda_depth_window} has no effect: there are no depth slots."
            if self.moda_depth_key_mode != "sequence":
                yield f"moda_depth_key_mode={self.moda_depth_key_mode!r} has no effect: there are no depth slots."

    @property
    def depth_slots(self) -> tuple[tuple[int, int], ...]:
        """For each layer, the first of the slots that it reads and the one after the last, in the order of making."""
        # fields may have changed since, without validation: `from_pretrained(path, moda_depth_window=...)` is late
        self.validate_depth_mixing()
        counts = [layer * self.depth_slots_per_layer for layer in range(self.num_hidden_layers)]
        window = self.moda_depth_window
        return tuple((0 if window is None else max(0, count - window), count) for count in counts)


@dataclass(kw_only=True)
class MoDAOlmo2Fields(MoDAFields):
    moda_norm_style: Literal["olmo2", "pre", "post"] = "olmo2"


MoDAOlmo2Fields.__doc__ = (MoDAFields.__doc__ or "").replace(
    "        moda_depth_window (",
    """        moda_norm_style (`str`, *optional*, defaults to `"olmo2"`):
            Where the norm of a sub-layer stands: `"olmo2"` in `x + norm(f(x))`, `"pre"` in `x + f(norm(x))`, `"post"`
            in `norm(x + f(x))`. It has OLMo2's name in all three.
        moda_depth_window (""",
)

CONFIGURATIONS = ConfigurationClasses(
    __name__,
    prefix="MoDA",
    model_type="moda",
    fields=MoDAFields,
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
    special_fields={"olmo2": MoDAOlmo2Fields},
)
__getattr__ = CONFIGURATIONS.module_getattr()
__all__ = ["CONFIGURATIONS", "MoDAFields"]
