# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The tensors of a stock decoder, from its configuration alone.

The models themselves say what tensors they have, but that takes torch and seconds. Here only the usual answer is
found early: that a checkpoint has exactly the tensors of its backbone. Whatever else is the case, the models say.
"""

from collections.abc import Iterator
from typing import Any

from depthmix.configuration.depth_backbones import Backbone, has_bias, is_sparse

from .checkpoint_io import FLOAT_DTYPES, Checkpoint
from .weight_maps import BASE_MODEL, CAUSAL_LM, RELEASED_LLAMA, WeightMap


Tensors = Iterator[tuple[str, tuple[int, ...]]]


def has_stock_tensors(checkpoint: Checkpoint, weight_map: WeightMap, config: Any) -> bool:
    """
    Whether a checkpoint is known to have the tensors of the backbone of `config`, of the right shapes, and no others,
    so that what a method adds is all that would be new. False stands for not known, too.
    """
    # other maps are for what a method adds
    if weight_map not in (CAUSAL_LM, BASE_MODEL, RELEASED_LLAMA) or not config.depth_backbone.softmax_only:
        return False
    expected = dict(_decoder_tensors(config.depth_backbone, config))
    found = {}
    for name, stored in checkpoint.tensors.items():
        target_name = weight_map.to_target(name)
        if target_name is not None:
            if target_name not in expected or target_name in found or stored.dtype not in FLOAT_DTYPES:
                return False
            found[target_name] = stored.shape
    return found == expected


def _decoder_tensors(backbone: Backbone, config: Any) -> Tensors:
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield from _attention_tensors(f"{prefix}.self_attn", backbone, config)
        if backbone.has_experts and is_sparse(config, layer):
            yield from _expert_tensors(f"{prefix}.mlp", config)
        else:
            bias = has_bias(config, backbone.mlp_bias)
            yield from _mlp_tensors(f"{prefix}.mlp", config.hidden_size, config.intermediate_size, bias)
        for norm in backbone.norms:
            if norm is not None:
                yield f"{prefix}.{norm}.weight", (config.hidden_size,)
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)


def _attention_tensors(prefix: str, backbone: Backbone, config: Any) -> Tensors:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = (head_dim * count for count in (config.num_attention_heads, config.num_key_value_heads))
    bias = has_bias(config, backbone.qkv_bias)
    for name, width in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield from _linear_tensors(f"{prefix}.{name}", config.hidden_size, width, bias)
    yield from _linear_tensors(f"{prefix}.o_proj", queries, config.hidden_size, has_bias(config, backbone.output_bias))
    if getattr(config, "use_qk_norm", backbone.qk_norm is not None):
        per_head = backbone.qk_norm == "head"
        yield f"{prefix}.q_norm.weight", (head_dim if per_head else queries,)
        yield f"{prefix}.k_norm.weight", (head_dim if per_head else keys,)


def _expert_tensors(prefix: str, config: Any) -> Tensors:
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    yield f"{prefix}.gate.weight", (config.num_experts, config.hidden_size)
    for expert in range(config.num_experts):
        yield from _mlp_tensors(f"{prefix}.experts.{expert}", config.hidden_size, width, False)


def _mlp_tensors(prefix: str, hidden_size: int, width: int, bias: bool) -> Tensors:
    for name in ("gate_proj", "up_proj"):
        yield from _linear_tensors(f"{prefix}.{name}", hidden_size, width, bias)
    yield from _linear_tensors(f"{prefix}.down_proj", width, hidden_size, bias)


def _linear_tensors(name: str, inputs: int, outputs: int, bias: bool) -> Tensors:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)
