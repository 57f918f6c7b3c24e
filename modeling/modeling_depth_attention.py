# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Depth-Attention (arXiv 2606.05014).

Each layer mixes its value with the values of earlier layers at the same token, and keeps the mixed value in its own
slot of the ordinary KV cache. A layer needs nothing of the past but its own cache, so every kind of cache works.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.attention.bias import CausalBias
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import OutputRecorder

from depthmix.configuration.configuration_depth_attention import CONFIGURATIONS
from depthmix.kernels.depth_dispatch import check_implementation
from depthmix.kernels.depth_value_mix_op import depth_value_weights

from .decoder_layers import DecoderAttention, DecoderLayer, biased_attention, eager_attention, head_size
from .depth_decoder import DepthDecoderModel, DepthPreTrainedModel, Ledger, ModelClasses
from .mixing_modules import MixingModule, mixing_dtype
from .transformers_versions import accepts_both_cache_names


# attention functions of servers, which keep keys and values by layer, not by layer and pass; and those of them that
# have a plugin of ours, which gives a layer one attention more for each later pass
SERVER_ATTENTIONS = ("sglang", "vllm", "vllm_mla")
SERVERS_WITH_PASSES: set[str] = set()


class DepthGate(MixingModule):
    """By how much the mix counts for each key-value head: 0 leaves the layer's own value, 1 is the whole mix."""

    is_gate = True

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_key_value_heads, dtype=mixing_dtype()))

    def forward(self) -> torch.Tensor:
        """The gate of each head, `[Hkv]`."""
        return self.weight


class DepthAttention(DecoderAttention):
    """Attention over values that are mixed with those of the source layers."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        check_implementation(config.depth_impl, "depth_value_mix")
        # a source in one of the passes returns its key and value in all of them
        self.is_depth_source = layer_idx in source_layers(config)
        self.is_looped = config.num_loops > 1
        self.later_passes: nn.ModuleList | None = None
        has_gate = config.depth_gate and layer_idx in mixing_layers(config)
        self.depth_gate = DepthGate(config) if has_gate else None

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
            not all(isinstance(cache, Cache | None) for cache in caches)
            or "attention_instances" in kwargs
            or (self.later_passes is None and self.config._attn_implementation in SERVER_ATTENTIONS)
        ):
            raise ValueError(
                "num_loops > 1: continuous batching and attention functions of servers are not supported, since they "
                "keep the keys and values of one pass only."
            )
        # called in every pass of a looped model, also in one without sources: sharded modules count their calls
        gate = None if self.depth_gate is None else self.depth_gate()
        query, key, value = self.finish(
            *self.project(hidden_states),
            position_embeddings,
            source_keys=source_keys,
            source_values=source_values,
            gate=gate,
        )
        depth_weights = None
        if output_depth_weights:
            gate = gate if source_keys else None
            depth_weights = depth_value_weights(query, [*source_keys, key], scaling=self.scaling, gate=gate)
        keys, values = self.remember(key, value, past_key_values, kwargs, cache_slot)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        if isinstance(attention_mask, CausalBias):
            attention = biased_attention
        reader = self.reader(cache_slot)
        attn_output, attn_weights = attention(
            reader, query, keys, values, attention_mask, scaling=self.scaling, **self.reading_options(kwargs)
        )
        attn_output = self.project_output(attn_output, query)
        if not self.is_depth_source:
            return attn_output, attn_weights, depth_weights
        if keys is not key and keys.shape == key.shape and keys.dtype == key.dtype and not torch.is_grad_enabled():
            # the cache has nothing but these tokens: readers share its copy
            key, value = keys, values
        elif not source_keys:
            # an unmixed value is a view of the projection's output, and FSDP2 warns of modules that return views
            value = value.clone()
        return attn_output, attn_weights, depth_weights, key, value

    def reader(self, cache_slot: int | None) -> nn.Module:
        """The module by which an attention function, if it is a server's, finds the cache of that slot."""
        if self.later_passes is None or cache_slot is None:
            return self
        passed = cache_slot // self.config.num_hidden_layers
        return self if passed == 0 else self.later_passes[passed - 1]


def source_layers(config: PreTrainedConfig) -> set[int]:
    """The layers that are a source of some layer, in whichever pass."""
    return {source % config.num_hidden_layers for sources in config.depth_sources for source in sources}


def mixing_layers(config: PreTrainedConfig) -> set[int]:
    """The layers that have sources, in whichever pass."""
    return {reader % config.num_hidden_layers for reader, sources in enumerate(config.depth_sources) if sources}


class DepthAttentionLayer(DecoderLayer):
    """
    A decoder layer with Depth-Attention. After the hidden states it takes the keys and values of its sources as
    positional tensors (`key_0, value_0, key_1, value_1, …`), and where it is a source itself it returns its own after
    the hidden states.
    """

    attention_class = DepthAttention

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # in the passes of a looped model they differ
        reads = config.depth_sources[layer_idx :: config.num_hidden_layers]
        self.num_handed_on = sorted({2 * len(sources) for sources in reads})

    @accepts_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        *sources: torch.Tensor,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `[B, T, hidden]`):
                What the layer before returned.
            sources (`torch.Tensor` of shape `[B, Hkv, T, d]`):
                Key and value of each source layer in turn.
            past_key_values, kwargs:
                The keywords of the attention, with the KV cache under either of its names.

        Returns:
            The hidden states `[B, T, hidden]`, and in a source layer its key and mixed value, `[B, Hkv, T, d]`.
        """
        self.check_handed_on(len(sources), *self.num_handed_on)
        update, _, _, *key_and_value = self.self_attn(
            hidden_states=self.normalise(0, hidden_states),
            past_key_values=past_key_values,
            source_keys=sources[0::2],
            source_values=sources[1::2],
            **kwargs,
        )
        hidden_states = hidden_states + self.normalise(1, update)
        hidden_states = hidden_states + self.feed_forward(hidden_states)
        return (hidden_states, *key_and_value) if key_and_value else hidden_states


class DepthAttentionLedger(Ledger):
    """The keys and values of source layers, each until its last reader has run."""

    model: "DepthAttentionDecoder"

    def __init__(self, model, embeddings, kwargs):
        super().__init__(model, embeddings, kwargs)
        self.keys_and_values: dict[int, Sequence[torch.Tensor]] = {}

    def read(self, step: int) -> Sequence[torch.Tensor]:
        sources = self.model.depth_sources[step]
        return self.hidden_states, *(tensor for source in sources for tensor in self.keys_and_values[source])

    def keep(self, step: int, outputs: tuple[torch.Tensor, ...]) -> None:
        is_source = self.model.returns_own[step]
        self.hidden_states, *key_and_value = self.expect(step, outputs, 3 if is_source else 1)
        for source in self.model.depth_sources[step]:
            if self.model.last_reader[source] == step:
                del self.keys_and_values[source]
        if step in self.model.last_reader:
            self.keys_and_values[step] = key_and_value

    def give(self, item: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.transpose(1, 2).flatten(2) for tensor in self.keys_and_values[item])

    def take(self, items: Mapping[int, tuple[torch.Tensor, ...]]) -> None:
        by_heads = self.model.config.num_key_value_heads, -1
        for item, tensors in items.items():
            self.keys_and_values[item] = [x.unflatten(2, by_heads).transpose(1, 2) for x in tensors]


class DepthAttentionStart(DepthPreTrainedModel):
    """How gates start: closed."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, DepthGate):
            init.zeros_(module.weight)


class DepthAttentionDecoder(DepthDecoderModel):
    __doc__ = DepthDecoderModel.__doc__
    ledger_class = DepthAttentionLedger

    @staticmethod
    def mixes_layers(config: PreTrainedConfig) -> bool:
        return any(config.depth_sources) or config.num_loops > 1

    def add_modules(self, config: PreTrainedConfig) -> None:
        implementation = config._attn_implementation
        if config.num_loops > 1 and implementation in SERVER_ATTENTIONS and implementation not in SERVERS_WITH_PASSES:
            raise ValueError(
                f"num_loops={config.num_loops}: must be 1 with attn_implementation={implementation!r}, since this "
                "server keeps the keys and values of one pass only. In vLLM, depthmix keeps all where it is installed."
            )
        self.depth_sources = config.depth_sources
        self.last_reader = {source: reader for reader, read in enumerate(self.depth_sources) for source in read}
        # in every pass, the layers that are a source in one
        sources = source_layers(config)
        self.returns_own = tuple(i in sources for i in range(config.num_hidden_layers)) * config.num_loops

    def handed_on(self) -> dict[int, tuple[int, frozenset[int]]]:
        reads = [*enumerate(self.depth_sources)]
        return {item: (item, frozenset(i for i, read in reads if item in read)) for item in self.last_reader}

    def item_widths(self) -> tuple[int, ...]:
        return (self.config.num_key_value_heads * head_size(self.config),) * 2


MODELS = ModelClasses(
    __name__,
    CONFIGURATIONS,
    layer=DepthAttentionLayer,
    model=DepthAttentionDecoder,
    pretrained=DepthAttentionStart,
    tags=("depthmix", "depth-attention"),
    recorded=(("depth_weights", OutputRecorder(DepthAttention, index=2)),),
)
__getattr__ = MODELS.module_getattr(globals())
__all__ = ["MODELS"]
