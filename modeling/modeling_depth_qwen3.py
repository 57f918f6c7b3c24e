# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Qwen3 with Depth-Attention (arXiv 2606.05014).

Each layer mixes its value with the values of earlier layers at the same token, and keeps the mixed value in its own
slot of the ordinary KV cache. A layer needs nothing of the past but its own cache, so every kind of cache works.

The keys and values of the source layers travel outside every module: the model's forward keeps them for one call,
hands them to a layer as flat positional tensors and gets the layer's own back as flat outputs. So hooks,
activation checkpointing, offloading and FSDP see tensors only; they copy or detach what hides in containers.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
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
    eager_attention_forward,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from depthmix.configuration.configuration_depth_qwen3 import DepthQwen3Config
from depthmix.kernels.depth_dispatch import check_implementation
from depthmix.kernels.depth_value_mix_op import depth_value_weights

from .depth_modeling_common import (
    HOST_CACHE_NAME,
    AttentionProjections,
    DecoderInputs,
    DepthCausalLM,
    DepthModelOutputWithPast,
    DepthSequenceClassification,
    accepts_both_cache_names,
    apply_linears,
    apply_mlp,
    apply_norm,
    cache_update_keywords,
    refuse_pipeline_parallelism,
)


class DepthQwen3Attention(AttentionProjections, Qwen3Attention):
    """Qwen3's attention, over values that are mixed with those of the source layers."""

    def __init__(self, config: DepthQwen3Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.key_norm_position = config.key_norm_position
        check_implementation(config.depth_impl, "depth_value_mix")
        self.depth_impl = config.depth_impl
        # in one of the passes, and then it returns its key and value in all of them
        self.is_depth_source = any(
            source % config.num_hidden_layers == layer_idx for sources in config.depth_sources for source in sources
        )
        self.is_looped = config.num_loops > 1

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
        cache_slot: int | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor | None, ...]:
        """
        Returns the output `[B, T, hidden]`, the attention weights and the depth weights (each None if not asked for),
        and in a source layer also the key and the mixed value of these tokens, `[B, Hkv, T, d]`. In a looped model
        `cache_slot` counts the layers of all passes.
        """
        caches = past_key_values, kwargs.get("cache")
        if self.is_looped and (
            not all(isinstance(cache, Cache | None) for cache in caches) or "attention_instances" in kwargs
        ):
            raise ValueError(
                "num_loops > 1: continuous batching and attention functions of servers are not supported, since they "
                "keep the keys and values of one pass only."
            )
        query, key, value = self.project(hidden_states, position_embeddings, source_keys, source_values)
        depth_weights = None
        if output_depth_weights:
            depth_weights = depth_value_weights(query, [*source_keys, key], scaling=self.scaling)

        keys, values = key, value
        if past_key_values is not None:
            slot = self.layer_idx if cache_slot is None else cache_slot
            keys, values = past_key_values.update(key, value, slot, **cache_update_keywords(kwargs))

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
        attn_output = attn_output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        (attn_output,) = apply_linears((self.o_proj,), attn_output, self.depth_impl)
        if not self.is_depth_source:
            return attn_output, attn_weights, depth_weights
        if keys is not key and keys.shape == key.shape and keys.dtype == key.dtype and not torch.is_grad_enabled():
            # the cache has nothing but these tokens: readers share its copy
            key, value = keys, values
        elif not source_keys:
            # an unmixed value is a view of the projection's output, and FSDP2 warns of modules that return views
            value = value.clone()
        return attn_output, attn_weights, depth_weights, key, value


class DepthQwen3DecoderLayer(Qwen3DecoderLayer):
    """
    Qwen3's decoder layer. After the hidden states it takes the keys and values of its sources as positional tensors
    (`key_0, value_0, key_1, value_1, …`), and where it is a source itself it returns its own after the hidden states.
    """

    def __init__(self, config: DepthQwen3Config, layer_idx: int):
        GradientCheckpointingLayer.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = DepthQwen3Attention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.depth_impl = config.depth_impl
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

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
        hidden_states, _, _, *key_and_value = self.self_attn(
            hidden_states=apply_norm(self.input_layernorm, hidden_states, self.depth_impl),
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
        normalised = apply_norm(self.post_attention_layernorm, hidden_states, self.depth_impl)
        update, *_ = apply_mlp(self.mlp, normalised, self.depth_impl)
        hidden_states = hidden_states + update
        return (hidden_states, *key_and_value) if key_and_value else hidden_states


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


def check_looped_cache(cache: Cache | None, num_layers: int) -> None:
    """
    Raises:
        `ValueError`: if a cache that cannot grow has fewer layers than all passes together.
    """
    layers = getattr(cache, "layers", None)
    if layers and len(layers) < num_layers and getattr(cache, "layer_class_to_replicate", None) is None:
        raise ValueError(
            f"The cache has {len(layers)} layers: must have num_loops * num_hidden_layers = {num_layers}. For prefix "
            f"tuning: PrefixTuningConfig(num_layers={num_layers}). In a model, num_loops cannot be changed."
        )


class DepthQwen3Model(DecoderInputs, DepthQwen3PreTrainedModel, Qwen3Model):
    """
    The decoder without a head. Its forward takes what [`~transformers.Qwen3Model`] takes, the cache under either of
    its names, and `output_depth_weights`, and returns a [`DepthModelOutputWithPast`].
    """

    def __init__(self, config: DepthQwen3Config):
        if any(config.depth_sources) or config.num_loops > 1:
            refuse_pipeline_parallelism(config)
        # not Qwen3Model's, which would build and initialise stock layers first
        super(Qwen3Model, self).__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.depth_impl = config.depth_impl
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(DepthQwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.has_sliding_layers = "sliding_attention" in config.layer_types
        # fixed here, since early exit changes `config.num_hidden_layers` during a call
        self.depth_sources = config.depth_sources
        self.last_reader = {source: reader for reader, read in enumerate(self.depth_sources) for source in read}
        self.source_layers = {source % config.num_hidden_layers for source in self.last_reader}
        self.num_layers, self.num_loops = config.num_hidden_layers, config.num_loops
        self.post_init()

    @accepts_both_cache_names
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> DepthModelOutputWithPast:
        hidden_states, masks, shared = self.prepare(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache
        )
        kwargs.setdefault("output_depth_weights", self.config.output_depth_weights)

        keys_and_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        layers = [*self.layers[: self.config.num_hidden_layers]]
        # with fewer layers than there are, early exit leaves in the first pass
        passes = self.num_loops if len(layers) == self.num_layers else 1
        if passes > 1:
            check_looped_cache(shared[HOST_CACHE_NAME], passes * len(layers))
        for i, layer in enumerate(passes * layers):
            at = i % len(layers)
            if self.num_loops > 1:
                kwargs["cache_slot"] = i
            outputs = layer(
                hidden_states,
                *(tensor for source in self.depth_sources[i] for tensor in keys_and_values[source]),
                attention_mask=masks[self.config.layer_types[at]],
                **shared,
                **kwargs,
            )
            for source in self.depth_sources[i]:
                if self.last_reader[source] == i:
                    del keys_and_values[source]
            is_source = at in self.source_layers
            if isinstance(outputs, tuple) != is_source:
                raise RuntimeError(
                    f"Layer {at} is not the one that the model was built with: it "
                    f"{'returned no' if is_source else 'must not return its'} key and value. Replacing or "
                    "skipping layers and pipeline parallelism are not supported with depth mixing."
                )
            hidden_states, *key_and_value = outputs if is_source else (outputs,)
            if i in self.last_reader:
                keys_and_values[i] = key_and_value

        return DepthModelOutputWithPast(
            last_hidden_state=apply_norm(self.norm, hidden_states, self.depth_impl),
            **{HOST_CACHE_NAME: shared[HOST_CACHE_NAME] if use_cache else None},
        )


class DepthQwen3ForCausalLM(DepthCausalLM, DepthQwen3PreTrainedModel, Qwen3ForCausalLM):
    """
    The decoder with a language-model head. Its forward takes what [`~transformers.Qwen3ForCausalLM`] takes, the cache
    under either of its names, and `output_depth_weights`, and returns a [`DepthCausalLMOutputWithPast`].
    """

    model_class = DepthQwen3Model


class DepthQwen3ForSequenceClassification(DepthSequenceClassification, DepthQwen3PreTrainedModel):
    """The decoder with a classification head on the last token that is not padding."""

    model_class = DepthQwen3Model


__all__ = [
    "DepthQwen3ForCausalLM",
    "DepthQwen3ForSequenceClassification",
    "DepthQwen3Model",
    "DepthQwen3PreTrainedModel",
]
