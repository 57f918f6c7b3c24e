# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Configurations of Attention Residuals (arXiv 2603.15031)."""

from dataclasses import dataclass, field
from typing import Literal

from .configuration_depth_common import DepthMixingFields, check_number
from .depth_backbones import ConfigurationClasses


@dataclass(kw_only=True)
class AttnResFields(DepthMixingFields):
    r"""
    A decoder layer has two sub-layers, its attention and its MLP. What a sub-layer reads is not the sum of all earlier
    outputs but a mix of sources, weighted by a softmax over depth; one more mix stands before the final norm.

    Args:
        attnres_variant (`str`, *optional*, defaults to `"block"`):
            What the sources are. `"block"` (section 4 of the paper): the embedding, the sum of the outputs of each
            finished block of sub-layers, and the sum so far in the current block. `"full"` (section 3): the embedding
            and every earlier sub-layer's output, which are blocks of one. `"cumulative"` (the AttnRes-3B weights
            released with arXiv 2606.05014): the embedding, the whole residual stream as it was after each finished
            block, and the stream as it is.
        attnres_block_size (`int`, *optional*):
            Number of **sub-layers** in a block; the last block may be shorter. `None` stands for 8 blocks (for 1 where
            the variant is `"full"`) and is replaced by that number on construction.
        attnres_recency_bias (`bool`, *optional*, defaults to `False`):
            Whether each mix has a learned number that is added to the logit of its last source.
        attnres_recency_bias_init (`float`, *optional*):
            What this number starts at. `None` stands for 3.0 with the variant `"cumulative"`, as in its release, and
            for 0.0 with the others and with additive routing.
        attnres_scale (`str`, *optional*, defaults to `"mean"`):
            `"mean"` is the paper's weighted average. `"sum"` multiplies it by the number of sources: with
            pseudo-queries of zero, at which they start, the model then is the vanilla decoder. On backbones whose
            sub-layers read the stream without a norm (OLMo2, OLMo3), the two differ from the start. With additive
            routing it is the factor of what is added.
        attnres_routing (`str`, *optional*, defaults to `"replace"`):
            `"replace"` is the paper's: a sub-layer reads the mix. With `"additive"` it reads the ordinary residual
            stream, plus what the mix of the sources has beyond their mean (after arXiv 2605.18855, whose mix is not
            centred). At queries of zero nothing is added, so the model is the vanilla decoder with all variants and on
            all backbones, bit for bit; the final norm reads the stream.
        output_depth_weights (`bool`, *optional*, defaults to `False`):
            Whether the model returns the weights of the mixing by default.

    ```python
    >>> from depthmix import AttnResConfig

    >>> AttnResConfig(num_hidden_layers=4, attnres_block_size=4).num_finished_sources
    (0, 1, 1, 1, 1, 2, 2, 2, 2)
    ```
    """

    shape_fields = ("attnres_recency_bias", "attnres_routing")
    start_fields = ("attnres_recency_bias_init",)

    attnres_variant: Literal["block", "full", "cumulative"] = field(
        default="block", metadata={"help": "what the sources are"}
    )
    attnres_block_size: int | None = field(default=None, metadata={"help": "number of sub-layers in a block"})
    attnres_recency_bias: bool = field(
        default=False, metadata={"help": "whether the last source has a learned bias on its logit"}
    )
    attnres_recency_bias_init: float | int | None = None
    attnres_scale: Literal["mean", "sum"] = field(
        default="mean", metadata={"help": "the average of the sources, or that times their number"}
    )
    attnres_routing: Literal["replace", "additive"] = field(
        default="replace", metadata={"help": "whether a mix replaces the residual stream or is added to it"}
    )
    output_depth_weights: bool = False

    def __post_init__(self, **kwargs):
        self.attnres_block_size = self._resolved_block_size
        super().__post_init__(**kwargs)

    @property
    def _resolved_block_size(self) -> int:
        if self.attnres_block_size is not None:
            return self.attnres_block_size
        if self.attnres_variant == "full":
            return 1
        if self.attnres_variant == "cumulative":
            return 2 * -(-self.num_hidden_layers // 8)
        return -(-2 * self.num_hidden_layers // 8)

    def validate_depth_mixing(self):
        """Part of the `@strict` validation, which runs on construction and before saving."""
        super().validate_depth_mixing()
        check_number("attnres_recency_bias_init", self.attnres_recency_bias_init)
        size, variant = self._resolved_block_size, self.attnres_variant
        if size < 1:
            raise ValueError(
                f"attnres_block_size={size}: must be a positive number of sub-layers, or None for 8 blocks."
            )
        if variant == "full" and size != 1:
            raise ValueError(
                f"attnres_block_size={size}: must be 1 or None with attnres_variant='full', where every sub-layer is "
                "a source of its own."
            )
        if variant == "cumulative" and size % 2:
            raise ValueError(
                f"attnres_block_size={size}: must be even with attnres_variant='cumulative', whose blocks are "
                "layers of two sub-layers."
            )
        if variant == "cumulative" and self.attnres_scale == "sum":
            raise ValueError(
                "attnres_scale='sum': must be 'mean' with attnres_variant='cumulative', whose sources are sums of all "
                "that came before."
            )

    def ineffective_values(self):
        size, sub_layers = self._resolved_block_size, 2 * self.num_hidden_layers
        if size >= sub_layers > 1:
            yield (
                f"attnres_block_size={size}: no block is ever finished in {self.num_hidden_layers} layers, which have "
                f"{sub_layers} sub-layers. The only sources are the embedding and the running sum."
            )
        if self.attnres_recency_bias_init is not None and not self.attnres_recency_bias:
            yield (
                f"attnres_recency_bias_init={self.attnres_recency_bias_init} has no effect: with "
                "attnres_recency_bias=False there are no biases."
            )

    @property
    def recency_bias_start(self) -> float:
        """What the recency biases of a new model start at."""
        if self.attnres_recency_bias_init is not None:
            return float(self.attnres_recency_bias_init)
        return 3.0 if self.attnres_variant == "cumulative" and self.attnres_routing == "replace" else 0.0

    @property
    def num_finished_sources(self) -> tuple[int, ...]:
        """
        For each sub-layer, and last for the mix before the final norm, how many sources there are besides the running
        sum. Where the number is larger than it was one sub-layer before, a source was finished in between.
        """
        # fields may have changed since, without validation: `from_pretrained(path, attnres_block_size=...)` is late
        self.validate_depth_mixing()
        size = self._resolved_block_size
        sites = range(2 * self.num_hidden_layers + 1)
        if self.attnres_variant == "cumulative":
            return tuple(1 + site // size for site in sites)
        # a block's first sub-layer still mixes the last block as the running sum that it was
        return tuple(-(-site // size) for site in sites)


CONFIGURATIONS = ConfigurationClasses(
    __name__,
    prefix="AttnRes",
    model_type="attnres",
    fields=AttnResFields,
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
__all__ = ["CONFIGURATIONS", "AttnResFields"]
