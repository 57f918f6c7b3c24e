# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Manifold-constrained hyper-connections (mHC, arXiv 2512.24880).

The hidden states that travel from layer to layer are several residual streams, `[B, T, streams, hidden]`. They start
as copies of the embedding, and the final norm reads an average of them.
"""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from depthmix.configuration.configuration_mhc import CONFIGURATIONS
from depthmix.kernels.depth_dispatch import check_implementation
from depthmix.kernels.hyper_connection_op import hyper_connection_read, hyper_connection_write, stream_readout

from .decoder_layers import DecoderLayer
from .depth_decoder import DepthDecoderModel, DepthPreTrainedModel, Ledger, ModelClasses
from .transformers_versions import accepts_both_cache_names


# the start of the residual matrix: this on the diagonal, and the rest of one beside it
DIAGONAL_START = 0.99


class MHCConnection(nn.Module):
    """
    How a sub-layer reads the residual streams, and how its output is written to them.

    The projection starts at zero, so that the maps start as constants. With them and equal streams the model is the
    vanilla decoder: it reads the average, and each stream gets the output once.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        check_implementation(config.depth_impl, "hyper_connection_read")
        self.impl = config.depth_impl
        streams, self.alpha_start = config.mhc_num_streams, config.mhc_alpha_init
        self.eps = config.rms_norm_eps
        self.iterations = config.mhc_sinkhorn_iters
        self.order = config.mhc_sinkhorn_order
        self.norm_weight = nn.Parameter(torch.ones(streams * config.hidden_size))
        self.projection = nn.Parameter(torch.zeros(streams * (streams + 2), streams * config.hidden_size))
        # of shape [1], since FSDP2 shards no scalars
        self.alpha_pre, self.alpha_post, self.alpha_residual = (
            nn.Parameter(torch.full((1,), float(self.alpha_start))) for _ in range(3)
        )
        self.pre_logits = nn.Parameter(torch.full((streams,), -math.log(streams - 1)))
        self.post_logits = nn.Parameter(torch.zeros(streams))
        self.residual_logits = nn.Parameter(self.near_identity(streams))

    @staticmethod
    def near_identity(streams: int) -> torch.Tensor:
        beside = math.log((1 - DIAGONAL_START) / (streams - 1))
        return beside + (math.log(DIAGONAL_START) - beside) * torch.eye(streams)

    def reset(self):
        """What a new connection starts from."""
        init.ones_(self.norm_weight)
        init.zeros_(self.projection)
        for alpha in (self.alpha_pre, self.alpha_post, self.alpha_residual):
            init.constant_(alpha, self.alpha_start)
        streams = self.pre_logits.numel()
        init.constant_(self.pre_logits, -math.log(streams - 1))
        init.zeros_(self.post_logits)
        init.copy_(self.residual_logits, self.near_identity(streams))

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        What the sub-layer reads, `[B, T, hidden]`, the matrix that mixes the streams, `[B, T, streams, streams]`, how
        much of its output each of them gets, `[B, T, streams]`, and the streams as they are to be used from here on.
        """
        return hyper_connection_read(
            streams,
            self.norm_weight,
            self.projection,
            (self.alpha_pre, self.alpha_post, self.alpha_residual),
            (self.pre_logits, self.post_logits, self.residual_logits),
            eps=self.eps,
            iterations=self.iterations,
            order=self.order,
            impl=self.impl,
        )


class MHCReadout(nn.Module):
    """The average of the streams, with learned shares that start equal."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(config.mhc_num_streams))

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        return stream_readout(streams, self.logits)


class MHCLayer(DecoderLayer):
    """Two sub-layers, each of which reads the residual streams and is written to them by a connection of its own."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attn_connection = MHCConnection(config)
        self.mlp_connection = MHCConnection(config)

    @accepts_both_cache_names
    def forward(self, hidden_states: torch.Tensor, past_key_values: Cache | None = None, **kwargs) -> torch.Tensor:
        mixed, residual, post, hidden_states = self.attn_connection(hidden_states)
        update = self.attend(mixed, past_key_values=past_key_values, **kwargs)
        hidden_states = hyper_connection_write(hidden_states, update, residual, post, impl=self.depth_impl)
        mixed, residual, post, hidden_states = self.mlp_connection(hidden_states)
        update = self.feed_forward(mixed)
        return hyper_connection_write(hidden_states, update, residual, post, impl=self.depth_impl)


class MHCLedger(Ledger):
    """The residual streams in place of the hidden states."""

    def __init__(self, model, embeddings, kwargs):
        super().__init__(model, embeddings.unsqueeze(-2).expand(-1, -1, model.num_streams, -1), kwargs)

    def close(self) -> tuple[torch.Tensor, None]:
        self.hidden_states = self.model.stream_readout(self.hidden_states)
        return super().close()


class MHCStart(DepthPreTrainedModel):
    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, MHCConnection):
            module.reset()
        elif isinstance(module, MHCReadout):
            init.zeros_(module.logits)


class MHCDecoder(DepthDecoderModel):
    __doc__ = f"""{DepthDecoderModel.__doc__}
    Its `hidden_states` are the residual streams that the layers get, `[B, T, streams, hidden]`, and last the final
    state, `[B, T, hidden]`.
    """
    ledger_class = MHCLedger
    no_depth_weights = "its layers read streams, not earlier layers"

    def add_modules(self, config: PreTrainedConfig) -> None:
        self.num_streams = config.mhc_num_streams
        self.stream_readout = MHCReadout(config)


MODELS = ModelClasses(
    __name__,
    CONFIGURATIONS,
    layer=MHCLayer,
    model=MHCDecoder,
    pretrained=MHCStart,
    tags=("depthmix", "mhc"),
)
__getattr__ = MODELS.module_getattr(globals())
__all__ = ["MODELS"]
