# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Parameters, floating-point operations and state of every family, by formula.

A multiplication and an addition are two operations. Of the mixing, what grows with the size of its vectors is counted:
dot products, sums of squares and weighted sums, as the mathematics needs them; not the softmax over a few numbers.
Norms, rotation and activation functions, which all families share, are not counted either.
"""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Cost:
    """
    Args:
        parameters, added_parameters (`int`):
            All of them, and those among them that the vanilla model does not have.
        flops, extra_flops (`int`):
            Operations of a forward per token, and those among them that the vanilla model does not need.
        state_bytes (`int`):
            What is kept of a token between two decode steps, in 16 bits.
    """

    parameters: int
    added_parameters: int
    flops: int
    extra_flops: int
    state_bytes: int


@dataclass(frozen=True)
class Mixing:
    """What a family adds to a decoder of these layers, by its configuration: parameters, and operations per token."""

    parameters: Callable[[PreTrainedConfig], int]
    flops: Callable[[PreTrainedConfig], int]


def cost(config: PreTrainedConfig, length: int) -> Cost:
    """The cost of a causal language model of this configuration on sequences of `length` tokens."""
    mixing = MIXING.get(config.model_type, NO_MIXING)
    loops = getattr(config, "num_loops", 1)
    of_layers, others = _vanilla_parameters(config)
    # a matrix is read once per token, an embedding looked up, and a norm's weight is no matrix
    layer_flops = 2 * _matrix_parameters(config) + 4 * config.num_attention_heads * _head_dim(config) * length
    vanilla_flops = config.num_hidden_layers * layer_flops + 2 * config.hidden_size * config.vocab_size
    extra_flops = (loops - 1) * config.num_hidden_layers * layer_flops + mixing.flops(config)
    added = mixing.parameters(config)
    state = 2 * 2 * loops * config.num_hidden_layers * config.num_key_value_heads * _head_dim(config)
    return Cost(of_layers + others + added, added, vanilla_flops + extra_flops, extra_flops, state)


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _matrix_parameters(config: PreTrainedConfig) -> int:
    """Parameters of the matrices of one layer."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    return config.hidden_size * (heads * _head_dim(config) + 3 * config.intermediate_size)


def _vanilla_parameters(config: PreTrainedConfig) -> tuple[int, int]:
    """Those of all layers, and the others."""
    hidden, head_dim = config.hidden_size, _head_dim(config)
    query_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    per_layer = _matrix_parameters(config) + 2 * hidden
    if config.model_type in ("olmo2", "moda_olmo2"):
        per_layer += query_size + kv_size
    elif getattr(config, "use_qk_norm", True):
        per_layer += 2 * head_dim
    if config.attention_bias:
        per_layer += query_size + 2 * kv_size
    if getattr(config, "attention_output_bias", config.attention_bias):
        per_layer += hidden
    if getattr(config, "mlp_bias", False):
        per_layer += 2 * config.intermediate_size + hidden
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return config.num_hidden_layers * per_layer, embeddings + hidden


def _depth_attention_flops(config: PreTrainedConfig) -> int:
    kv_heads, d = config.num_key_value_heads, _head_dim(config)
    group = config.num_attention_heads // kv_heads
    # the mean query; then for each entry, the layer's own among them, a score and its part of the sum
    return sum(kv_heads * d * (group + 4 * (len(read) + 1)) for read in config.depth_sources if read)


def _attnres_sites(config: PreTrainedConfig) -> tuple[int, ...]:
    """Numbers of sources; the embedding alone is not mixed."""
    return tuple(finished + 1 for finished in config.num_finished_sources if finished)


def _attnres_parameters(config: PreTrainedConfig) -> int:
    return (2 * config.num_hidden_layers + 1) * (2 * config.hidden_size + config.attnres_recency_bias)


def _attnres_flops(config: PreTrainedConfig) -> int:
    # for each source its norm, its score and its part of the sum; the vanilla model adds in every sub-layer
    return 6 * config.hidden_size * sum(_attnres_sites(config))


def _denseformer_flops(config: PreTrainedConfig) -> int:
    return config.hidden_size * sum(2 * len(read) - 1 for read in config.average_sources if read)


def _mhc_parameters(config: PreTrainedConfig) -> int:
    streams, hidden = config.mhc_num_streams, config.hidden_size
    maps = streams * (streams + 2)
    return 2 * config.num_hidden_layers * ((maps + 1) * streams * hidden + maps + 3) + streams


def _mhc_flops(config: PreTrainedConfig) -> int:
    streams, hidden = config.mhc_num_streams, config.hidden_size
    norm_and_projection = 2 * streams * hidden * (1 + streams * (streams + 2))
    read = 2 * streams * hidden
    # the vanilla model adds once where each stream gets its part
    write = 2 * streams * hidden * (streams + 1) - hidden
    return 2 * config.num_hidden_layers * (norm_and_projection + read + write) + 2 * streams * hidden


def _moda_parameters(config: PreTrainedConfig) -> int:
    projections = config.moda_ffn_slots + config.moda_attn_depth_proj
    kv_size = config.num_key_value_heads * _head_dim(config)
    return (config.num_hidden_layers - 1) * projections * 2 * config.hidden_size * kv_size


def _moda_flops(config: PreTrainedConfig) -> int:
    # the projections are matrices; of each slot that a head reads, a score and its part of the sum
    read = sum(stop - start for start, stop in config.depth_slots)
    return 2 * _moda_parameters(config) + 4 * config.num_attention_heads * _head_dim(config) * read


NO_MIXING = Mixing(lambda config: 0, lambda config: 0)
# by model type
MIXING = {
    "depth_qwen3": Mixing(lambda config: 0, _depth_attention_flops),
    "attnres": Mixing(_attnres_parameters, _attnres_flops),
    "denseformer": Mixing(
        lambda config: sum(map(len, config.average_sources)),
        _denseformer_flops,
    ),
    "mhc": Mixing(_mhc_parameters, _mhc_flops),
    "moda_olmo2": Mixing(_moda_parameters, _moda_flops),
}
