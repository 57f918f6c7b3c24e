# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Attention Residuals (arXiv 2603.15031).

A sub-layer reads no sum of all earlier outputs but a softmax-weighted average of sources at the same token, with a
learned query. The hidden states that travel from layer to layer are the running sum, the last of the sources; the
finished sources travel beside them.

The queries do not depend on the input. So the finished sources are mixed once for all sub-layers of a block (phase 1),
by the model if the parameters of these layers are at hand there. Where they are not (sharded or offloaded layer by
layer, wrapped by an adapter, about to be recomputed), each layer does the same for itself, with the same result.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from depthmix.configuration.configuration_attnres import CONFIGURATIONS
from depthmix.kernels.attn_res_op import (
    attn_res,
    attn_res_additive,
    attn_res_phase_1,
    attn_res_phase_2,
    attn_res_weights,
)
from depthmix.kernels.depth_dispatch import check_implementation

from .decoder_layers import DecoderLayer
from .depth_decoder import DepthDecoderModel, DepthPreTrainedModel, Ledger, ModelClasses
from .lent_weights import has_hooks, is_bare, runs_plainly
from .mixing_modules import MixingModule, mixing_dtype
from .transformers_versions import accepts_both_cache_names


class AttnResKeyNorm(MixingModule):
    """The gain of the RMS norm of a mixer's keys. The norm itself is part of the operation."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self) -> torch.Tensor:
        """The gain, `[hidden]`."""
        return self.weight


class AttnResSite(MixingModule):
    """The parameters of one place that reads a mix of sources. How they are read, a class derived from it says."""

    recency_bias: nn.Parameter | None

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        check_implementation(config.depth_impl, "attn_res")
        self.pseudo_query = nn.Parameter(torch.zeros(config.hidden_size))
        self.norm = AttnResKeyNorm(config.hidden_size)
        self.recency_bias_start = config.recency_bias_start
        # of shape [1], since FSDP2 shards no scalars
        bias = torch.full((1,), float(self.recency_bias_start), dtype=mixing_dtype())
        self.register_parameter("recency_bias", nn.Parameter(bias) if config.attnres_recency_bias else None)
        self.scale = config.attnres_scale
        self.eps = config.rms_norm_eps
        self.impl = config.depth_impl


class AttnResMixer(AttnResSite):
    """The mix of sources that one sub-layer, or the final norm, reads."""

    def forward(
        self,
        partial: torch.Tensor | None,
        update: torch.Tensor | None,
        sources: Sequence[torch.Tensor],
        phase_1: Sequence[torch.Tensor] = (),
        output_norm_weight: torch.Tensor | None = None,
        output_depth_weights: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        Args:
            partial, update (`torch.Tensor` of shape `[B, T, hidden]`, or `None`):
                The running sum and what is to be added to it; one of them may be missing.
            sources (sequence of `torch.Tensor` of shape `[B, T, hidden]`):
                The finished sources.
            phase_1 (pair of `torch.Tensor`, *optional*):
                What [`~depthmix.kernels.attn_res_phase_1`] gives for this mixer. Left out, it is computed.
            output_norm_weight (`torch.Tensor` of shape `[hidden]`, *optional*):
                Weight of an RMS norm that the mix goes through.
            output_depth_weights (`bool`, *optional*, defaults to `False`):
                Whether to return the weights of the sources.

        Returns:
            The new running sum and the mix, `[B, T, hidden]`, and the weights `[B, T, number of sources + 1]`, fp32,
            or None.
        """
        query, gain = self.pseudo_query, self.norm()
        options: dict[str, Any] = {"eps": self.eps, "impl": self.impl}
        if sources:
            if phase_1:
                output, log_sum_exp = phase_1
            else:
                (output,), (log_sum_exp,), _ = attn_res_phase_1(sources, [query], [gain], **options)
            partial, mixed = attn_res_phase_2(
                output,
                log_sum_exp,
                partial,
                update,
                query,
                gain,
                bias=self.recency_bias,
                num_sources=len(sources) + 1,
                sources=sources,
                scale=self.scale,
                output_norm_weight=output_norm_weight,
                **options,
            )
        else:
            assert partial is not None
            # the embedding, mixed with nothing; its parameters get a gradient of zero, without which DDP would wait
            mixed = attn_res(
                [partial], query, gain, bias=self.recency_bias, output_norm_weight=output_norm_weight, **options
            )
            if output_norm_weight is None:
                one = attn_res_weights([partial], query, gain, eps=self.eps, bias=self.recency_bias)
                mixed = mixed * one.to(mixed.dtype)
        weights = None
        if output_depth_weights:
            weights = attn_res_weights([*sources, partial], query, gain, eps=self.eps, bias=self.recency_bias)
        return partial, mixed, weights


class AttnResAddition(AttnResSite):
    """What one sub-layer reads with additive routing: the stream, and what the mix has beyond the mean."""

    def forward(
        self, stream: torch.Tensor, sources: Sequence[torch.Tensor], output_depth_weights: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            stream (`torch.Tensor` of shape `[B, T, hidden]`), sources (sequence of `torch.Tensor` of its shape):
                The residual stream, and what is mixed.
            output_depth_weights (`bool`, *optional*, defaults to `False`):
                Whether to return the weights of the sources.

        Returns:
            The sum `[B, T, hidden]`, and the weights `[B, T, number of sources]`, fp32, or None.
        """
        query, gain, options = self.pseudo_query, self.norm(), {"eps": self.eps, "bias": self.recency_bias}
        weights = attn_res_weights(sources, query, gain, **options) if output_depth_weights else None
        mixed = attn_res_additive(stream, sources, query, gain, scale=self.scale, impl=self.impl, **options)
        return mixed, weights


def is_bare_mixer(mixer: nn.Module) -> TypeGuard[AttnResMixer]:
    return (
        is_bare(mixer, AttnResMixer, "pseudo_query", "recency_bias")
        and is_bare(mixer.norm, AttnResKeyNorm, "weight")
        and not (has_hooks(mixer) or has_hooks(mixer.norm))
    )


def mix_for_all(
    mixers: Sequence[nn.Module], sources: Sequence[torch.Tensor]
) -> tuple[tuple[tuple[torch.Tensor, torch.Tensor], ...], Sequence[torch.Tensor]]:
    """
    Phase 1 for several mixers in one read of the sources, nothing if one of the mixers has to be called for it; and
    the sources, from where later readers shall have them.
    """
    bare = [mixer for mixer in mixers if is_bare_mixer(mixer)]
    if len(bare) < len(mixers):
        return (), sources
    outputs, log_sum_exps, sources = attn_res_phase_1(
        sources,
        [mixer.pseudo_query for mixer in bare],
        [mixer.norm.weight for mixer in bare],
        eps=bare[0].eps,
        impl=bare[0].impl,
    )
    return tuple(zip(outputs, log_sum_exps, strict=True)), sources


def mix_and_norm(
    mixer: nn.Module,
    norm: nn.Module | None,
    partial: torch.Tensor | None,
    update: torch.Tensor | None,
    sources: Sequence[torch.Tensor],
    phase_1: Sequence[torch.Tensor],
    output_depth_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """
    A mixer and the norm after it, if there is one, as one operation where nothing depends on the norm being called.
    The operation has one epsilon.
    """
    norm_weight = None
    if norm is not None and runs_plainly(norm) and norm.variance_epsilon == getattr(mixer, "eps", None):
        norm_weight = norm.weight
    partial, mixed, weights = mixer(partial, update, sources, phase_1, norm_weight, output_depth_weights)
    return partial, mixed if norm is None or norm_weight is not None else norm(mixed), weights


class AttnResLayer(DecoderLayer):
    """
    Two sub-layers. After the hidden states, which are the running sum, the layer takes the finished sources as
    positional tensors, and, where the model has mixed them already, the result for each of its two mixers
    (`output, log_sum_exp`). It returns the new running sum; then the blocks that end in it; then, if asked for, the
    weights of its two mixes.

    With additive routing the hidden states are the residual stream, and the sources are all that are mixed, the sum so
    far of the current block among them. The layer returns the new stream; then what takes the place of that sum, or
    comes after it where the block ends before the attention; then the weights. The first attention has nothing to mix.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_additive = config.attnres_routing == "additive"
        mixer_class: type[AttnResSite] = AttnResAddition if self.is_additive else AttnResMixer
        self.mixes_for_attention = layer_idx > 0 or not self.is_additive
        if self.mixes_for_attention:
            self.attn_mixer = mixer_class(config)
        self.mlp_mixer = mixer_class(config)
        counts = config.num_finished_sources[2 * layer_idx : 2 * layer_idx + 3]
        self.num_sources = counts[0]
        self.restarts = config.attnres_variant != "cumulative"
        self.num_handed_on = self.num_sources + (self.is_additive and self.restarts)
        # with the mixes of the attention, where it has sources, and of the feed-forward network
        self.num_with_mixes = self.num_sources + (4 if self.num_sources else 2)
        self.ends_block_before_attention = self.restarts and counts[1] > counts[0]
        self.ends_block_before_mlp = self.restarts and counts[2] > counts[1]

    @accepts_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        *depth_tensors: torch.Tensor,
        past_key_values: Cache | None = None,
        output_depth_weights: bool = False,
        **kwargs,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...] | None:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `[B, T, hidden]`):
                What the layer before returned.
            depth_tensors (`torch.Tensor`):
                The finished sources, each `[B, T, hidden]`, then for each mixer, where the model has mixed them, the
                mix `[B, T, hidden]` and its log-sum-exp `[B, T]`.
            output_depth_weights (`bool`, *optional*, defaults to `False`):
                Whether to return the weights of the two mixes.
            past_key_values, kwargs:
                The keywords of the attention, with the KV cache under either of its names.

        Returns:
            The running sum `[B, T, hidden]`; then the sources that ended, `[B, T, hidden]`; then the weights, fp32,
            `[B, T, number of sources]`. A tensor if it is one only.
        """
        if self.is_additive:
            self.check_handed_on(len(depth_tensors), self.num_handed_on)
            return self.add_to_stream(
                hidden_states, depth_tensors, output_depth_weights, past_key_values=past_key_values, **kwargs
            )
        self.check_handed_on(len(depth_tensors), self.num_handed_on, self.num_with_mixes)
        sources, phase_1 = depth_tensors[: self.num_sources], depth_tensors[self.num_sources :]
        if sources and not phase_1 and not self.ends_block_before_attention:
            results, _ = mix_for_all((self.attn_mixer, self.mlp_mixer), sources)
            phase_1 = sum(results, ())
        for_attention = 2 if sources else 0

        partial: torch.Tensor | None
        partial, mixed, attn_depth_weights = mix_and_norm(
            self.attn_mixer,
            self.norm_at(0),
            hidden_states,
            None,
            sources,
            phase_1[:for_attention],
            output_depth_weights,
        )
        update = self.attend_normalised(mixed, past_key_values=past_key_values, **kwargs)
        ended: tuple[torch.Tensor, ...] = ()
        if self.ends_block_before_attention:
            # FSDP2, which warns of modules that return views, makes one of what goes in
            is_view = not torch.compiler.is_compiling() and hidden_states._is_view()
            ended = (hidden_states.clone() if is_view else hidden_states,)
            # a block's sum starts in the dtype of the stream, which under autocast is not that of the update
            sources, update, partial = (*sources, partial), update.to(partial.dtype), None
        # what leaves the layer is the sum itself, not a view of it
        started = update if partial is None else None
        partial, mixed, mlp_depth_weights = mix_and_norm(
            self.mlp_mixer,
            self.norm_at(2),
            partial,
            update,
            sources,
            phase_1[for_attention:],
            output_depth_weights,
        )
        update = self.feed_forward_normalised(mixed)
        outputs: tuple[torch.Tensor | None, ...]
        if self.ends_block_before_mlp:
            outputs = update.to(partial.dtype), *ended, partial if started is None else started
        else:
            outputs = partial + update, *ended
        if output_depth_weights:
            outputs += (attn_depth_weights, mlp_depth_weights)
        return outputs if len(outputs) > 1 else outputs[0]

    def add_to_stream(
        self, stream: torch.Tensor, sources: Sequence[torch.Tensor], output_depth_weights: bool, **kwargs
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """The forward with additive routing; the keywords are those of the attention."""
        *finished, current = sources if self.restarts else (*sources, None)
        mixed, weights = stream, None
        if self.mixes_for_attention:
            # without restarts the stream itself is the last source
            mixed, weights = self.attn_mixer(
                stream, (*finished, stream if current is None else current), output_depth_weights
            )
        elif output_depth_weights:
            weights = stream.new_ones((*stream.shape[:-1], 1), dtype=torch.float32)
        depth_weights = [weights]
        update = self.attend_normalised(self.normalise(0, mixed), **kwargs).to(stream.dtype)
        stream = stream + update
        ended = []
        if self.ends_block_before_attention:
            finished, current = [*finished, current], update
        elif current is not None:
            current = current + update
        mixed, weights = self.mlp_mixer(
            stream, (*finished, stream if current is None else current), output_depth_weights
        )
        depth_weights.append(weights)
        update = self.feed_forward_normalised(self.normalise(2, mixed)).to(stream.dtype)
        stream = stream + update
        if self.ends_block_before_mlp:
            ended, current = [current], update
        elif current is not None:
            current = current + update
        outputs = (stream, *ended, *([] if current is None else [current]))
        outputs = (*outputs, *depth_weights) if output_depth_weights else outputs
        return outputs if len(outputs) > 1 else stream


class AttnResLedger(Ledger):
    """The finished sources, what phase 1 has made of them for the sites to come, and the depth weights."""

    needs_every_layer = True
    model: "AttnResDecoder"

    def __init__(self, model, embeddings, kwargs):
        super().__init__(model, embeddings, kwargs)
        self.output_depth_weights: bool = kwargs["output_depth_weights"]
        self.sources: Sequence[torch.Tensor] = ()
        # by site: two for each layer, its attention and its feed-forward network, and the final norm
        self.phase_1: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.depth_weights: list[torch.Tensor] = []

    def read(self, step: int) -> Sequence[torch.Tensor]:
        attention, mlp, counts = 2 * step, 2 * step + 1, self.model.num_sources
        # a snapshot of the stream
        if len(self.sources) < counts[attention]:
            self.sources = (*self.sources, self.hidden_states)
        if self.sources and attention not in self.phase_1:
            results, self.sources = self.mix_for_block(self.sources)
            self.phase_1 |= results
        self.finished = self.sources
        if counts[mlp] > len(self.sources):
            # a block that the attention still reads as the running sum
            results, self.finished = self.mix_for_block((*self.sources, self.hidden_states))
            self.phase_1 |= results
        self.is_mixed = mlp in self.phase_1
        own_results = [self.phase_1.pop(site, ()) for site in ((attention, mlp) if self.sources else (mlp,))]
        mixed = (tensor for result in own_results if all(own_results) for tensor in result)
        return self.hidden_states, *self.sources, *mixed

    def keep(self, step: int, outputs: tuple[torch.Tensor, ...]) -> None:
        num_ended = self.model.num_sources[2 * step + 2] - len(self.sources) if self.model.restarts else 0
        outputs = self.expect(step, outputs, 1 + num_ended + 2 * self.output_depth_weights)
        self.hidden_states, *others = outputs
        # where the layer itself mixes a block that it ends, this may have come to it through hooks
        num_known = len(self.finished) - len(self.sources) if self.is_mixed else 0
        self.sources = (*(self.finished if self.is_mixed else self.sources), *others[num_known:num_ended])
        self.depth_weights += others[num_ended:]
        self.last_site = 2 * step + 2

    def close(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        if len(self.sources) < self.model.num_sources[self.last_site]:
            self.sources = (*self.sources, self.hidden_states)
        _, hidden_states, weights = mix_and_norm(
            self.model.output_mixer,
            self.model.norm,
            self.hidden_states,
            None,
            self.sources,
            self.phase_1.get(2 * len(self.model.layers), ()),
            self.output_depth_weights,
        )
        return hidden_states, None if weights is None else (*self.depth_weights, weights)

    def give(self, item: int) -> tuple[torch.Tensor, ...]:
        return (self.sources[item],)

    def take(self, items: Mapping[int, tuple[torch.Tensor, ...]]) -> None:
        self.sources = tuple(tensor for item in sorted(items) for tensor in items[item])

    def mix_for_block(
        self, sources: Sequence[torch.Tensor]
    ) -> tuple[dict[int, tuple[torch.Tensor, torch.Tensor]], Sequence[torch.Tensor]]:
        """
        Phase 1 for all sites that have so many finished sources, by site; nothing if the layers have to do it for
        themselves. Also the sources as later readers shall read them, so that their gradients add up in the kernels.
        """
        model = self.model
        # a recomputed layer would keep the results as its inputs, and for a long prompt so many are too large
        is_recomputed = model.gradient_checkpointing and model.training
        if is_recomputed or not (torch.is_grad_enabled() or sources[0].shape[1] == 1):
            return {}, sources
        sites = [site for site, count in enumerate(model.num_sources) if count == len(sources)]
        mixers: list[nn.Module] = []
        for site in sites:
            if site == 2 * len(model.layers):
                mixers.append(model.output_mixer)
            elif is_bare(layer := model.layers[site // 2], model.layer_class):
                mixers.append(layer.mlp_mixer if site % 2 else layer.attn_mixer)
            else:
                return {}, sources
        results, sources = mix_for_all(mixers, sources)
        return dict(zip(sites, results, strict=False)), sources


class AdditiveLedger(Ledger):
    """The sources beside the residual stream, the last of them the sum so far of the current block."""

    needs_every_layer = True
    model: "AttnResDecoder"

    def __init__(self, model, embeddings, kwargs):
        super().__init__(model, embeddings, kwargs)
        self.output_depth_weights: bool = kwargs["output_depth_weights"]
        self.sources: Sequence[torch.Tensor] = (embeddings,)
        self.depth_weights: list[torch.Tensor] = []

    def read(self, step: int) -> Sequence[torch.Tensor]:
        if not self.model.restarts and len(self.sources) < self.model.num_sources[2 * step]:
            # a snapshot of the stream
            self.sources = (*self.sources, self.hidden_states)
        return self.hidden_states, *self.sources

    def keep(self, step: int, outputs: tuple[torch.Tensor, ...]) -> None:
        counts = self.model.num_sources[2 * step : 2 * step + 3]
        num_own = 1 + counts[2] - counts[1] if self.model.restarts else 0
        outputs = self.expect(step, outputs, 1 + num_own + 2 * self.output_depth_weights)
        self.hidden_states = outputs[0]
        ends_before_attention = not self.model.restarts or counts[1] > counts[0]
        kept = self.sources if ends_before_attention else self.sources[:-1]
        self.sources = (*kept, *outputs[1 : 1 + num_own])
        self.depth_weights += outputs[1 + num_own :]

    def close(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        hidden_states, _ = super().close()
        return hidden_states, tuple(self.depth_weights) if self.output_depth_weights else None


class AttnResStart(DepthPreTrainedModel):
    """How mixers start: queries at zero, gains at one, biases as the configuration says."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, AttnResSite):
            init.zeros_(module.pseudo_query)
            if module.recency_bias is not None:
                init.constant_(module.recency_bias, module.recency_bias_start)
        elif isinstance(module, AttnResKeyNorm):
            init.ones_(module.weight)


class AttnResDecoder(DepthDecoderModel):
    __doc__ = f"""{DepthDecoderModel.__doc__}
    Its `hidden_states` are the running sums that the layers get, the embedding first, and last the final state: mixed
    and normalised. With additive routing they are the residual stream, as in the vanilla model.
    """
    ledger_class = AttnResLedger
    layer_class: ClassVar[type[AttnResLayer]]

    def add_modules(self, config: PreTrainedConfig) -> None:
        self.is_additive = config.attnres_routing == "additive"
        # what is added to the stream is in it already when the final norm reads it
        if not self.is_additive:
            self.output_mixer = AttnResMixer(config)
        self.num_sources = config.num_finished_sources
        self.restarts = config.attnres_variant != "cumulative"

    def open_ledger(self, embeddings: torch.Tensor, kwargs: dict[str, Any]) -> Ledger:
        if self.is_additive:
            return AdditiveLedger(self, embeddings, kwargs)
        return super().open_ledger(embeddings, kwargs)

    def handed_on(self) -> dict[int, tuple[int, frozenset[int]]]:
        if self.is_additive:
            raise NotImplementedError('attnres_routing="additive" also hands on the sum so far of the current block.')
        layers, items = len(self.layers), {}
        for item in range(self.num_sources[-1]):
            # the first site that reads it; a block is returned by the layer before, a snapshot taken by the one after
            site = sum(count <= item for count in self.num_sources)
            maker = (site - 1) // 2 if self.restarts else site // 2
            items[item] = maker, frozenset(range(maker, layers + 1))
        return items

    def item_widths(self) -> tuple[int, ...]:
        return (self.config.hidden_size,)

    def handed_on_per_token(self) -> int:
        return (1 + max(self.num_sources)) * self.config.hidden_size


MODELS = ModelClasses(
    __name__,
    CONFIGURATIONS,
    layer=AttnResLayer,
    model=AttnResDecoder,
    pretrained=AttnResStart,
    tags=("depthmix", "attention-residuals"),
)
__getattr__ = MODELS.module_getattr(globals())
__all__ = ["MODELS"]
