# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The dense pre-norm decoder that Qwen3, Qwen2 and Llama share, without a way of connecting its layers: a family that
builds on it brings the decoder layer's forward and the base model's.
"""

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3ForCausalLM,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
)

from depthmix.configuration.configuration_dense_decoder import DenseDecoderConfig

from .depth_modeling_common import (
    AttentionProjections,
    DecoderInputs,
    DepthCausalLM,
    DepthSequenceClassification,
    accepts_both_cache_names,
    apply_linears,
    apply_mlp,
    apply_norm,
    cache_update_keywords,
    refuse_pipeline_parallelism,
)


class DenseDecoderAttention(AttentionProjections, nn.Module):
    """Grouped-query attention with rotary positions; biases, norms and their place are those of the configuration."""

    def __init__(self, config: DenseDecoderConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None
        self.key_norm_position = config.key_norm_position if config.use_qk_norm else None
        self.depth_impl = config.depth_impl

        query_size = config.num_attention_heads * self.head_dim
        key_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_output_bias)
        if config.use_qk_norm:
            self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    @accepts_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output `[B, T, hidden]` and the attention weights (None if not asked for)."""
        query, key, value = self.project(hidden_states, position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx, **cache_update_keywords(kwargs))
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attn_output, attn_weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        attn_output = attn_output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        (attn_output,) = apply_linears((self.o_proj,), attn_output, self.depth_impl)
        return attn_output, attn_weights


class DenseDecoderLayer(GradientCheckpointingLayer):
    """The two sub-layers of a decoder layer and the norms before them; a family writes the forward."""

    def __init__(self, config: DenseDecoderConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.depth_impl = config.depth_impl
        self.self_attn = DenseDecoderAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def attend(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """The update of the attention sub-layer, `[B, T, hidden]`; the keywords are those of the attention."""
        normalised = apply_norm(self.input_layernorm, hidden_states, self.depth_impl)
        return self.self_attn(hidden_states=normalised, **kwargs)[0]

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The update of the MLP sub-layer, `[B, T, hidden]`."""
        normalised = apply_norm(self.post_attention_layernorm, hidden_states, self.depth_impl)
        update, *_ = apply_mlp(self.mlp, normalised, self.depth_impl)
        return update


class DenseDecoderPreTrainedModel(Qwen3PreTrainedModel):
    """What all models on this backbone share: what they support."""

    config: DenseDecoderConfig
    _pp_plan = None


class DenseDecoderModel(DecoderInputs, DenseDecoderPreTrainedModel):
    """The backbone of a base model; a family sets `layer_class` and writes the forward."""

    layer_class: type[nn.Module]

    def __init__(self, config: DenseDecoderConfig):
        refuse_pipeline_parallelism(config)
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.has_sliding_layers = "sliding_attention" in config.layer_types


class DenseDecoderForCausalLM(DepthCausalLM, DenseDecoderPreTrainedModel, GenerationMixin):
    """A base model on this backbone with a language-model head."""

    _tied_weights_keys = Qwen3ForCausalLM._tied_weights_keys
    _tp_plan = Qwen3ForCausalLM._tp_plan
    _fsdp_plan = Qwen3ForCausalLM._fsdp_plan


class DenseDecoderForSequenceClassification(DepthSequenceClassification, DenseDecoderPreTrainedModel):
    """A base model on this backbone with a classification head on the last token that is not padding."""


__all__ = [
    "DenseDecoderAttention",
    "DenseDecoderForCausalLM",
    "DenseDecoderForSequenceClassification",
    "DenseDecoderLayer",
    "DenseDecoderModel",
    "DenseDecoderPreTrainedModel",
]
