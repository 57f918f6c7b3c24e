# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The dense decoder with depth-weighted averages (DenseFormer, arXiv 2402.02622).

After a layer the hidden states are a weighted sum of the embedding and all layers' outputs so far. What later layers
read travels beside the hidden states, outside every module, as flat positional tensors, and nothing of it outlives a
call.
"""

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from depthmix.configuration.configuration_denseformer import DenseFormerConfig
from depthmix.kernels.depth_average import depth_average
from depthmix.kernels.depth_implementations import check_implementation

from .depth_modeling_common import (
    HOST_CACHE_NAME,
    DepthModelOutputWithPast,
    MixingModule,
    accepts_both_cache_names,
    apply_norm,
    foreign_layer,
    refuse_depth_weights,
)
from .modeling_dense_decoder import (
    DenseDecoderAttention,
    DenseDecoderForCausalLM,
    DenseDecoderForSequenceClassification,
    DenseDecoderLayer,
    DenseDecoderModel,
    DenseDecoderPreTrainedModel,
)


class DepthAverage(MixingModule):
    """The weights of an average, oldest source first. They start as those of the last source alone."""

    def __init__(self, num_sources: int, impl: str):
        super().__init__()
        check_implementation(impl, "depth_average")
        self.impl = impl
        self.weight = nn.Parameter(self.identity(num_sources))

    @staticmethod
    def identity(num_sources: int) -> torch.Tensor:
        return (torch.arange(num_sources) == num_sources - 1).float()

    def forward(self, *sources: torch.Tensor) -> torch.Tensor:
        return depth_average(sources, self.weight, impl=self.impl)


class DenseFormerDecoderLayer(DenseDecoderLayer):
    """
    A pre-norm decoder layer and, if it has one, the average after it. After the hidden states it takes what the
    average reads besides the layer's own output, as positional tensors. It returns the average and, if a later one
    reads it, the layer's own output; without an average the latter alone.
    """

    def __init__(self, config: DenseFormerConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        sources = config.average_sources
        self.depth_average = DepthAverage(len(sources[layer_idx]), config.depth_impl) if sources[layer_idx] else None
        self.is_read_later = any(layer_idx + 1 in read for read in sources[layer_idx + 1 :])

    @accepts_both_cache_names
    def forward(
        self, hidden_states: torch.Tensor, *sources: torch.Tensor, past_key_values: Cache | None = None, **kwargs
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        hidden_states = hidden_states + self.attend(hidden_states, past_key_values=past_key_values, **kwargs)
        hidden_states = hidden_states + self.feed_forward(hidden_states)
        if self.depth_average is None:
            return hidden_states
        averaged = self.depth_average(*sources, hidden_states)
        return (averaged, hidden_states) if self.is_read_later else averaged


class DenseFormerPreTrainedModel(DenseDecoderPreTrainedModel):
    """What all models here share: their configuration, how averages start, and which outputs they record."""

    config: DenseFormerConfig
    config_class = DenseFormerConfig
    _no_split_modules = ["DenseFormerDecoderLayer"]
    model_tags = ["depthmix", "denseformer"]
    _can_record_outputs = {"hidden_states": DenseFormerDecoderLayer, "attentions": DenseDecoderAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, DepthAverage):
            init.copy_(module.weight, module.identity(module.weight.numel()))


class DenseFormerModel(DenseFormerPreTrainedModel, DenseDecoderModel):
    """
    The decoder without a head. Its forward takes what [`~transformers.Qwen3Model`] takes, the cache under either of
    its names, and returns a [`DepthModelOutputWithPast`]. Its `hidden_states` are what the layers get: the embedding,
    then averages.
    """

    layer_class = DenseFormerDecoderLayer

    def __init__(self, config: DenseFormerConfig):
        super().__init__(config)
        # fixed here, since early exit changes `config.num_hidden_layers` during a call
        self.earlier_sources = tuple(read[:-1] for read in config.average_sources)
        self.last_reader = {source: reader for reader, read in enumerate(self.earlier_sources) for source in read}
        self.returns_own = tuple(
            bool(read) and own in self.last_reader for own, read in enumerate(config.average_sources, start=1)
        )
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
        refuse_depth_weights(self.config, kwargs, "the averages' weights are parameters, `layers.*.depth_average`")
        hidden_states, masks, shared = self.prepare(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache
        )
        # 0 is the embedding, i the output of the i-th layer
        history = {0: hidden_states}
        for i, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            if getattr(layer, "layer_idx", i) != i:
                raise foreign_layer(i)
            outputs = layer(
                hidden_states,
                *(history[source] for source in self.earlier_sources[i]),
                attention_mask=masks[self.config.layer_types[i]],
                **shared,
                **kwargs,
            )
            if outputs is hidden_states or isinstance(outputs, tuple) != self.returns_own[i]:
                raise foreign_layer(i)
            hidden_states, history[i + 1] = outputs if self.returns_own[i] else (outputs, outputs)
            # what no later layer reads is let go
            history = {source: state for source, state in history.items() if self.last_reader.get(source, -1) > i}

        return DepthModelOutputWithPast(
            last_hidden_state=apply_norm(self.norm, hidden_states, self.config.depth_impl),
            **{HOST_CACHE_NAME: shared[HOST_CACHE_NAME] if use_cache else None},
        )


class DenseFormerForCausalLM(DenseFormerPreTrainedModel, DenseDecoderForCausalLM):
    """
    The decoder with a language-model head. Its forward takes what [`~transformers.Qwen3ForCausalLM`] takes, the cache
    under either of its names, and returns a [`DepthCausalLMOutputWithPast`].
    """

    model_class = DenseFormerModel


class DenseFormerForSequenceClassification(DenseFormerPreTrainedModel, DenseDecoderForSequenceClassification):
    """The decoder with a classification head on the last token that is not padding."""

    model_class = DenseFormerModel


__all__ = [
    "DenseFormerForCausalLM",
    "DenseFormerForSequenceClassification",
    "DenseFormerModel",
    "DenseFormerPreTrainedModel",
]
