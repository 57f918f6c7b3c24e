# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
What the keys of a source's config.json are, besides the fields that its stock configuration declares.

Stock code reads more than it declares, by `getattr(config, ...)`; and some checkpoints have keys of code that is not
stock. So every key is carried, known to be without effect, or refused; the rest is named in a warning.
"""

from typing import Any


# what a file is, which is written anew, and by which name the host knows it
IDENTITY_KEYS = ("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path", "name_or_path")
# older names, and parts, of declared fields, which the host's configurations understand
ALIASES = ("torch_dtype", "rope_scaling", "rope_theta", "partial_rotary_factor", "num_labels", "linear_attn_config")
# declared by some stock configurations, and read by the stock code of the others where it is set all the same
READ_EVERYWHERE = ("head_dim",)
# by which the host chooses a tokenizer
TOKENIZER_KEYS = ("tokenizer_class", "model_name")


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


# how and where a model runs. A checkpoint has no say in that while it is read, nor in the result
EXECUTION_KEYS = _words(
    "attn_implementation _attn_implementation attn_implementation_internal _attn_implementation_internal",
    "_attn_implementation_autoset experts_implementation _experts_implementation _experts_implementation_internal",
    "_flash_attn_2_enabled use_flash_attention use_flash_attention_2 use_flash_attn flash_attention use_kernels",
    "kernel_config use_local_kernel fusion_config distributed_config device_map tp_plan ep_plan pp_plan",
    "base_model_tp_plan base_model_ep_plan base_model_pp_plan base_model_fsdp_plan gradient_checkpointing",
    "use_gradient_checkpointing compile_config use_reentrant output_attentions tensor_parallel_size",
)
# without effect on what a stock model computes
HARMLESS_KEYS = _words(
    "_commit_hash _auto_class attribute_map is_heterogeneous task_specific_params finetuning_task use_bfloat16",
    "torchscript pruned_heads tie_encoder_decoder classifier_dropout hidden_dropout resid_pdrop embd_pdrop init_std",
    "initializer_factor tie_last_hidden_states unsloth_version unsloth_fixed model_max_length max_sequence_length",
    "pretraining_tp sep_token_id mask_token_id language bos_token eos_token pad_token attention_bias mlp_bias",
    "qkv_bias use_sliding_window max_window_layers quantization_config",
)
# declared, and without an equivalent in the targets if they are set
_DECLARED_BUT_REFUSED = ("is_encoder_decoder", "chunk_size_feed_forward")
# keys whose absence stands for true
_ON_BY_DEFAULT = ("is_causal", "use_rope")
# what a key stands for, the values besides null, false and nothing with which it changes nothing, and such keys
_REFUSALS = (
    ("attention that is not causal", (True,), "is_causal"),
    ("attention that is not causal", (), "use_bidirectional_attention bidirectional use_bidirectional"),
    ("layers without rotation", (True,), "use_rope"),
    ("layers without rotation", (0,), "nope_layer_interval no_rope_layer_interval"),
    ("layers without rotation", (1,), "no_rope_layers"),
    ("another rotation", (1,), "rotary_pct"),
    ("another rotation", (), "rope_interleaved rotary_dim rotary_emb_base"),
    ("other positions", ("absolute", "rope", "rotary", "default"), "position_embedding_type"),
    ("other positions", (), "alibi use_alibi"),
    ("a part of an encoder-decoder model", (True,), "is_decoder"),
    ("a part of an encoder-decoder model", (), "is_encoder_decoder add_cross_attention cross_attention_hidden_size"),
    ("layers with fields of their own", (), "per_layer_config mtp_per_layer_config"),
    ("a cache of windows, which the attention of such a model does not have", (), "sliding_window"),
    ("attention in chunks", (), "attention_chunk_size"),
    ("other kinds of layers than such a model has", ("full_attention", "dense"), "layer_types mlp_layer_types"),
    ("layers that share keys and values", (0,), "num_kv_shared_layers kv_sharing_modes"),
    ("chunks in the feed-forward networks", (0,), "chunk_size_feed_forward"),
    ("another file of weights", ("model.safetensors",), "transformers_weights"),
    ("quantised weights", (), "quantization compression_config"),
    ("a part of the vocabulary", (), "unpadded_vocab_size"),
    ("norms of queries and keys", (), "qk_layernorm"),
    ("clipped queries, keys and values", (), "clip_qkv"),
    ("attention sinks", (), "attention_sinks add_swa_attention_sink_bias add_full_attention_sink_bias"),
    ("gated attention", (), "attn_output_gate use_gated_attention"),
    ("parallel attention", (), "parallel_attn parallel_residual use_parallel_residual"),
    ("experts", (0,), "num_experts num_local_experts n_routed_experts moe_num_experts"),
    ("a temperature of the attention", (), "attn_temperature_tuning attn_scale floor_scale query_pre_attn_scalar"),
    ("a scale", (1,), "embedding_multiplier residual_multiplier attention_multiplier logits_scaling logit_scale"),
    ("a scale", (1,), "scale_emb scale_depth embedding_scale embed_scale logits_scale residual_scale mup_multiplier"),
    ("a scale", (1,), "lm_head_multiplier key_multiplier query_multiplier output_multiplier output_multiplier_scale"),
    ("a scale", (1,), "logits_mup_width_multiplier mup_width_multiplier"),
    ("capped numbers", (), "final_logit_softcapping attn_logit_softcapping logit_cap attn_logit_cap logit_softcap"),
    ("capped numbers", (), "logits_soft_cap attention_softcap router_logit_softcapping final_logit_softcap"),
    ("a model of several parts", (), "text_config vision_config audio_config decoder encoder generator text_encoder"),
    ("a model of several parts", (), "llm_config language_config thinker_config talker_config decoder_config"),
)
REFUSED_KEYS = {key: (change, neutral) for change, neutral, keys in _REFUSALS for key in keys.split()}


def refused_keys(declared: set[str], source: dict[str, Any]) -> dict[str, str]:
    """Keys with a value that changes the function and cannot be carried, and what they stand for."""
    refusals = dict(REFUSED_KEYS)
    if source.get("model_type") == "mistral":
        # the host's Auto classes take a Mistral that has this key for a Ministral, whose layers it is followed in
        windowed = source.get("sliding_window", 0) is not None
        refusals["layer_types"] = ("layers of a Ministral", ("sliding_attention" if windowed else "full_attention",))
    return {
        key: change
        for key, (change, neutral) in refusals.items()
        if key in source
        and (key not in declared or key in _DECLARED_BUT_REFUSED)
        and not _is_neutral(key, source[key], neutral)
    }


def _is_neutral(key: str, value: Any, neutral: tuple) -> bool:
    if isinstance(value, list):
        return all(_is_neutral(key, each, neutral) for each in value)
    if value is None or value == {} or value == "":
        return True
    if isinstance(value, bool):
        # not equal to the numbers 1 and 0 here
        return value == (key in _ON_BY_DEFAULT) or any(value is each for each in neutral)
    return any(value == each and not isinstance(each, bool) for each in neutral)
