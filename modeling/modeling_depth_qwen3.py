# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Qwen3 with Depth-Attention (arXiv 2606.05014).

Each layer mixes its value with the values of earlier layers at the same token, and keeps the mixed value in its own
slot of the ordinary KV cache. A layer needs nothing of the past but its own cache, so every kind of cache works.

The keys and values of the source layers travel outside every module: the model's forward makes one dictionary per
call, a layer's `__call__` takes its sources from it as flat positional tensors and puts its own contribution in. So
hooks, activation checkpointing, offloading and FSDP see tensors only; they copy or detach what hides in containers.
"""

import functools
from collections.abc import Sequence

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3MLP,
    Qwen3Model,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from depthmix.configuration.configuration_depth_qwen3 import DepthQwen3Config
from depthmix.kernels.depth_value_mix import depth_value_mix, depth_value_weights

from .depth_modeling_common import (
    HOST_CACHE_NAME,
    DepthCausalLMForward,
    DepthModelOutputWithPast,
    accepts_both_cache_names,
)


class DepthQwen3Attention(Qwen3Attention):
    """Qwen3's attention, over values that are mixed with those of the source layers."""

    def __init__(self, config: DepthQwen3Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.key_norm_position = config.key_norm_position
        self.depth_impl = config.depth_impl

    @accepts_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        source_keys: Sequence[torch.Tensor] = (),
        source_values: Sequence[torch.Tensor] = (),
        output_depth_weights: bool = False,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """
        Returns the output `[B, T, hidden]`, the attention weights, the depth weights (each None if not asked for), and
        the key and mixed value of these tokens, `[B, Hkv, T, d]`.
        """
        input_shape = hidden_states.shape[:-1]
        head_shape = (*input_shape, -1, self.head_dim)

        query = self.q_norm(self.q_proj(hidden_states).view(head_shape)).transpose(1, 2)
        key = self.k_proj(hidden_states).view(head_shape)
        if self.key_norm_position == "before_rope":
            key = self.k_norm(key)
        query, key = apply_rotary_pos_emb(query, key.transpose(1, 2), *position_embeddings)
        if self.key_norm_position == "after_rope":
            key = self.k_norm(key)
        value = self.v_proj(hidden_states).view(head_shape).transpose(1, 2)

        depth_keys = [*source_keys, key]
        if source_keys:
            value = depth_value_mix(
                query, depth_keys, [*source_values, value], scaling=self.scaling, impl=self.depth_impl
            )
        depth_weights = depth_value_weights(query, depth_keys, scaling=self.scaling) if output_depth_weights else None

        keys, values = key, value
        if past_key_values is not None:
            keys, values = past_key_values.update(key, value, self.layer_idx, kwargs=kwargs)

        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attn_output, attn_weights = attention(
            self,
            query,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        attn_output = self.o_proj(attn_output.reshape(*input_shape, -1).contiguous())
        return attn_output, attn_weights, depth_weights, key, value


class DepthQwen3DecoderLayer(Qwen3DecoderLayer):
    """
    Qwen3's decoder layer. Besides the hidden states it takes the keys and values of its `depth_sources` as positional
    tensors (`key_0, value_0, key_1, value_1, …`), and it returns its own key and value where a later layer reads them.
    """

    def __init__(self, config: DepthQwen3Config, layer_idx: int):
        GradientCheckpointingLayer.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = DepthQwen3Attention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

        # fixed here, since early exit changes `config.num_hidden_layers` during a call
        sources = config.depth_sources
        last_reader = {source: reader for reader, read in enumerate(sources) for source in read}
        self.layer_idx = layer_idx
        self.depth_sources = sources[layer_idx]
        self.is_depth_source = layer_idx in last_reader
        self.last_read_sources = tuple(i for i in self.depth_sources if last_reader[i] == layer_idx)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *sources: torch.Tensor,
        depth_state: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
        **kwargs,
    ):
        """Exchanges tensors with `depth_state` (layer index to key and value), outside hooks and checkpointing."""
        if depth_state is not None:
            missing = [i for i in self.depth_sources if i not in depth_state]
            if missing:
                raise RuntimeError(
                    f"Layer {self.layer_idx} reads keys and values of layers {missing}, which did not run in this "
                    "call. Pipeline parallelism and skipping of layers are not supported with depth mixing."
                )
            sources = tuple(tensor for i in self.depth_sources for tensor in depth_state[i])
            for i in self.last_read_sources:
                del depth_state[i]
        outputs = super().__call__(hidden_states, *sources, **kwargs)
        if not self.is_depth_source:
            return outputs
        hidden_states, key, value = outputs
        if depth_state is not None:
            depth_state[self.layer_idx] = (key, value)
        return hidden_states

    @accepts_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        *sources: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        residual = hidden_states
        hidden_states, _, _, key, value = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            source_keys=sources[0::2],
            source_values=sources[1::2],
            **kwargs,
        )
        hidden_states = residual + hidden_states
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        if not self.is_depth_source:
            return hidden_states
        # an unmixed value is a view of the projection's output, and FSDP2 warns of modules that return views
        return hidden_states, key, value if self.depth_sources else value.clone()


class DepthQwen3PreTrainedModel(Qwen3PreTrainedModel):
    """What all models here share: their configuration, what they support, and which outputs they record."""

    config: DepthQwen3Config
    config_class = DepthQwen3Config
    _no_split_modules = ["DepthQwen3DecoderLayer"]
    _pp_plan = None
    model_tags = ["depthmix", "depth-attention"]
    _can_record_outputs = {
        "hidden_states": DepthQwen3DecoderLayer,
        "attentions": DepthQwen3Attention,
        "depth_weights": OutputRecorder(DepthQwen3Attention, index=2),
    }


class DepthQwen3Model(DepthQwen3PreTrainedModel, Qwen3Model):
    """
    The decoder without a head. Its forward takes what [`~transformers.Qwen3Model`] takes, the cache under either of
    its names, and `output_depth_weights`, and returns a [`DepthModelOutputWithPast`].
    """

    def __init__(self, config: DepthQwen3Config):
        # the host library splits layers into stages without asking for a plan
        if getattr(getattr(config, "distributed_config", None), "pp_size", 1) > 1 and any(config.depth_sources):
            raise ValueError(
                "Pipeline parallelism is not supported with depth mixing: a stage would need the keys and values of "
                "earlier stages' layers besides the hidden states."
            )
        # not Qwen3Model's, which would build and initialise stock layers first
        super(Qwen3Model, self).__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(DepthQwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.has_sliding_layers = "sliding_attention" in config.layer_types
        self.post_init()

    @accepts_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_depth_weights: bool | None = None,
        **kwargs,
    ) -> DepthModelOutputWithPast:
        if output_depth_weights is None:
            output_depth_weights = self.config.output_depth_weights
        outputs = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_depth_weights=output_depth_weights,
            depth_state={},
            return_dict=True,
            **{HOST_CACHE_NAME: past_key_values},
            **kwargs,
        )
        return DepthModelOutputWithPast(**outputs)


class DepthQwen3ForCausalLM(DepthCausalLMForward, DepthQwen3PreTrainedModel, Qwen3ForCausalLM):
    """
    The decoder with a language-model head. Its forward takes what [`~transformers.Qwen3ForCausalLM`] takes, the cache
    under either of its names, and `output_depth_weights`, and returns a [`DepthCausalLMOutputWithPast`].
    """

    def __init__(self, config: DepthQwen3Config):
        super(Qwen3ForCausalLM, self).__init__(config)
        self.model = DepthQwen3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class DepthQwen3ForSequenceClassification(GenericForSequenceClassification, DepthQwen3PreTrainedModel):
    """The decoder with a classification head on the last token that is not padding."""

    def __init__(self, config: DepthQwen3Config):
        # the generic constructor would look the base model up in the Auto classes, where remote code is not registered
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = DepthQwen3Model(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()

    @accepts_both_cache_names
    @functools.wraps(GenericForSequenceClassification.forward)
    def forward(self, *args, output_depth_weights: bool = False, **kwargs):
        if output_depth_weights:
            raise ValueError("output_depth_weights=True: a classifier returns no depth weights, but its `model` does.")
        return super().forward(*args, output_depth_weights=False, **kwargs)


__all__ = [
    "DepthQwen3ForCausalLM",
    "DepthQwen3ForSequenceClassification",
    "DepthQwen3Model",
    "DepthQwen3PreTrainedModel",
]
