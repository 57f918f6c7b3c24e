# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
OLMo2 with Mixture-of-Depths Attention (arXiv 2603.15619).

The softmax of an attention layer runs over the tokens that it sees and over depth slots: keys and values that the
layers before it made for the token that asks. Slots are of the current call's tokens only, so nothing but the ordinary
KV cache outlives a call, and every kind of cache works.

The slots of a call are kept by a [`~depthmix.kernels.DepthStream`] that the model's forward makes. A layer gets the
stream's handle, flat positional tensors, reads slots through it and returns those that it makes, as flat tensors too;
the model writes them. So a layer that is recomputed reads again and writes nothing, and hooks, activation
checkpointing, offloading and FSDP see everything that carries gradients.

Keys of slots are not rotated. Query and slot stand at the same position, where rotating both changes nothing: a query
without rotation reads keys without rotation.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.olmo2.modeling_olmo2 import (
    Olmo2Attention,
    Olmo2DecoderLayer,
    Olmo2ForCausalLM,
    Olmo2MLP,
    Olmo2Model,
    Olmo2PreTrainedModel,
    Olmo2RMSNorm,
    Olmo2RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
    repeat_kv,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from depthmix.configuration.configuration_moda_olmo2 import MoDAOlmo2Config
from depthmix.kernels.depth_implementations import (
    check_implementation,
    left_to_compiler,
    triton_obstacle,
    use_triton,
)
from depthmix.kernels.depth_stream import DepthStream, moda_attention_over_stream
from depthmix.kernels.norm_rotary_mix import norm_rotary_mix

from .depth_modeling_common import (
    HOST_CACHE_NAME,
    DecoderInputs,
    DepthCausalLM,
    DepthModelOutputWithPast,
    DepthSequenceClassification,
    accepts_both_cache_names,
    apply_linears,
    apply_mlp,
    apply_norm,
    cache_update_keywords,
    foreign_layer,
    refuse_depth_weights,
    refuse_pipeline_parallelism,
    runs_plainly,
)


ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")


def eager_moda_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    depth_query: torch.Tensor,
    depth_keys: Sequence[torch.Tensor],
    depth_values: Sequence[torch.Tensor],
    attention_mask: torch.Tensor | None,
    scaling: float,
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

    Returns:
        The output `[B, Hq, T, d]` and the weights `[B, Hq, T, S + n]`: tokens, then slots.
    """
    tokens, groups = key.shape[2], query.shape[1] // key.shape[1]
    scores = torch.matmul(query, repeat_kv(key, groups).transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    grouped = depth_query.unflatten(1, (-1, groups))
    depth_scores = [torch.einsum("bkgtd,btkd->bkgt", grouped, slot).flatten(1, 2) for slot in depth_keys]
    scores = torch.cat([scores, torch.stack(depth_scores, dim=-1) * scaling], dim=-1)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    output = torch.matmul(weights[..., :tokens], repeat_kv(value, groups))
    for j, slot in enumerate(depth_values):
        output = output + weights[..., tokens + j, None] * repeat_kv(slot.transpose(1, 2), groups)
    return output, weights


def norm_gain(norm: nn.Module, eps: float, size: int, like: torch.Tensor) -> torch.Tensor:
    """The gain `[size]` of an RMS norm. Where the norm has to be called, this is what it makes of ones."""
    if runs_plainly(norm):
        return norm.weight
    return norm(like.new_ones(size)) * (1 + eps) ** 0.5


class MoDAOlmo2Attention(Olmo2Attention):
    """OLMo2's attention, whose softmax runs over the tokens and the depth slots that the layer reads."""

    def __init__(self, config: MoDAOlmo2Config, layer_idx: int):
        super().__init__(config, layer_idx)
        check_implementation(config.depth_impl, "moda_attention")
        self.depth_impl = config.depth_impl
        self.eps = config.rms_norm_eps
        self.reader_norm = config.moda_depth_key_mode == "reader_norm"
        self.first_slot, self.last_slot = config.depth_slots[layer_idx]
        self.makes_slot = (
            config.moda_attn_slots and not config.moda_attn_depth_proj and layer_idx + 1 < config.num_hidden_layers
        )

    def depth_key(self, projected: torch.Tensor) -> torch.Tensor:
        """The key of a slot `[B, T, Hkv * d]`, as it is kept, from its projection."""
        if self.reader_norm:
            return nn.functional.rms_norm(projected, projected.shape[-1:], eps=self.eps).to(projected.dtype)
        return apply_norm(self.k_norm, projected, self.depth_impl)

    def rotate(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        triton = use_triton(self.depth_impl, "norm_rotary_mix", triton_obstacle((query, key, value)))
        if triton and not left_to_compiler(self.depth_impl, query):
            return norm_rotary_mix(query, key, value, *position_embeddings, impl=self.depth_impl)[:2]
        return apply_rotary_pos_emb(query, key, *position_embeddings)

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
        key and value make a slot, that key and that value, `[B, T, Hkv * d]`.
        """
        head_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        plain_query, projected_key, flat_value = apply_linears(projections, hidden_states, self.depth_impl)
        flat_key = apply_norm(self.k_norm, projected_key, self.depth_impl)
        plain_query = apply_norm(self.q_norm, plain_query, self.depth_impl).view(head_shape).transpose(1, 2)
        key, value = (flat.view(head_shape).transpose(1, 2) for flat in (flat_key, flat_value))
        query, key = self.rotate(plain_query, key, value, position_embeddings)

        keys, values = key, value
        if past_key_values is not None:
            keys, values = past_key_values.update(key, value, self.layer_idx, **cache_update_keywords(kwargs))

        if self.first_slot == self.last_slot:
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
            dropout = self.attention_dropout if self.training else 0.0
            attn_output, attn_weights = attention(
                self, query, keys, values, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
        else:
            if self.reader_norm:
                gain = norm_gain(self.k_norm, self.eps, flat_key.shape[-1], flat_key)
                gain = gain.view(-1, 1, self.head_dim).repeat_interleave(self.num_key_value_groups, dim=0)
                depth_query = (query * gain).to(query.dtype)
            else:
                # what the rotation of both would multiply their product by
                depth_query = plain_query if rotary_scaling == 1 else plain_query * rotary_scaling**2
            attn_output, attn_weights = self.read(
                query, keys, values, depth_query, attention_mask, handle, depth_stream, kwargs.get("is_causal")
            )
            attn_output = attn_output.transpose(1, 2)

        attn_output = attn_output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        (attn_output,) = apply_linears((self.o_proj,), attn_output, self.depth_impl)
        if not self.makes_slot:
            return attn_output, attn_weights
        return attn_output, attn_weights, self.depth_key(projected_key) if self.reader_norm else flat_key, flat_value

    def read(
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
        if self.config._attn_implementation == "eager":
            depth_keys, depth_values = depth_stream.slots(handle, self.first_slot, self.last_slot)
            return eager_moda_attention(
                query, keys, values, depth_query, depth_keys, depth_values, attention_mask, self.scaling
            )
        is_causal = self.is_causal if is_causal is None else is_causal
        tokens = query.shape[2]
        if attention_mask is None and is_causal and tokens > 1:
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
        )
        return output, None


class MoDAOlmo2DecoderLayer(Olmo2DecoderLayer):
    """
    OLMo2's decoder layer. After the hidden states it takes the handle of the depth stream as positional tensors, and
    after the hidden states it returns the slots that it makes (`key, value` of its attention, then of its feed-forward
    network): each key `[B, T, Hkv * d]`, and as a value the tensor whose last `Hkv * d` channels are it.
    """

    def __init__(self, config: MoDAOlmo2Config, layer_idx: int):
        GradientCheckpointingLayer.__init__(self)
        self.hidden_size = config.hidden_size
        self.layer_idx = layer_idx
        self.self_attn = MoDAOlmo2Attention(config, layer_idx)
        self.mlp = Olmo2MLP(config)
        self.depth_impl = config.depth_impl
        self.norm_style = config.moda_norm_style
        self.post_attention_layernorm = Olmo2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = Olmo2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.slot_size = config.num_key_value_heads * self.self_attn.head_dim
        # nothing would read the slots of the last layer
        is_read = layer_idx + 1 < config.num_hidden_layers
        self.projects_attn_slot = is_read and config.moda_attn_depth_proj
        self.projects_ffn_slot = is_read and config.moda_ffn_slots
        if self.projects_attn_slot:
            self.attn_depth_kv_proj = nn.Linear(config.hidden_size, 2 * self.slot_size, bias=False)
        if self.projects_ffn_slot:
            self.mlp_depth_kv_proj = nn.Linear(config.hidden_size, 2 * self.slot_size, bias=False)

    def norm_before(self, norm: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        return apply_norm(norm, hidden_states, self.depth_impl) if self.norm_style == "pre" else hidden_states

    def add(self, norm: nn.Module, residual: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        if self.norm_style == "pre":
            return residual + update
        if self.norm_style == "post":
            return apply_norm(norm, residual + update, self.depth_impl)
        return residual + apply_norm(norm, update, self.depth_impl)

    def slot(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # the value is no slice of the projection here, since FSDP2 warns of modules that return views
        return self.self_attn.depth_key(projected[..., : self.slot_size]), projected

    @accepts_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        *handle: torch.Tensor,
        depth_stream: DepthStream | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        attn_input = self.norm_before(self.post_attention_layernorm, hidden_states)
        update, _, *slots = self.self_attn(
            hidden_states=attn_input,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            handle=handle,
            depth_stream=depth_stream,
            **kwargs,
        )
        if self.projects_attn_slot:
            slots += self.slot(self.attn_depth_kv_proj(attn_input))
        hidden_states = self.add(self.post_attention_layernorm, hidden_states, update)

        mlp_input = self.norm_before(self.post_feedforward_layernorm, hidden_states)
        beside = (self.mlp_depth_kv_proj,) if self.projects_ffn_slot else ()
        update, *projected = apply_mlp(self.mlp, mlp_input, self.depth_impl, beside)
        for each in projected:
            slots += self.slot(each)
        hidden_states = self.add(self.post_feedforward_layernorm, hidden_states, update)
        return (hidden_states, *slots) if slots else hidden_states


def unsupported_attention(implementation: str | None) -> ValueError:
    return ValueError(
        f"attn_implementation={implementation!r}: must be one of {', '.join(ATTENTION_IMPLEMENTATIONS)} with "
        "Mixture-of-Depths Attention. Any other would drop the depth slots."
    )


class MoDAOlmo2PreTrainedModel(Olmo2PreTrainedModel):
    """What all models here share: their configuration, what they support, and which outputs they record."""

    config: MoDAOlmo2Config
    config_class = MoDAOlmo2Config
    _no_split_modules = ["MoDAOlmo2DecoderLayer"]
    _pp_plan = None
    _supports_flash_attn = False
    _supports_flex_attn = False
    # attention functions of others, which servers bring along, know nothing of depth slots
    _supports_attention_backend = False
    model_tags = ["depthmix", "mixture-of-depths-attention"]
    _can_record_outputs = {"hidden_states": MoDAOlmo2DecoderLayer, "attentions": MoDAOlmo2Attention}

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        if attn_implementation not in (None, *ATTENTION_IMPLEMENTATIONS):
            raise unsupported_attention(attn_implementation)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)


class MoDAOlmo2Model(DecoderInputs, MoDAOlmo2PreTrainedModel, Olmo2Model):
    """
    The decoder without a head. Its forward takes what [`~transformers.Olmo2Model`] takes, the cache under either of
    its names. The attention weights that it returns with `attn_implementation="eager"` and `output_attentions=True`
    have a column for each token and then one for each depth slot that the layer reads, oldest first.
    """

    def __init__(self, config: MoDAOlmo2Config):
        # not Olmo2Model's, which would build and initialise stock layers first
        super(Olmo2Model, self).__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.depth_impl = config.depth_impl
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(MoDAOlmo2DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Olmo2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Olmo2RotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.has_sliding_layers = False
        # fixed here, since early exit changes `config.num_hidden_layers` during a call
        self.slots_per_layer = config.depth_slots_per_layer
        self.num_slots = config.depth_slots[-1][1]
        self.slot_size, self.slot_heads = self.layers[0].slot_size, config.num_key_value_heads
        if self.num_slots:
            refuse_pipeline_parallelism(config)
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
        refuse_depth_weights(
            self.config,
            kwargs,
            "depth slots share a softmax with the tokens, so that their weights are the last columns of the attention "
            "weights (attn_implementation='eager', output_attentions=True)",
        )
        implementation = self.config._attn_implementation
        if implementation not in ATTENTION_IMPLEMENTATIONS:
            raise unsupported_attention(implementation)
        hidden_states, masks, shared = self.prepare(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache
        )
        handle: tuple[torch.Tensor, ...] = ()
        if self.num_slots:
            # an exported program is for runtimes that do not know this package's operations
            exported = self.depth_impl == "auto" and torch.compiler.is_exporting()
            impl = "reference" if implementation == "eager" or exported else self.depth_impl
            stream = DepthStream(self.num_slots, impl=impl, window=self.config.moda_depth_window)
            handle = stream.handle
            shared["depth_stream"] = stream
            shared["rotary_scaling"] = self.rotary_emb.attention_scaling

        for i, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            if getattr(layer, "layer_idx", i) != i:
                raise foreign_layer(i)
            outputs = layer(hidden_states, *handle, attention_mask=masks["full_attention"], **shared, **kwargs)
            hidden_states, *slots = outputs if isinstance(outputs, tuple) else (outputs,)
            if len(slots) != (2 * self.slots_per_layer if i + 1 < len(self.layers) else 0):
                raise foreign_layer(i)
            for key, value in zip(slots[0::2], slots[1::2], strict=True):
                handle = stream.write(handle, self.as_slot(key), self.as_slot(value))

        return DepthModelOutputWithPast(
            last_hidden_state=apply_norm(self.norm, hidden_states, self.depth_impl),
            **{HOST_CACHE_NAME: shared[HOST_CACHE_NAME] if use_cache else None},
        )

    def as_slot(self, flat: torch.Tensor) -> torch.Tensor:
        """`[B, T, Hkv, d]` from what a layer returns."""
        if flat.shape[-1] > self.slot_size:
            flat = flat[..., -self.slot_size :]
        return flat.view(*flat.shape[:-1], self.slot_heads, self.slot_size // self.slot_heads)


class MoDAOlmo2ForCausalLM(DepthCausalLM, MoDAOlmo2PreTrainedModel, Olmo2ForCausalLM):
    """
    The decoder with a language-model head. Its forward takes what [`~transformers.Olmo2ForCausalLM`] takes, the cache
    under either of its names, and returns what [`MoDAOlmo2Model`] does besides the logits.
    """

    model_class = MoDAOlmo2Model


class MoDAOlmo2ForSequenceClassification(DepthSequenceClassification, MoDAOlmo2PreTrainedModel):
    """The decoder with a classification head on the last token that is not padding."""

    model_class = MoDAOlmo2Model


__all__ = [
    "MoDAOlmo2ForCausalLM",
    "MoDAOlmo2ForSequenceClassification",
    "MoDAOlmo2Model",
    "MoDAOlmo2PreTrainedModel",
]
