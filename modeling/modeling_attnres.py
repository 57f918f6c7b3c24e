# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The dense decoder with Attention Residuals (arXiv 2603.15031).

A sub-layer reads no sum of all earlier outputs but a mix of sources at the same token, which a learned query weighs.
The hidden states that travel from layer to layer are the running sum, the last of the sources; the finished sources
travel beside them as flat positional tensors, outside every module, and nothing of them outlives a call.

The queries do not depend on the input. So the finished sources are mixed once for all sub-layers of a block (phase 1),
by the model if the parameters of these layers are at hand there. Where they are not (sharded or offloaded layer by
layer, wrapped by an adapter, about to be recomputed), each layer does the same for itself, with the same result.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from depthmix.configuration.configuration_attnres import AttnResConfig
from depthmix.kernels.attn_res import attn_res, attn_res_phase_1, attn_res_phase_2, attn_res_weights
from depthmix.kernels.depth_implementations import PLAIN_TENSORS, check_implementation

from .depth_modeling_common import (
    HOST_CACHE_NAME,
    DepthModelOutputWithPast,
    MixingModule,
    accepts_both_cache_names,
    apply_mlp,
    foreign_layer,
    has_hooks,
    has_its_forward,
    is_exactly,
    runs_plainly,
)
from .modeling_dense_decoder import (
    DenseDecoderAttention,
    DenseDecoderForCausalLM,
    DenseDecoderForSequenceClassification,
    DenseDecoderLayer,
    DenseDecoderModel,
    DenseDecoderPreTrainedModel,
)


class AttnResKeyNorm(MixingModule):
    """The gain of the RMS norm of a mixer's keys. The norm itself is part of the operation."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self) -> torch.Tensor:
        return self.weight


class AttnResMixer(MixingModule):
    """The mix of sources that one sub-layer, or the final norm, reads."""

    def __init__(self, config: AttnResConfig):
        super().__init__()
        check_implementation(config.depth_impl, "attn_res")
        self.pseudo_query = nn.Parameter(torch.zeros(config.hidden_size))
        self.norm = AttnResKeyNorm(config.hidden_size)
        self.recency_bias_start = config.recency_bias_start
        # of shape [1], since FSDP2 shards no scalars
        bias = (
            nn.Parameter(torch.full((1,), float(self.recency_bias_start), dtype=torch.float32))
            if config.attnres_recency_bias
            else None
        )
        self.register_parameter("recency_bias", bias)
        self.scale = config.attnres_scale
        self.eps = config.rms_norm_eps
        self.impl = config.depth_impl

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
        options = {"eps": self.eps, "impl": self.impl}
        if sources:
            if not phase_1:
                (output,), (log_sum_exp,), _ = attn_res_phase_1(sources, [query], [gain], **options)
                phase_1 = output, log_sum_exp
            partial, mixed = attn_res_phase_2(
                *phase_1,
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


def is_bare(module: nn.Module, module_class: type[nn.Module], *parameters: str) -> bool:
    """
    Whether reading these parameters of a module, all it has, is as good as calling it. It is not where something has
    wrapped it (adapters, checkpointing), changed its class (FSDP2) or its forward (offloading), or partitioned its
    parameters, or where a hook sets them first (pruning) or changes what the module gets.
    """
    return (
        is_exactly(module, module_class)
        and has_its_forward(module)
        and not module._forward_pre_hooks
        and all(
            p is None or (type(p) in PLAIN_TENSORS and p.numel())
            for p in (getattr(module, name) for name in parameters)
        )
    )


def is_bare_mixer(mixer: nn.Module) -> bool:
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
    if not all(map(is_bare_mixer, mixers)):
        return (), sources
    outputs, log_sum_exps, sources = attn_res_phase_1(
        sources,
        [mixer.pseudo_query for mixer in mixers],
        [mixer.norm.weight for mixer in mixers],
        eps=mixers[0].eps,
        impl=mixers[0].impl,
    )
    return tuple(zip(outputs, log_sum_exps, strict=True)), sources


def mix_and_norm(
    mixer: nn.Module,
    norm: nn.Module,
    partial: torch.Tensor | None,
    update: torch.Tensor | None,
    sources: Sequence[torch.Tensor],
    phase_1: Sequence[torch.Tensor],
    output_depth_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """
    A mixer and the norm after it, as one operation where nothing depends on the norm being called. The operation has
    one epsilon.
    """
    norm_weight = None
    if runs_plainly(norm) and norm.variance_epsilon == getattr(mixer, "eps", None):
        norm_weight = norm.weight
    partial, mixed, weights = mixer(partial, update, sources, phase_1, norm_weight, output_depth_weights)
    return partial, norm(mixed) if norm_weight is None else mixed, weights


class AttnResDecoderLayer(DenseDecoderLayer):
    """
    Two sub-layers. After the hidden states, which are the running sum, the layer takes the finished sources as
    positional tensors, and, where the model has mixed them already, the result for each of its two mixers
    (`output, log_sum_exp`). It returns the new running sum; then the blocks that end in it; then, if asked for, the
    weights of its two mixes.
    """

    def __init__(self, config: AttnResConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attn_mixer = AttnResMixer(config)
        self.mlp_mixer = AttnResMixer(config)
        counts = config.num_finished_sources[2 * layer_idx : 2 * layer_idx + 3]
        self.num_sources = counts[0]
        restarts = config.attnres_variant != "cumulative"
        self.ends_block_before_attention = restarts and counts[1] > counts[0]
        self.ends_block_before_mlp = restarts and counts[2] > counts[1]

    @accepts_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        *depth_tensors: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        output_depth_weights: bool = False,
        **kwargs,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        sources, phase_1 = depth_tensors[: self.num_sources], depth_tensors[self.num_sources :]
        if sources and not phase_1 and not self.ends_block_before_attention:
            results, _ = mix_for_all((self.attn_mixer, self.mlp_mixer), sources)
            phase_1 = sum(results, ())
        for_attention = 2 if sources else 0

        partial, mixed, attn_depth_weights = mix_and_norm(
            self.attn_mixer,
            self.input_layernorm,
            hidden_states,
            None,
            sources,
            phase_1[:for_attention],
            output_depth_weights,
        )
        update, _ = self.self_attn(
            hidden_states=mixed,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        ended = ()
        if self.ends_block_before_attention:
            # FSDP2, which warns of modules that return views, makes one of what goes in
            is_view = not torch.compiler.is_compiling() and hidden_states._is_view()
            ended = (hidden_states.clone() if is_view else hidden_states,)
            # a block's sum starts in the dtype of the stream, which under autocast is not that of the update
            sources, partial, update = (*sources, partial), None, update.to(partial.dtype)
        # what leaves the layer is the sum itself, not a view of it
        started = update if partial is None else None
        partial, mixed, mlp_depth_weights = mix_and_norm(
            self.mlp_mixer,
            self.post_attention_layernorm,
            partial,
            update,
            sources,
            phase_1[for_attention:],
            output_depth_weights,
        )
        update, *_ = apply_mlp(self.mlp, mixed, self.depth_impl)
        if self.ends_block_before_mlp:
            outputs = update.to(partial.dtype), *ended, partial if started is None else started
        else:
            outputs = partial + update, *ended
        if output_depth_weights:
            outputs += (attn_depth_weights, mlp_depth_weights)
        return outputs if len(outputs) > 1 else outputs[0]


class AttnResPreTrainedModel(DenseDecoderPreTrainedModel):
    """What all models here share: their configuration, how mixers start, and which outputs they record."""

    config: AttnResConfig
    config_class = AttnResConfig
    _no_split_modules = ["AttnResDecoderLayer"]
    model_tags = ["depthmix", "attention-residuals"]
    _can_record_outputs = {"hidden_states": AttnResDecoderLayer, "attentions": DenseDecoderAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, AttnResMixer):
            init.zeros_(module.pseudo_query)
            if module.recency_bias is not None:
                init.constant_(module.recency_bias, module.recency_bias_start)
        elif isinstance(module, AttnResKeyNorm):
            init.ones_(module.weight)


class AttnResModel(AttnResPreTrainedModel, DenseDecoderModel):
    """
    The decoder without a head. Its forward takes what [`~transformers.Qwen3Model`] takes, the cache under either of
    its names, and `output_depth_weights`, and returns a [`DepthModelOutputWithPast`]. Its `hidden_states` are the
    running sums that the layers get, the embedding first, and last the final state: mixed and normalised.
    """

    layer_class = AttnResDecoderLayer

    def __init__(self, config: AttnResConfig):
        super().__init__(config)
        self.output_mixer = AttnResMixer(config)
        # fixed here, since early exit changes `config.num_hidden_layers` during a call
        self.num_sources = config.num_finished_sources
        self.restarts = config.attnres_variant != "cumulative"
        self.post_init()

    def mix_for_block(
        self, sources: Sequence[torch.Tensor]
    ) -> tuple[dict[int, tuple[torch.Tensor, torch.Tensor]], Sequence[torch.Tensor]]:
        """
        Phase 1 for all sites that have so many finished sources, by site, nothing if layers have to do it; and the
        sources, from where later readers shall have them.
        """
        # a recomputed layer would keep the results as its inputs, and for a long prompt so many are too large
        is_recomputed = self.gradient_checkpointing and self.training
        if is_recomputed or not (torch.is_grad_enabled() or sources[0].shape[1] == 1):
            return {}, sources
        sites = [site for site, count in enumerate(self.num_sources) if count == len(sources)]
        mixers = []
        for site in sites:
            if site == 2 * len(self.layers):
                mixers.append(self.output_mixer)
            elif is_bare(layer := self.layers[site // 2], AttnResDecoderLayer):
                mixers.append(layer.mlp_mixer if site % 2 else layer.attn_mixer)
            else:
                return {}, sources
        results, sources = mix_for_all(mixers, sources)
        return dict(zip(sites, results, strict=False)), sources

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
        output_depth_weights = bool(kwargs.pop("output_depth_weights", self.config.output_depth_weights))

        sources: Sequence[torch.Tensor] = ()
        phase_1: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        depth_weights: list[torch.Tensor] = []
        layers = self.layers[: self.config.num_hidden_layers]
        for i, layer in enumerate(layers):
            if getattr(layer, "layer_idx", i) != i:
                raise foreign_layer(i)
            attention, mlp = 2 * i, 2 * i + 1
            # a snapshot of the stream
            if len(sources) < self.num_sources[attention]:
                sources = (*sources, hidden_states)
            if sources and attention not in phase_1:
                results, sources = self.mix_for_block(sources)
                phase_1 |= results
            finished = sources
            if self.num_sources[mlp] > len(sources):
                # a block that the attention still reads as the running sum
                results, finished = self.mix_for_block((*sources, hidden_states))
                phase_1 |= results
            is_mixed = mlp in phase_1
            results = [phase_1.pop(site, ()) for site in ((attention, mlp) if sources else (mlp,))]
            outputs = layer(
                hidden_states,
                *sources,
                *(tensor for result in results if all(results) for tensor in result),
                attention_mask=masks[self.config.layer_types[i]],
                output_depth_weights=output_depth_weights,
                **shared,
                **kwargs,
            )
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            num_ended = self.num_sources[2 * i + 2] - len(sources) if self.restarts else 0
            if len(outputs) != 1 + num_ended + 2 * output_depth_weights or outputs[0] is hidden_states:
                raise foreign_layer(i)
            hidden_states, *others = outputs
            # where the layer itself mixes a block that it ends, this may have come to it through hooks
            num_known = len(finished) - len(sources) if is_mixed else 0
            sources = (*(finished if is_mixed else sources), *others[num_known:num_ended])
            depth_weights += others[num_ended:]

        if len(sources) < self.num_sources[2 * len(layers)]:
            sources = (*sources, hidden_states)
        _, hidden_states, weights = mix_and_norm(
            self.output_mixer,
            self.norm,
            hidden_states,
            None,
            sources,
            phase_1.get(2 * len(self.layers), ()),
            output_depth_weights,
        )
        return DepthModelOutputWithPast(
            last_hidden_state=hidden_states,
            depth_weights=(*depth_weights, weights) if output_depth_weights else None,
            **{HOST_CACHE_NAME: shared[HOST_CACHE_NAME] if use_cache else None},
        )


class AttnResForCausalLM(AttnResPreTrainedModel, DenseDecoderForCausalLM):
    """
    The decoder with a language-model head. Its forward takes what [`~transformers.Qwen3ForCausalLM`] takes, the cache
    under either of its names, and `output_depth_weights`, and returns a [`DepthCausalLMOutputWithPast`].
    """

    model_class = AttnResModel


class AttnResForSequenceClassification(AttnResPreTrainedModel, DenseDecoderForSequenceClassification):
    """The decoder with a classification head on the last token that is not padding."""

    model_class = AttnResModel


__all__ = [
    "AttnResForCausalLM",
    "AttnResForSequenceClassification",
    "AttnResModel",
    "AttnResPreTrainedModel",
]
