# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The sub-layers of Kimi Linear, whose attentions are of two other kinds: latent attention, and a linear recurrence. They
are the stock modules; methods that work inside of a softmax attention do not take them.
"""

import functools
import inspect
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from .transformers_versions import CACHE_NAMES, HOST_CACHE_NAME


if TYPE_CHECKING:
    from .decoder_layers import DecoderLayer as Base
else:
    Base = object


class KimiLinearSubLayers(Base):
    """How a [`DecoderLayer`] makes and calls the sub-layers of Kimi Linear: a mixin that precedes a method's layer."""

    def make_sub_layers(self, config: PreTrainedConfig) -> tuple[nn.Module, nn.Module]:
        stock = config.depth_backbone.stock_class
        self.is_recurrent = config.layer_types[self.layer_idx] == "linear_attention"
        is_sparse = config.mlp_layer_types[self.layer_idx] == "sparse"
        attention = stock("DeltaAttention" if self.is_recurrent else "Attention")(config, self.layer_idx)
        return attention, stock("MoE" if is_sparse else "MLP")(config)

    def attend_normalised(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        for name in CACHE_NAMES:
            if name in kwargs:
                # mypy takes the `__hash__` of instances for that of their class
                kwargs[cache_name_of(type(self.self_attn))] = kwargs.pop(name)  # type: ignore[arg-type]
        if not self.is_recurrent:
            return super().attend_normalised(hidden_states, **kwargs)
        # it hands keywords on to its kernels, so it gets no more than the stock layer gives
        for name in ("position_ids", "use_cache"):
            kwargs.pop(name, None)
        return self.normalise(1, self.self_attn(hidden_states=hidden_states, **kwargs))


@functools.cache
def cache_name_of(module_class: type[nn.Module]) -> str:
    """The name under which a stock attention takes the cache, which differs between versions of transformers."""
    parameters = inspect.signature(module_class.forward).parameters
    return next(name for name in (HOST_CACHE_NAME, *CACHE_NAMES, "cache_params") if name in parameters)
