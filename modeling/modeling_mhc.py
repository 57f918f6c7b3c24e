# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Manifold-constrained hyper-connections (mHC, arXiv 2512.24880).

The hidden states that travel from layer to layer are several residual streams, `[B, T, streams, hidden]`. They start
as copies of the embedding, and the final norm reads an average of them.

In a new model the average of the streams is the residual stream of the vanilla decoder, but they are not equal: if all
connections treated all streams alike, so would all gradients, and no training could make the streams differ.
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
from .mixing_modules import MixingModule, mixing_dtype
from .transformers_versions import accepts_both_cache_names


# the start of the residual matrix: this on the diagonal, and the rest of one beside it
DIAGONAL_START = 0.99
# how far the shares of the streams start from equal ones, as a part of these
UNEQUAL_START = 0.5


def start_shares(streams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    With which weight a new model reads each stream, `[streams]` with the sum 1, and how much of a sub-layer's output
    it writes to each, `[streams]` with the mean 1.

    Writes differ within pairs of streams and reads between pairs. What the streams have beyond their average has
    opposite signs within a pair, and a read weighs both alike: so it gets the average. Two streams are one pair, and
    are read alike until the first step of training.
    """
    pairs = torch.arange(streams) // 2
    writes = 1 - 2 * (torch.arange(streams) % 2).to(mixing_dtype())
    if streams % 2:
        writes[-1] = 0
    reads = pairs.to(mixing_dtype()).mean() - pairs
    reads = reads / reads.abs().max().clamp(min=0.5)  # all zero with a single pair
    return (1 + UNEQUAL_START * reads) / streams, 1 + UNEQUAL_START * writes


class MHCConnection(MixingModule):
    """
    How a sub-layer reads the residual streams, and how its output is written to them.

    The projection starts at zero, so that the maps start as constants. With those of [`start_shares`] the model is the
    vanilla decoder.
    """

    decayed_parameters = ("projection",)

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        check_implementation(config.depth_impl, "hyper_connection_read")
        self.impl = config.depth_impl
        streams, self.alpha_start = config.mhc_num_streams, float(config.mhc_alpha_init)
        self.eps = config.rms_norm_eps
        self.iterations = config.mhc_sinkhorn_iters
        self.order = config.mhc_sinkhorn_order
        self.norm_weight = nn.Parameter(torch.ones(streams * config.hidden_size))
        self.projection = nn.Parameter(torch.zeros(streams * (streams + 2), streams * config.hidden_size))
        # of shape [1], since FSDP2 shards no scalars
        self.alpha_pre, self.alpha_post, self.alpha_residual = (
            nn.Parameter(torch.full((1,), self.alpha_start, dtype=mixing_dtype())) for _ in range(3)
        )
        reads, writes = start_shares(streams)
        self.pre_logits = nn.Parameter(torch.logit(reads))
        self.post_logits = nn.Parameter(torch.logit(writes / 2))
        self.residual_logits = nn.Parameter(self.near_identity(streams))

    @staticmethod
    def near_identity(streams: int) -> torch.Tensor:
        beside = math.log((1 - DIAGONAL_START) / (streams - 1))
        return beside + (math.log(DIAGONAL_START) - beside) * torch.eye(streams, dtype=mixing_dtype())

    def reset(self):
        """What a new connection starts from."""
        init.ones_(self.norm_weight)
        init.zeros_(self.projection)
        for alpha in (self.alpha_pre, self.alpha_post, self.alpha_residual):
            init.constant_(alpha, self.alpha_start)
        streams = self.pre_logits.numel()
        reads, writes = start_shares(streams)
        init.copy_(self.pre_logits, torch.logit(reads))
        init.copy_(self.post_logits, torch.logit(writes / 2))
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


class MHCReadout(MixingModule):
    """The average of the streams, with learned shares that start as those of the reads."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.logits = nn.Parameter(start_shares(config.mhc_num_streams)[0].log())

    def reset(self):
        """What a new readout starts from."""
        init.copy_(self.logits, start_shares(self.logits.numel())[0].log())

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """The average `[B, T, hidden]` of streams `[B, T, streams, hidden]`, in their dtype."""
        return stream_readout(streams, self.logits)


class MHCLayer(DecoderLayer):
    """Two sub-layers, each of which reads the residual streams and is written to them by a connection of its own."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attn_connection = MHCConnection(config)
        self.mlp_connection = MHCConnection(config)

    @accepts_both_cache_names
    def forward(self, hidden_states: torch.Tensor, past_key_values: Cache | None = None, **kwargs) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `[B, T, streams, hidden]`):
                The residual streams.
            past_key_values, kwargs:
                The keywords of the attention, with the KV cache under either of its names.

        Returns:
            The residual streams, `[B, T, streams, hidden]`.
        """
        mixed, residual, post, hidden_states = self.attn_connection(hidden_states)
        update = self.attend(mixed, past_key_values=past_key_values, **kwargs)
        hidden_states = hyper_connection_write(hidden_states, update, residual, post, impl=self.depth_impl)
        mixed, residual, post, hidden_states = self.mlp_connection(hidden_states)
        update = self.feed_forward(mixed)
        return hyper_connection_write(hidden_states, update, residual, post, impl=self.depth_impl)


class MHCLedger(Ledger):
    """The residual streams in place of the hidden states."""

    model: "MHCDecoder"

    def __init__(self, model, embeddings, kwargs):
        super().__init__(model, embeddings.unsqueeze(-2).expand(-1, -1, model.num_streams, -1), kwargs)

    def close(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        self.hidden_states = self.model.stream_readout(self.hidden_states)
        return super().close()


class MHCStart(DepthPreTrainedModel):
    """How connections and the readout start: see [`start_shares`]."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, (MHCConnection, MHCReadout)):
            module.reset()


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

    def handed_on_per_token(self) -> int:
        return self.num_streams * self.config.hidden_size


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
