# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Depth-weighted averages (DenseFormer, arXiv 2402.02622).

After a layer the hidden states are a weighted sum of the embedding and all layers' outputs so far.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from depthmix.configuration.configuration_denseformer import CONFIGURATIONS
from depthmix.kernels.depth_average_op import depth_average
from depthmix.kernels.depth_dispatch import check_implementation

from .decoder_layers import DecoderLayer
from .depth_decoder import DepthDecoderModel, DepthPreTrainedModel, Ledger, ModelClasses
from .mixing_modules import MixingModule, mixing_dtype
from .transformers_versions import accepts_both_cache_names


class DepthAverage(MixingModule):
    """The weights of an average, oldest source first. They start as those of the last source alone."""

    def __init__(self, num_sources: int, impl: str):
        super().__init__()
        check_implementation(impl, "depth_average")
        self.impl = impl
        self.weight = nn.Parameter(self.identity(num_sources))

    @staticmethod
    def identity(num_sources: int) -> torch.Tensor:
        return (torch.arange(num_sources) == num_sources - 1).to(mixing_dtype())

    def forward(self, *sources: torch.Tensor) -> torch.Tensor:
        """The weighted sum `[B, T, hidden]` of the sources, each of this shape, in their dtype."""
        return depth_average(sources, self.weight, impl=self.impl)


class DenseFormerLayer(DecoderLayer):
    """
    A decoder layer and, if it has one, the average after it. After the hidden states it takes what the average reads
    besides the layer's own output, as positional tensors. It returns the average and, if a later one reads it, the
    layer's own output; without an average the latter alone.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        sources = config.average_sources
        self.depth_average = DepthAverage(len(sources[layer_idx]), config.depth_impl) if sources[layer_idx] else None
        self.num_handed_on = max(len(sources[layer_idx]) - 1, 0)
        self.is_read_later = any(layer_idx + 1 in read for read in sources[layer_idx + 1 :])

    @accepts_both_cache_names
    def forward(
        self, hidden_states: torch.Tensor, *sources: torch.Tensor, past_key_values: Cache | None = None, **kwargs
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `[B, T, hidden]`):
                What the layer before returned.
            sources (`torch.Tensor` of shape `[B, T, hidden]`):
                What the average reads besides the layer's own output, oldest first.
            past_key_values, kwargs:
                The keywords of the attention, with the KV cache under either of its names.

        Returns:
            The average, or without one the layer's output, `[B, T, hidden]`; then its output, if it is read later.
        """
        self.check_handed_on(len(sources), self.num_handed_on)
        hidden_states = hidden_states + self.attend(hidden_states, past_key_values=past_key_values, **kwargs)
        hidden_states = hidden_states + self.feed_forward(hidden_states)
        if self.depth_average is None:
            return hidden_states
        averaged = self.depth_average(*sources, hidden_states)
        return (averaged, hidden_states) if self.is_read_later else averaged


class DenseFormerLedger(Ledger):
    """The embedding (0) and the outputs of the layers (i of the i-th), each as long as a later layer reads it."""

    needs_every_layer = True
    model: "DenseFormerDecoder"

    def __init__(self, model, embeddings, kwargs):
        super().__init__(model, embeddings, kwargs)
        self.history = {0: embeddings}

    def read(self, step: int) -> Sequence[torch.Tensor]:
        return self.hidden_states, *(self.history[source] for source in self.model.earlier_sources[step])

    def keep(self, step: int, outputs: tuple[torch.Tensor, ...]) -> None:
        outputs = self.expect(step, outputs, 2 if self.model.returns_own[step] else 1)
        self.hidden_states, self.history[step + 1] = outputs[0], outputs[-1]
        last_reader = self.model.last_reader
        self.history = {source: state for source, state in self.history.items() if last_reader.get(source, -1) > step}


class DenseFormerStart(DepthPreTrainedModel):
    """How averages start: as their last source alone."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, DepthAverage):
            init.copy_(module.weight, module.identity(module.weight.numel()))


class DenseFormerDecoder(DepthDecoderModel):
    __doc__ = f"""{DepthDecoderModel.__doc__}
    Its `hidden_states` are what the layers get: the embedding, then averages.
    """
    ledger_class = DenseFormerLedger
    no_depth_weights = "the averages' weights are parameters, `layers.*.depth_average`"

    def add_modules(self, config: PreTrainedConfig) -> None:
        self.earlier_sources = tuple(read[:-1] for read in config.average_sources)
        self.last_reader = {source: reader for reader, read in enumerate(self.earlier_sources) for source in read}
        self.returns_own = tuple(
            bool(read) and own in self.last_reader for own, read in enumerate(config.average_sources, start=1)
        )

    def handed_on_per_token(self) -> int:
        return len(self.last_reader) * self.config.hidden_size


MODELS = ModelClasses(
    __name__,
    CONFIGURATIONS,
    layer=DenseFormerLayer,
    model=DenseFormerDecoder,
    pretrained=DenseFormerStart,
    tags=("depthmix", "denseformer"),
)
__getattr__ = MODELS.module_getattr(globals())
__all__ = ["MODELS"]
