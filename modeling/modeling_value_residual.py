# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Value residual learning (ResFormer, arXiv 2410.17897).

Each layer but the first adds the first layer's value at the same token to its own, with learned weights, and keeps the
sum in its slot of the ordinary KV cache.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.attention.bias import CausalBias
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthmix.configuration.configuration_value_residual import CONFIGURATIONS
from depthmix.kernels.depth_average_op import depth_average
from depthmix.kernels.depth_dispatch import check_implementation

from .decoder_layers import DecoderAttention, DecoderLayer, biased_attention, eager_attention
from .depth_decoder import DepthDecoderModel, DepthPreTrainedModel, Ledger, ModelClasses
from .mixing_modules import MixingModule, mixing_dtype
from .transformers_versions import accepts_both_cache_names


class ValueMix(MixingModule):
    """The weights of the first layer's value and of the layer's own."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.impl, self.start = config.depth_impl, config.value_weights_start
        start = torch.tensor(self.start, dtype=mixing_dtype())
        # fixed weights are no parameter, since loading makes every parameter one that is trained
        if config.value_residual_learnable:
            self.weight = nn.Parameter(start)
        else:
            self.register_buffer("weight", start)

    def forward(self, first_value: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the two values, each `[B, T, Hkv * d]`, in their dtype."""
        return depth_average((first_value, value), self.weight, impl=self.impl)


class ValueResidualAttention(DecoderAttention):
    """Attention over sums of the layer's own value and the first layer's."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        check_implementation(config.depth_impl, "depth_average")
        self.value_mix = ValueMix(config) if layer_idx > 0 else None

    @accepts_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        first_value: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor | None, ...]:
        """
        Returns the output `[B, T, hidden]`, the attention weights (None if not asked for), and in the first layer the
        value that the others read, `[B, T, Hkv * d]`.
        """
        query, key, value = self.project(hidden_states)
        if self.value_mix is not None:
            value = self.value_mix(first_value, value)
        query, key, heads = self.finish(query, key, value, position_embeddings)
        keys, values = self.remember(key, heads, past_key_values, kwargs)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        if isinstance(attention_mask, CausalBias):
            attention = biased_attention
        attn_output, attn_weights = attention(
            self, query, keys, values, attention_mask, scaling=self.scaling, **self.reading_options(kwargs)
        )
        attn_output = self.project_output(attn_output, query)
        return (attn_output, attn_weights) if self.value_mix is not None else (attn_output, attn_weights, value)


class ValueResidualLayer(DecoderLayer):
    """A decoder layer that takes the first layer's value after the hidden states; the first one returns it there."""

    attention_class = ValueResidualAttention

    @accepts_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        first_value: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `[B, T, hidden]`):
                What the layer before returned.
            first_value (`torch.Tensor` of shape `[B, T, Hkv * d]`, *optional*):
                The first layer's value, in all other layers.
            past_key_values, kwargs:
                The keywords of the attention, with the KV cache under either of its names.

        Returns:
            The hidden states `[B, T, hidden]`, and in the first layer its value `[B, T, Hkv * d]`.
        """
        self.check_handed_on(int(first_value is not None), int(self.layer_idx > 0))
        update, _, *value = self.self_attn(
            hidden_states=self.normalise(0, hidden_states),
            past_key_values=past_key_values,
            first_value=first_value,
            **kwargs,
        )
        hidden_states = hidden_states + self.normalise(1, update)
        hidden_states = hidden_states + self.feed_forward(hidden_states)
        return (hidden_states, *value) if value else hidden_states


class ValueResidualLedger(Ledger):
    """The first layer's value."""

    def read(self, step: int) -> Sequence[torch.Tensor]:
        return (self.hidden_states, self.first_value) if step > 0 else (self.hidden_states,)

    def keep(self, step: int, outputs: tuple[torch.Tensor, ...]) -> None:
        self.hidden_states, *value = self.expect(step, outputs, 1 if step > 0 else 2)
        if value:
            (self.first_value,) = value


class ValueResidualStart(DepthPreTrainedModel):
    """How the weights of values start: as the configuration says."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, ValueMix):
            init.copy_(module.weight, torch.tensor(module.start))


class ValueResidualDecoder(DepthDecoderModel):
    __doc__ = DepthDecoderModel.__doc__
    ledger_class = ValueResidualLedger
    no_depth_weights = "its weights are parameters, `layers.*.self_attn.value_mix`"


MODELS = ModelClasses(
    __name__,
    CONFIGURATIONS,
    layer=ValueResidualLayer,
    model=ValueResidualDecoder,
    pretrained=ValueResidualStart,
    tags=("depthmix", "value-residual"),
)
__getattr__ = MODELS.module_getattr(globals())
__all__ = ["MODELS"]
