# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Configuration of OLMo2 with Mixture-of-Depths Attention (arXiv 2603.15619)."""

from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.models.olmo2.configuration_olmo2 import Olmo2Config

from .configuration_depth_common import check_decoder_shape, take_model_type


@strict
class MoDAOlmo2Config(Olmo2Config):
    r"""
    Configuration of [`MoDAOlmo2Model`]: every field of [`~transformers.Olmo2Config`], and the following.

    The attention of a layer reads, besides the tokens that it sees, depth slots: pairs of a key and a value that the
    layers before it made for the same token. The variants of the paper's Table 3 are

    | | `moda_attn_slots` | `moda_ffn_slots` | `moda_attn_depth_proj` |
    |---|---|---|---|
    | row 3, "Depth KV" | `True` | `False` | `False` |
    | row 4, "+ Extra FFN KV Proj." | `True` | `True` | `False` |
    | row 5, "+ Extra Attn KV Proj." | `True` | `True` | `True` |

    and with no slots at all the model is plain OLMo2.

    Args:
        moda_attn_slots (`bool`, *optional*, defaults to `True`):
            Whether each attention makes a slot.
        moda_ffn_slots (`bool`, *optional*, defaults to `True`):
            Whether each feed-forward network makes a slot, by a projection of its input.
        moda_attn_depth_proj (`bool`, *optional*, defaults to `False`):
            Whether the slot of an attention comes from a projection of its own. Otherwise it is the key and the value
            that the attention has anyway.
        moda_depth_key_mode (`str`, *optional*, defaults to `"sequence"`):
            `"sequence"` reads slots as the paper describes it: their keys are finished as those of the sequence are,
            by the key norm of the layer that made them and the rotation of their position. `"reader_norm"` reads them
            as the released small language model does: keys that are normalised without a gain and not rotated, under
            the gain of the layer that reads them and its rotated query. The two are different functions.
        moda_norm_style (`str`, *optional*, defaults to `"olmo2"`):
            Where the norm of a sub-layer stands: `"olmo2"` in `x + norm(f(x))`, `"pre"` in `x + f(norm(x))`, `"post"`
            in `norm(x + f(x))`. It has OLMo2's name in all three.
        moda_depth_window (`int`, *optional*):
            Each layer reads so many of the most recent slots only. `None` stands for all.
        depth_impl (`str`, *optional*, defaults to `"auto"`):
            Implementation of the operations of [`~depthmix.kernels`]: `"triton"`, `"reference"` (stock modules and
            pure PyTorch) or `"auto"`.

    Raises:
        `huggingface_hub.errors.StrictDataclassError`: for a value of the wrong type or out of range; the message names
            the field, the value and the rule. (`ValueError` from the model, for one that was set later.)

    ```python
    >>> from depthmix import MoDAOlmo2Config

    >>> MoDAOlmo2Config(num_hidden_layers=4, moda_depth_window=3).depth_slots
    ((0, 0), (0, 2), (1, 4), (3, 6))
    ```
    """

    model_type = "moda_olmo2"
    # a stage of a pipeline would need the earlier layers' slots besides the hidden states
    base_model_pp_plan = None
    # the slots are whole on every device, as OLMo2's keys and values are
    base_model_tp_plan = Olmo2Config.base_model_tp_plan | {
        "layers.*.attn_depth_kv_proj": "colwise_gather_output",
        "layers.*.mlp_depth_kv_proj": "colwise_gather_output",
    }

    moda_attn_slots: bool = True
    moda_ffn_slots: bool = True
    moda_attn_depth_proj: bool = False
    moda_depth_key_mode: Literal["sequence", "reader_norm"] = "sequence"
    moda_norm_style: Literal["olmo2", "pre", "post"] = "olmo2"
    moda_depth_window: int | None = None
    depth_impl: Literal["auto", "triton", "reference"] = "auto"

    def __post_init__(self, **kwargs):
        take_model_type(self, kwargs)
        super().__post_init__(**kwargs)
        self.base_model_tp_plan = {
            name: style
            for name, style in self.base_model_tp_plan.items()
            if (self.moda_ffn_slots or not name.endswith("mlp_depth_kv_proj"))
            and (self.moda_attn_depth_proj or not name.endswith("attn_depth_kv_proj"))
        }

    @property
    def depth_slots_per_layer(self) -> int:
        """How many slots a layer makes; the last layer makes none."""
        return self.moda_attn_slots + self.moda_ffn_slots

    def validate_depth_mixing(self):
        """Part of the `@strict` validation, which runs on construction and before saving."""
        check_decoder_shape(self)
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
        # fields of other models, which caches and masks would take notice of
        window, kinds = getattr(self, "sliding_window", None), set(getattr(self, "layer_types", None) or ())
        if window is not None or kinds - {"full_attention"}:
            raise ValueError(
                f"sliding_window={window}, layer_types={sorted(kinds)}: must not be set, since OLMo2 attends to all "
                "earlier tokens in every layer."
            )

    @property
    def depth_slots(self) -> tuple[tuple[int, int], ...]:
        """For each layer, the first of the slots that it reads and the one after the last, in the order of making."""
        # fields may have changed since, without validation: `from_pretrained(path, moda_depth_window=...)` is late
        self.validate_depth_mixing()
        counts = [layer * self.depth_slots_per_layer for layer in range(self.num_hidden_layers)]
        window = self.moda_depth_window
        return tuple((0 if window is None else max(0, count - window), count) for count in counts)


__all__ = ["MoDAOlmo2Config"]
