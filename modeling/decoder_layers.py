# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The attention and the decoder layer of every backbone, built after its record.

Parameters have the names, the shapes and the order of the stock layers, so that stock weights, tensor-parallel plans
and LoRA targets fit, and a seed gives the stock initial weights. A method derives its layer, and where it works inside
of the attention its attention, from these.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.attention.bias import CausalBias
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthmix.configuration.depth_backbones import has_bias, is_sparse
from depthmix.kernels.depth_dispatch import left_to_compiler, triton_obstacle, use_triton
from depthmix.kernels.depth_value_mix_op import depth_value_mix
from depthmix.kernels.norm_rotary_mix_op import norm_rotary_mix

from .lent_weights import DepthMLP, DepthRMSNorm, apply_linears, apply_mlp, apply_norm, runs_plainly
from .transformers_versions import accepts_both_cache_names, cache_update_keywords


class DepthRotaryEmbedding(nn.Module):
    """
    Cosines and sines of the rotation, from one table of frequencies for all layers or from one for each kind of layer,
    with the stock names. The kinds of scaling are those of the host library, which also updates the tables of some.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.in_fp32 = config.depth_backbone.rotary_in_fp32
        self.kinds: tuple[str | None, ...] = (None,)
        self.rope_type: str | dict[str | None, str]
        parameters = config.rope_parameters
        if config.depth_backbone.rotary == "by_layer_type":
            self.kinds = tuple(sorted(set(config.layer_types)))
            self.rope_type = {kind: parameters[kind]["rope_type"] for kind in self.kinds}
        else:
            self.rope_type = parameters["rope_type"]
        for kind in self.kinds:
            frequencies, scaling = self.frequencies(kind)
            self.register_buffer(table_name(kind, "inv_freq"), frequencies, persistent=False)
            self.register_buffer(table_name(kind, "original_inv_freq"), frequencies.clone(), persistent=False)
            setattr(self, table_name(kind, "attention_scaling"), scaling)

    def frequencies(self, kind: str | None) -> tuple[torch.Tensor, float]:
        """The frequencies `[d / 2]` of a kind of layer, fp32, and the factor of its cosines and sines."""
        rope_type = self.rope_type if isinstance(self.rope_type, str) else self.rope_type[kind]
        keywords = {} if kind is None else {"layer_type": kind}
        if rope_type == "default":
            return self.compute_default_rope_parameters(self.config, **keywords)
        return ROPE_INIT_FUNCTIONS[rope_type](self.config, **keywords)

    # under the name by which the host library finds it
    @staticmethod
    def compute_default_rope_parameters(
        config: PreTrainedConfig, layer_type: str | None = None, **kwargs
    ) -> tuple[torch.Tensor, float]:
        """The frequencies `[d / 2]` without scaling, fp32, and 1."""
        parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        size = head_size(config)
        return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size)), 1.0

    def scaling(self, kind: str | None) -> float:
        """The factor of the cosines and sines of a kind of layer, at this time."""
        return getattr(self, table_name(kind, "attention_scaling"))

    def reset(self) -> None:
        """Computes the tables again, as after loading, which does not fill them."""
        for kind in self.kinds:
            frequencies, _ = self.frequencies(kind)
            init.copy_(getattr(self, table_name(kind, "inv_freq")), frequencies)
            init.copy_(getattr(self, table_name(kind, "original_inv_freq")), frequencies)

    @dynamic_rope_update
    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Cosines and sines `[B or 1, T, d]` at the positions `[B or 1, T]`, for a kind of layer where tables differ;
        they are in the dtype of `x`, or in fp32 where the backbone keeps that.
        """
        frequencies = getattr(self, table_name(layer_type, "inv_freq"))
        scaling = self.scaling(layer_type)
        angles = position_ids[..., None].float() * frequencies.to(device=x.device, dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        return (cos, sin) if self.in_fp32 else (cos.to(x.dtype), sin.to(x.dtype))


def head_size(config: PreTrainedConfig) -> int:
    """The size of a head, for which some backbones have no field."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def table_name(kind: str | None, name: str) -> str:
    """The stock name of what the rotation has for a kind of layer, or for all."""
    return name if kind is None else f"{kind}_{name}"


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary positions on query `[B, Hq, T, d]` and key `[B, Hkv, T, d]`; cos and sin are `[B or 1, T, d]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turn(states: torch.Tensor) -> torch.Tensor:
        # in the order of the stock decoders, so that autograd adds gradients up in theirs
        rotated, half = states * cos, states.shape[-1] // 2
        first, second = states[..., :half], states[..., half:]
        return (rotated + torch.cat((-second, first), dim=-1) * sin).to(states.dtype)

    return turn(query), turn(key)


def repeat_heads(heads: torch.Tensor, groups: int) -> torch.Tensor:
    """Keys or values `[B, Hkv, S, d]` for each query head of their group, `[B, Hkv * groups, S, d]`."""
    return heads if groups == 1 else heads[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attention in plain PyTorch, which keeps its weights. Arguments and results are those of the host library's
    attention functions.

    Args:
        module (`nn.Module`):
            The attention that calls.
        query (`torch.Tensor` of shape `[B, Hq, T, d]`), key, value (`torch.Tensor` of shape `[B, Hkv, S, d]`):
            What asks, and the tokens.
        attention_mask (`torch.Tensor` of shape `[B or 1, 1 or Hq, T, S]`, *optional*):
            Added to the scores.
        scaling (`float`):
            Factor of the scores.
        dropout (`float`, *optional*, defaults to 0):
            Share of the weights that are dropped in training.

    Returns:
        The output `[B, T, Hq, d]` and the weights `[B, Hq, T, S]`, in the dtype of the query.
    """
    groups = query.shape[1] // key.shape[1]
    scores = torch.matmul(query, repeat_heads(key, groups).transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, repeat_heads(value, groups)).transpose(1, 2).contiguous(), weights


def biased_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CausalBias,
    scaling: float,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """As `eager_attention`, with the mask of later tokens; the host's function would repeat keys and values."""
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


class DecoderAttention(nn.Module):
    """
    Grouped-query attention by softmax. The record of the backbone says which biases and norms there are; which layers
    rotate, and which have a window, is in the configuration.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        backbone = config.depth_backbone
        self.config, self.layer_idx, self.depth_impl = config, layer_idx, config.depth_impl
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_size(config)
        self.num_key_value_groups = heads // kv_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        kinds = getattr(config, "layer_types", None)
        is_sliding = kinds is None or kinds[layer_idx] == "sliding_attention"
        self.sliding_window = getattr(config, "sliding_window", None) if is_sliding else None
        rotating = getattr(config, "no_rope_layers", None)
        self.use_rope = rotating is None or bool(rotating[layer_idx])
        self.clip = getattr(config, "clip_qkv", None)
        self.qk_norm = backbone.qk_norm if getattr(config, "use_qk_norm", True) else None
        self.key_norm_position = getattr(config, "key_norm_position", "before_rope")

        query_size, key_size = heads * self.head_dim, kv_heads * self.head_dim
        bias = has_bias(config, backbone.qkv_bias)
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=has_bias(config, backbone.output_bias))
        if self.qk_norm is not None:
            sizes = (self.head_dim,) * 2 if self.qk_norm == "head" else (query_size, key_size)
            self.q_norm, self.k_norm = (
                DepthRMSNorm(size, config.rms_norm_eps, backbone.norms_round_last) for size in sizes
            )

    @accepts_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns the output `[B, T, hidden]` and the attention weights (None if not asked for)."""
        query, key, value = self.finish(*self.project(hidden_states), position_embeddings)
        keys, values = self.remember(key, value, past_key_values, kwargs)
        # Servers take an attention for one that they can work in by the text of its forward: the function has to be
        # looked up and called there, in every class, and the scaling given as an attribute.
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        if isinstance(attention_mask, CausalBias):
            attention = biased_attention
        attn_output, attn_weights = attention(
            self, query, keys, values, attention_mask, scaling=self.scaling, **self.reading_options(kwargs)
        )
        return self.project_output(attn_output, query), attn_weights

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Query `[B, T, Hq * d]`, key and value `[B, T, Hkv * d]` as the linear maps give them.

        Raises:
            `ValueError`: if these are not whole key-value heads, each with all its query heads.
        """
        linears = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = apply_linears(linears, hidden_states, self.depth_impl)
        if key.shape[-1] % self.head_dim or query.shape[-1] != key.shape[-1] * self.num_key_value_groups:
            raise ValueError(
                f"num_key_value_heads={self.config.num_key_value_heads}: must be a multiple of the number of devices "
                "among which tensor parallelism divides the attention. Each key-value head needs all its "
                f"{self.num_key_value_groups} query heads beside it; here are {query.shape[-1] / self.head_dim:g} "
                f"query heads and {key.shape[-1] / self.head_dim:g} key-value heads."
            )
        return query, key, value

    def bound(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """The three projections after the norms and the bounds that apply to all heads together, still flat."""
        if self.qk_norm == "flat":
            query = apply_norm(self.q_norm, query, self.depth_impl)
            key = apply_norm(self.k_norm, key, self.depth_impl)
        if self.clip is None:
            return query, key, value
        return [flat.clamp(-self.clip, self.clip) for flat in (query, key, value)]

    def finish(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        source_keys: Sequence[torch.Tensor] = (),
        source_values: Sequence[torch.Tensor] = (),
        gate: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Query `[B, Hq, T, d]`, key and value `[B, Hkv, T, d]` of these tokens as attention reads them: normalised and
        rotated, and with source layers the value mixed with theirs, with a gate `[Hkv]` if any (Depth-Attention).
        Where kernels are wanted and can work it is one operation.
        """
        query, key, value = (flat.view(*flat.shape[:-1], -1, self.head_dim) for flat in self.bound(query, key, value))
        value = value.transpose(1, 2)
        norms = (self.q_norm, self.k_norm) if self.qk_norm == "head" else ()
        if (
            self.depth_impl != "reference"
            and self.use_rope
            and all(map(runs_plainly, norms))
            and len({norm.variance_epsilon for norm in norms}) < 2
        ):
            options: dict[str, Any] = {
                f"{name}_norm_weight": norm.weight for name, norm in zip(("query", "key"), norms, strict=False)
            }
            if norms:
                options |= {"eps": norms[0].variance_epsilon, "key_norm_position": self.key_norm_position}
            triton = use_triton(self.depth_impl, "norm_rotary_mix", triton_obstacle((query, key, value)))
            if triton and (source_keys or not left_to_compiler(self.depth_impl, query)):
                cos, sin = position_embeddings
                return norm_rotary_mix(
                    query.transpose(1, 2),
                    key.transpose(1, 2),
                    value,
                    cos,
                    sin,
                    **options,
                    source_keys=source_keys,
                    source_values=source_values,
                    scaling=self.scaling,
                    gate=gate,
                    impl=self.depth_impl,
                )
        if norms:
            query = self.q_norm(query)
            if self.key_norm_position == "before_rope":
                key = self.k_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if self.use_rope:
            query, key = rotate(query, key, *position_embeddings)
        if norms and self.key_norm_position == "after_rope":
            key = self.k_norm(key)
        if source_keys:
            value = depth_value_mix(
                query,
                [*source_keys, key],
                [*source_values, value],
                scaling=self.scaling,
                gate=gate,
                impl=self.depth_impl,
            )
        return query, key, value

    def remember(
        self, key: torch.Tensor, value: torch.Tensor, cache: Cache | None, kwargs: dict, slot: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, Hkv, S, d]` of all tokens so far; these are added to the cache, if there is one."""
        if cache is None:
            return key, value
        return cache.update(key, value, self.layer_idx if slot is None else slot, **cache_update_keywords(kwargs))

    def reading_options(self, kwargs: dict) -> dict[str, Any]:
        """The keywords of the attention function, besides the scaling."""
        dropout = self.attention_dropout if self.training else 0.0
        return {"dropout": dropout, "sliding_window": self.sliding_window, **kwargs}

    def project_output(self, attn_output: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """
        `[B, T, hidden]` from the outputs `[B, T, Hq, d]` of the heads of a query `[B, Hq, T, d]`, which servers return
        as `[B * T, Hq * d]`.

        Raises:
            `ValueError`: if these are not the outputs of all heads.
        """
        if attn_output.numel() != query.numel():
            raise ValueError(
                f"{attn_output.numel()} outputs of the attention for {query.numel()} numbers of the query: the server "
                "divides the heads among devices (tensor parallelism), and this model needs all of them on each, as "
                "with depth_gate=True and where a norm goes over all heads."
            )
        flat = attn_output.reshape(query.shape[0], query.shape[2], -1).contiguous()
        return apply_linears((self.o_proj,), flat, self.depth_impl)[0]


class DecoderLayer(GradientCheckpointingLayer):
    """The two sub-layers of a decoder layer, with the norms around them; a method writes the forward."""

    attention_class: ClassVar[type[DecoderAttention]] = DecoderAttention

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        backbone = config.depth_backbone
        self.layer_idx, self.hidden_size, self.depth_impl = layer_idx, config.hidden_size, config.depth_impl
        self.norm_names = backbone.norms
        self.self_attn, self.mlp = self.make_sub_layers(config)
        for name in filter(None, self.norm_names):
            norm = DepthRMSNorm(config.hidden_size, config.rms_norm_eps, backbone.norms_round_last)
            self.register_module(name, norm)

    def make_sub_layers(self, config: PreTrainedConfig) -> tuple[nn.Module, nn.Module]:
        """The attention and the feed-forward network of this layer."""
        backbone, attention = config.depth_backbone, self.attention_class(config, self.layer_idx)
        if backbone.has_experts and is_sparse(config, self.layer_idx):
            return attention, backbone.stock_class("SparseMoeBlock")(config)
        activation = ACT2FN[config.hidden_act]
        bias = has_bias(config, backbone.mlp_bias)
        return attention, DepthMLP(config.hidden_size, config.intermediate_size, activation, bias)

    def check_handed_on(self, given: int, *needed: int) -> None:
        """
        Raises:
            `RuntimeError`: if the layer got more or fewer tensors of earlier layers than it works with.
        """
        if given not in needed:
            raise RuntimeError(
                f"Layer {self.layer_idx} got {given} tensor{'' if given == 1 else 's'} of earlier layers and needs "
                f"{' or '.join(map(str, needed))}. With depth mixing a layer does not run on the hidden states alone, "
                "as tools that calibrate a quantisation layer by layer would have it."
            )

    def norm_at(self, place: int) -> nn.Module | None:
        """The norm before (0) or after (1) the attention, before (2) or after (3) the feed-forward network, if any."""
        name = self.norm_names[place]
        return None if name is None else getattr(self, name)

    def normalise(self, place: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """The hidden states through the norm of that place, if there is one."""
        name = self.norm_names[place]
        # in decoding the host decides the time, and every call costs some
        norm = None if name is None else self._modules[name]
        return hidden_states if norm is None else apply_norm(norm, hidden_states, self.depth_impl)

    def attend(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """The update by the attention, `[B, T, hidden]`; the keywords are those of the attention."""
        return self.attend_normalised(self.normalise(0, hidden_states), **kwargs)

    def attend_normalised(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """As `attend`, of what the norm before it has gone over already."""
        return self.normalise(1, self.self_attn(hidden_states=hidden_states, **kwargs)[0])

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The update by the feed-forward network, `[B, T, hidden]`."""
        return self.feed_forward_normalised(self.normalise(2, hidden_states))

    def feed_forward_normalised(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As `feed_forward`, of what the norm before it has gone over already."""
        return self.normalise(3, apply_mlp(self.mlp, hidden_states, self.depth_impl)[0])
