# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Mixture-of-Depths Attention (arXiv 2603.15619).

The softmax of an attention layer runs over the tokens that it sees and over depth slots: keys and values that the
layers before it made for the token that asks. Slots are of the current call's tokens only, so nothing but the ordinary
KV cache outlives a call, and every kind of cache works.

The slots of a call are kept by a [`~depthmix.kernels.DepthStream`] that the ledger makes. A layer gets the stream's
handle, flat positional tensors, reads slots through it and returns those that it makes, as flat tensors too; the
ledger writes them. So a layer that is recomputed reads again and writes nothing.

Keys of slots are not rotated. Query and slot stand at the same position, where rotating both changes nothing: a query
without rotation reads keys without rotation.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.nn.attention.bias import CausalBias
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthmix.configuration.configuration_moda import CONFIGURATIONS
from depthmix.kernels.depth_dispatch import check_implementation, left_to_compiler, triton_obstacle, use_triton
from depthmix.kernels.depth_precision import accumulation_dtype
from depthmix.kernels.moda_attention_joint import merge_without_kernels
from depthmix.kernels.moda_stream import DepthStream, moda_attention_over_stream
from depthmix.kernels.norm_rotary_mix_op import norm_rotary_mix

from .decoder_layers import (
    DecoderAttention,
    DecoderLayer,
    biased_attention,
    eager_attention,
    repeat_heads,
    rotate,
)
from .depth_decoder import DepthDecoderModel, DepthPreTrainedModel, Ledger, ModelClasses
from .lent_weights import apply_mlp, apply_norm, runs_plainly
from .mixing_modules import MixingModule, mixing_dtype
from .transformers_versions import accepts_both_cache_names


ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")
# attention functions of servers which have a plugin of ours, that hands them each query twice
SERVER_IMPLEMENTATIONS: set[str] = set()
# The logit of a sink, a column of value zero that the second of the two queries also sees. It has to be above the
# log-sum-exp of the sequence: below it nearly nothing is left of what tells them apart.
SINK = 30.0
NO_SINK = -1e30


def eager_moda_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    depth_query: torch.Tensor,
    depth_keys: Sequence[torch.Tensor],
    depth_values: Sequence[torch.Tensor],
    attention_mask: torch.Tensor | None,
    scaling: float,
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The joint softmax in plain PyTorch, which keeps its weights.

    Args:
        query, depth_query (`torch.Tensor` of shape `[B, Hq, T, d]`):
            What asks the tokens and what asks the slots.
        key, value (`torch.Tensor` of shape `[B, Hkv, S, d]`):
            The tokens.
        depth_keys, depth_values (sequences of n `torch.Tensor` of shape `[B, T, Hkv, d]`):
            The slots.
        attention_mask (`torch.Tensor` of shape `[B or 1, 1 or Hq, T, S]`, *optional*):
            Added to the scores of the tokens.
        scaling (`float`):
            Factor of all scores.
        gate (`torch.Tensor` of shape `[Hq]`, *optional*):
            How much of it counts beside the softmax over the tokens alone.

    Returns:
        The output `[B, Hq, T, d]` and the weights `[B, Hq, T, S + n]`: tokens, then slots.
    """
    tokens, groups = key.shape[2], query.shape[1] // key.shape[1]
    scores = torch.matmul(query, repeat_heads(key, groups).transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    grouped = depth_query.unflatten(1, (-1, groups))
    depth_scores = [torch.einsum("bkgtd,btkd->bkgt", grouped, slot).flatten(1, 2) for slot in depth_keys]
    joint_scores = torch.cat([scores, torch.stack(depth_scores, dim=-1) * scaling], dim=-1)
    weights = nn.functional.softmax(joint_scores, dim=-1, dtype=torch.float32)
    if gate is not None:
        share = gate.float()[:, None, None]
        alone = nn.functional.pad(nn.functional.softmax(scores, dim=-1, dtype=torch.float32), (0, len(depth_keys)))
        weights = (1 - share) * alone + share * weights
    weights = weights.to(query.dtype)
    output = torch.matmul(weights[..., :tokens], repeat_heads(value, groups))
    for j, slot in enumerate(depth_values):
        output = output + weights[..., tokens + j, None] * repeat_heads(slot.transpose(1, 2), groups)
    return output, weights


def norm_gain(norm: nn.Module, eps: float, size: int, like: torch.Tensor) -> torch.Tensor:
    """The gain `[size]` of an RMS norm. Where the norm has to be called, this is what it makes of ones."""
    if runs_plainly(norm):
        return norm.weight
    return norm(like.new_ones(size)) * (1 + eps) ** 0.5


class SlotGate(MixingModule):
    """How much the attention with slots counts for each query head, beside that without: 0 is none, 1 is all of it."""

    is_gate = True

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_attention_heads, dtype=mixing_dtype()))

    def forward(self) -> torch.Tensor:
        """The gate of each head, `[Hq]`."""
        return self.weight


class MoDAAttention(DecoderAttention):
    """Attention whose softmax runs over the tokens and the depth slots that the layer reads."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        check_implementation(config.depth_impl, "moda_attention")
        self.eps = config.rms_norm_eps
        self.slot_size = config.num_key_value_heads * self.head_dim
        self.reader_norm = config.moda_depth_key_mode == "reader_norm"
        self.first_slot, self.last_slot = config.depth_slots[layer_idx]
        self.depth_gate = SlotGate(config) if config.moda_gate and self.first_slot < self.last_slot else None
        self.makes_slot = (
            config.moda_attn_slots and not config.moda_attn_depth_proj and layer_idx + 1 < config.num_hidden_layers
        )

    def by_norm(self, flat: torch.Tensor) -> torch.Tensor:
        """Projections `[B, T, H * d]` as the norms of queries and keys take them: by heads, or flat."""
        return flat.view(*flat.shape[:-1], -1, self.head_dim) if self.qk_norm == "head" else flat

    def depth_key(self, projected: torch.Tensor) -> torch.Tensor:
        """The key of a slot as it is kept, `[B, T, Hkv * d]` or `[B, T, Hkv, d]`, from its projection."""
        projected = self.by_norm(projected)
        if self.reader_norm:
            return nn.functional.rms_norm(projected, projected.shape[-1:], eps=self.eps).to(projected.dtype)
        # no slice of the projection, since FSDP2 warns of modules that return views
        key = projected.clone() if self.qk_norm is None else apply_norm(self.k_norm, projected, self.depth_impl)
        return key if self.clip is None else key.clamp(-self.clip, self.clip)

    def slot(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A slot from the projection of its key and value, `[B, T, 2 * Hkv * d]`."""
        key = self.depth_key(projected[..., : self.slot_size])
        # the whole projection stands for the value, its end: a slice would be a view
        value = projected if self.clip is None else projected[..., self.slot_size :].clamp(-self.clip, self.clip)
        return key, value

    def turn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key with their rotary positions."""
        if not self.use_rope:
            return query, key
        triton = use_triton(self.depth_impl, "norm_rotary_mix", triton_obstacle((query, key, value)))
        if triton and not left_to_compiler(self.depth_impl, query):
            return norm_rotary_mix(query, key, value, *position_embeddings, impl=self.depth_impl)[:2]
        return rotate(query, key, *position_embeddings)

    @accepts_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        handle: tuple[torch.Tensor, ...] = (),
        depth_stream: DepthStream | None = None,
        rotary_scaling: float = 1.0,
        **kwargs,
    ) -> tuple[torch.Tensor | None, ...]:
        """
        Returns the output `[B, T, hidden]`, the attention weights (None if not asked for), and where the layer's own
        key and value make a slot, that key and that value, `[B, T, Hkv * d]` or `[B, T, Hkv, d]`.
        """
        query, projected_key, value = self.project(hidden_states)
        query, key, value = self.bound(query, projected_key, value)
        if self.qk_norm == "head":
            query = apply_norm(self.q_norm, self.by_norm(query), self.depth_impl)
            key = apply_norm(self.k_norm, self.by_norm(key), self.depth_impl)
        by_heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        plain_query, heads_key, heads_value = (each.view(by_heads).transpose(1, 2) for each in (query, key, value))
        query, rotated_key = self.turn(plain_query, heads_key, heads_value, position_embeddings)
        keys, values = self.remember(rotated_key, heads_value, past_key_values, kwargs)

        has_slots = self.first_slot < self.last_slot
        depth_query = self.depth_query(query, plain_query, key, rotary_scaling) if has_slots else None
        is_served = self.config._attn_implementation in SERVER_IMPLEMENTATIONS
        if depth_query is None or is_served:
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
            if isinstance(attention_mask, CausalBias):
                attention = biased_attention
            read_by = query if depth_query is None else self.twice(query)
            attn_output, attn_weights = attention(
                self, read_by, keys, values, attention_mask, scaling=self.scaling, **self.reading_options(kwargs)
            )
            if depth_query is not None:
                assert depth_stream is not None
                attn_output = self.merge_slots(attn_output, depth_query, handle, depth_stream)
        else:
            assert depth_stream is not None
            attn_output, attn_weights = self.read_with_slots(
                query, keys, values, depth_query, attention_mask, handle, depth_stream, kwargs.get("is_causal")
            )
            attn_output = attn_output.transpose(1, 2)
        attn_output = self.project_output(attn_output, query)
        if not self.makes_slot:
            return attn_output, attn_weights
        return attn_output, attn_weights, self.depth_key(projected_key) if self.reader_norm else key, value

    def depth_query(
        self, query: torch.Tensor, plain_query: torch.Tensor, key: torch.Tensor, rotary_scaling: float
    ) -> torch.Tensor:
        """What reads the slots, `[B, Hq, T, d]`, from the query with and without rotation."""
        if self.reader_norm:
            return (query * self.reader_gain(key)).to(query.dtype)
        # what the rotation of both would multiply their product by
        scale = rotary_scaling**2 if self.use_rope else 1
        return plain_query if scale == 1 else plain_query * scale

    def twice(self, query: torch.Tensor) -> torch.Tensor:
        """The queries `[B, Hq, T, d]` of each group, and the same once more: `[B, 2 * Hq, T, d]`."""
        groups = query.unflatten(1, (-1, self.num_key_value_groups))
        return torch.cat([groups, groups], dim=2).flatten(1, 2)

    def sinks(self, kv_heads: int) -> torch.Tensor:
        """The sinks' logits for so many heads, fp32: none for a group's queries, one for each the second time."""
        group = self.num_key_value_groups
        return torch.tensor([*[NO_SINK] * group, *[SINK] * group]).repeat(kv_heads)

    def merge_slots(
        self,
        output: torch.Tensor,
        depth_query: torch.Tensor,
        handle: tuple[torch.Tensor, ...],
        depth_stream: DepthStream,
    ) -> torch.Tensor:
        """
        The output `[B, T, Hq, d]` over tokens and slots, from a server's attention over the tokens, which returns no
        log-sum-exp, as `[.., 2 * Hq * d]`. Without and with the sink its outputs differ by the factor
        `r = e^lse / (e^lse + e^sink)`, so `lse = sink + log(r) - log(1 - r)`.
        """
        batch, heads, tokens, head_dim = depth_query.shape
        parts = output.view(batch, tokens, -1, 2, self.num_key_value_groups, head_dim)
        plain, beside_sink = (part.flatten(2, 3).transpose(1, 2) for part in parts.unbind(3))
        exact = accumulation_dtype(plain)
        squares = plain.to(exact).square().sum(-1)
        share = (plain.to(exact) * beside_sink).sum(-1) / squares.clamp(min=torch.finfo(exact).tiny)
        log_sum_exp = SINK + share.log() - torch.log1p(-share)
        # values that are all zero tell nothing; then the tokens count alone
        log_sum_exp = torch.where(squares > 0, log_sum_exp, -NO_SINK)
        gate = None if self.depth_gate is None else self.depth_gate()
        keys, values = (torch.stack(each) for each in depth_stream.slots(handle, self.first_slot, self.last_slot))
        merged, *_ = merge_without_kernels(
            depth_query, keys, values, plain, log_sum_exp, gate, self.scaling, training=False
        )
        return merged.transpose(1, 2)

    def reader_gain(self, key: torch.Tensor) -> torch.Tensor:
        """The gain of the key norm for each query head, `[Hq or 1, 1, d]`."""
        gain = norm_gain(self.k_norm, self.eps, key.shape[-1], key).view(-1, 1, self.head_dim)
        return gain.repeat_interleave(self.num_key_value_groups, dim=0) if self.qk_norm == "flat" else gain

    def read_with_slots(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        depth_query: torch.Tensor,
        attention_mask: torch.Tensor | None,
        handle: tuple[torch.Tensor, ...],
        depth_stream: DepthStream,
        is_causal: bool | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention to tokens and slots: output `[B, Hq, T, d]`, and the weights, from the eager form."""
        gate = None if self.depth_gate is None else self.depth_gate()
        if self.config._attn_implementation == "eager":
            depth_keys, depth_values = depth_stream.slots(handle, self.first_slot, self.last_slot)
            return eager_moda_attention(
                query, keys, values, depth_query, depth_keys, depth_values, attention_mask, self.scaling, gate
            )
        is_causal = self.is_causal if is_causal is None else is_causal
        tokens = query.shape[2]
        if isinstance(attention_mask, CausalBias):
            # to the operation, causal always means that the last token attends to the last key
            attention_mask = None
        elif attention_mask is None and is_causal and tokens > 1:
            # more keys than tokens and no mask: a static cache that was empty, with nothing behind these tokens yet
            keys, values = keys[:, :, :tokens], values[:, :, :tokens]
        output = moda_attention_over_stream(
            query,
            keys,
            values,
            depth_stream,
            handle,
            start=self.first_slot,
            stop=self.last_slot,
            depth_query=depth_query,
            scaling=self.scaling,
            attention_mask=attention_mask,
            is_causal=is_causal,
            gate=gate,
        )
        # without `return_lse` it is one tensor
        return cast(torch.Tensor, output), None


class MoDALayer(DecoderLayer):
    """
    A decoder layer that makes and reads depth slots. After the hidden states it takes the handle of the depth stream
    as positional tensors, and after the hidden states it returns the slots that it makes (`key, value` of its
    attention, then of its feed-forward network): each key `[B, T, Hkv * d]` or `[B, T, Hkv, d]`, and as a value the
    tensor whose last `Hkv * d` channels are it.
    """

    attention_class = MoDAAttention
    self_attn: MoDAAttention

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # a field of OLMo2 only, for the variants of the paper: the same norms at other places
        style = getattr(config, "moda_norm_style", None)
        if style == "pre":
            self.norm_names = (self.norm_names[1], None, self.norm_names[3], None)
        self.norms_sum = style == "post"
        # nothing would read the slots of the last layer
        is_read = layer_idx + 1 < config.num_hidden_layers
        self.projects_attn_slot = is_read and config.moda_attn_depth_proj
        self.projects_ffn_slot = is_read and config.moda_ffn_slots
        if self.projects_attn_slot:
            self.attn_depth_kv_proj = nn.Linear(config.hidden_size, 2 * self.self_attn.slot_size, bias=False)
        if self.projects_ffn_slot:
            self.mlp_depth_kv_proj = nn.Linear(config.hidden_size, 2 * self.self_attn.slot_size, bias=False)

    def add(self, place: int, hidden_states: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """The hidden states and an update, with the norm of that place over the update or over the sum."""
        if self.norms_sum:
            return self.normalise(place, hidden_states + update)
        return hidden_states + self.normalise(place, update)

    @accepts_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        *handle: torch.Tensor,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `[B, T, hidden]`):
                What the layer before returned.
            handle (`torch.Tensor`):
                The handle of the depth stream.
            past_key_values, kwargs:
                The keywords of the attention, with the KV cache under either of its names.

        Returns:
            The hidden states `[B, T, hidden]`, then key and value of each slot that the layer makes.
        """
        if self.self_attn.first_slot < self.self_attn.last_slot:
            stream, needed = kwargs.get("depth_stream"), self.self_attn.last_slot
            # a layer that is computed again for its gradients finds the slots of later ones written too
            written = min(stream.written, needed) if stream is not None and handle else 0
            self.check_handed_on(2 * written, 2 * needed)
        attn_input = self.normalise(0, hidden_states)
        update, _, *slots = self.self_attn(
            hidden_states=attn_input, past_key_values=past_key_values, handle=handle, **kwargs
        )
        if self.projects_attn_slot:
            slots += self.self_attn.slot(self.attn_depth_kv_proj(attn_input))
        hidden_states = self.add(1, hidden_states, update)

        mlp_input = self.normalise(2, hidden_states)
        beside = (self.mlp_depth_kv_proj,) if self.projects_ffn_slot else ()
        update, *projected = apply_mlp(self.mlp, mlp_input, self.depth_impl, beside)
        for each in projected:
            slots += self.self_attn.slot(each)
        hidden_states = self.add(3, hidden_states, update)
        return (hidden_states, *slots) if slots else hidden_states


def unsupported_attention(implementation: str | None) -> ValueError:
    return ValueError(
        f"attn_implementation={implementation!r}: must be one of {', '.join(ATTENTION_IMPLEMENTATIONS)} with "
        "Mixture-of-Depths Attention. Any other would drop the depth slots."
    )


class MoDALedger(Ledger):
    """The depth stream of a call: all slots so far, and the handle that their readers need."""

    model: "MoDADecoder"

    def __init__(self, model, embeddings, kwargs):
        super().__init__(model, embeddings, kwargs)
        self.handle: tuple[torch.Tensor, ...] = ()
        self.kwargs = kwargs
        if model.num_slots:
            # an exported program is for runtimes that do not know this package's operations
            exported = model.depth_impl == "auto" and torch.compiler.is_exporting()
            impl = "reference" if model.config._attn_implementation == "eager" or exported else model.depth_impl
            self.stream = DepthStream(model.num_slots, impl=impl, window=model.config.moda_depth_window)
            self.handle = self.stream.handle
            kwargs["depth_stream"] = self.stream

    def read(self, step: int) -> Sequence[torch.Tensor]:
        if self.model.num_slots:
            self.kwargs["rotary_scaling"] = self.model.rotary_scaling(step)
        return self.hidden_states, *self.handle

    def keep(self, step: int, outputs: tuple[torch.Tensor, ...]) -> None:
        is_last = step + 1 == len(self.model.layers)
        outputs = self.expect(step, outputs, 1 if is_last else 1 + 2 * self.model.slots_per_layer)
        self.hidden_states, *slots = outputs
        for key, value in zip(slots[0::2], slots[1::2], strict=True):
            self.handle = self.stream.write(self.handle, self.model.as_slot(key), self.model.as_slot(value))


class MoDASupport(DepthPreTrainedModel):
    """Which attention implementations know depth slots, and how gates start: closed."""

    _supports_flash_attn = False
    _supports_flex_attn = False
    # attention functions of others, which servers bring along, know nothing of depth slots
    _supports_attention_backend = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, SlotGate):
            init.zeros_(module.weight)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        if attn_implementation not in (None, *ATTENTION_IMPLEMENTATIONS, *SERVER_IMPLEMENTATIONS):
            raise unsupported_attention(attn_implementation)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)


class MoDADecoder(DepthDecoderModel):
    __doc__ = f"""{DepthDecoderModel.__doc__}
    The attention weights that it returns with `attn_implementation="eager"` and `output_attentions=True` have a column
    for each token and then one for each depth slot that the layer reads, oldest first.
    """
    ledger_class = MoDALedger
    no_depth_weights = (
        "depth slots share a softmax with the tokens, so that their weights are the last columns of the attention "
        "weights (attn_implementation='eager', output_attentions=True)"
    )

    @staticmethod
    def mixes_layers(config: PreTrainedConfig) -> bool:
        return config.depth_slots[-1][1] > 0

    def add_modules(self, config: PreTrainedConfig) -> None:
        self.slots_per_layer = config.depth_slots_per_layer
        self.num_slots = config.depth_slots[-1][1]
        self.slot_size = cast(MoDALayer, self.layers[0]).self_attn.slot_size
        self.slot_heads = config.num_key_value_heads

    def handed_on_per_token(self) -> int:
        return 2 * self.num_slots * self.slot_size

    def check_call(self, kwargs: dict) -> None:
        super().check_call(kwargs)
        if self.config._attn_implementation not in (*ATTENTION_IMPLEMENTATIONS, *SERVER_IMPLEMENTATIONS):
            raise unsupported_attention(self.config._attn_implementation)

    def rotary_scaling(self, layer_idx: int) -> float:
        """What the rotation of a layer multiplies queries and keys by."""
        by_kind = self.config.depth_backbone.rotary == "by_layer_type"
        return self.rotary_emb.scaling(self.config.layer_types[layer_idx] if by_kind else None)

    def as_slot(self, flat: torch.Tensor) -> torch.Tensor:
        """`[B, T, Hkv, d]` from what a layer returns."""
        if flat.ndim == 3:
            flat = flat[..., -self.slot_size :] if flat.shape[-1] > self.slot_size else flat
            flat = flat.view(*flat.shape[:-1], self.slot_heads, self.slot_size // self.slot_heads)
        return flat


MODELS = ModelClasses(
    __name__,
    CONFIGURATIONS,
    layer=MoDALayer,
    model=MoDADecoder,
    pretrained=MoDASupport,
    tags=("depthmix", "mixture-of-depths-attention"),
)
__getattr__ = MODELS.module_getattr(globals())
__all__ = ["MODELS"]
