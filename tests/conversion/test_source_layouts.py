# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What checkpoints are taken for."""

import pytest

from depthmix.conversion import ConversionError, inspect_checkpoint
from depthmix.conversion.source_layouts import LAYOUTS, recognise_layout


RECENCY_BIAS = "model.layers.0.attnres_attn_aggregator.recency_bias"
NORMS = ("model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight")


@pytest.mark.parametrize(
    ("config", "tensor_names", "name"),
    [
        ({"model_type": "depth_qwen3", "depth_impl": "auto"}, NORMS, "depth_qwen3"),
        ({"model_type": "qwen3"}, NORMS, "qwen3"),
        ({"model_type": "qwen3"}, ("embed_tokens.weight", "norm.weight"), "qwen3_base"),
        ({"model_type": "qwen3", "use_p2n": True}, NORMS, "qwen3_p2n"),
        ({"model_type": "llama"}, (), "llama"),
        ({"model_type": "llama", "use_qk_norm": False}, (), "llama"),
        ({"model_type": "llama"}, NORMS, "released_qk_norm"),
        ({"model_type": "llama", "use_qk_norm": True, "use_depth_attention": False}, NORMS, "released_qk_norm"),
        # the attention switch alone never turned anything on
        ({"model_type": "llama", "cross_layer_mode": "depth_softmax"}, NORMS, "released_qk_norm"),
        ({"model_type": "llama", "use_depth_attention": True}, NORMS, "released_depth_attention"),
        ({"model_type": "llama", "cross_layer_pattern": "depth_softmax"}, NORMS, "released_depth_attention"),
        ({"model_type": "llama", "cross_layer_pattern": "depth_attention"}, (), "released_depth_attention"),
        ({"model_type": "llama", "cross_layer_pattern": "all_attention"}, NORMS, "released_experiment"),
        ({"model_type": "llama", "no_residual": True}, NORMS, "released_experiment"),
        ({"model_type": "llama", "layer_kv_reuse_map": {}, "no_residual": False}, NORMS, "released_qk_norm"),
        ({"model_type": "llama", "baseline_mode": "something_else"}, NORMS, "released_experiment"),
        ({"model_type": "llama", "baseline_mode": " Block-AttnRes "}, NORMS, "released_attnres_block"),
        ({"model_type": "llama", "residual_baseline": "attention_residual"}, (RECENCY_BIAS,), "released_attnres"),
        ({"model_type": "llama"}, (RECENCY_BIAS,), "released_attnres"),
        ({"model_type": "llama", "residual_baseline": "denseformer"}, NORMS, "released_denseformer"),
        ({"model_type": "llama", "baseline_mode": "none", "residual_baseline": "mhc"}, NORMS, "released_mhc"),
        ({"model_type": "llama"}, ("model.layers.0.attnres_attn_aggregator.pseudo_query",), "released_attnres_block"),
        ({"model_type": "llama"}, ("model.densetransformer_dwa.alphas.0",), "released_denseformer"),
        # the tensors are stronger evidence than the config
        (
            {"model_type": "llama", "use_depth_attention": True},
            ("model.layers.0.attn_residual_connector.alpha_pre",),
            "released_mhc",
        ),
        ({"model_type": "llama"}, ("dwa_modules.alphas.0.weight",), "llama_dwa"),
        ({"model_type": "qwen3"}, (*NORMS, "model.dwa_modules.alphas.3.weight"), "qwen3_dwa"),
        ({"model_type": "denseformer", "depth_impl": "auto"}, (), "denseformer"),
        ({"model_type": "mhc", "depth_impl": "auto"}, (), "mhc"),
        ({"model_type": "qwen3_attnres"}, (), "attention_residuals"),
        ({"model_type": "kimi_linear", "attn_res_block_size": 12}, (), "attention_residuals"),
        ({"model_type": "qwen3", "attnres_num_blocks": 4}, NORMS, "attention_residuals"),
        ({"model_type": "attnres", "depth_impl": "auto"}, (), "attnres"),
        ({"model_type": "moda_olmo2", "depth_impl": "auto"}, (), "moda_olmo2"),
        ({"model_type": "olmo2"}, (), "olmo2"),
        ({"model_type": "qwen2"}, (), "qwen2"),
        ({"model_type": "qwen2"}, ("embed_tokens.weight",), "qwen2_base"),
        ({"model_type": "llama"}, ("embed_tokens.weight",), "llama_base"),
        ({"model_type": "mistral"}, (), "mistral"),
        ({"model_type": "gemma"}, (), "unknown"),
        # other people's
        ({"model_type": "mhc", "mhc_num_streams": 4}, (), "unknown"),
        ({}, NORMS, "unknown"),
    ],
)
def test_recognise_layout(config, tensor_names, name):
    layout, evidence = recognise_layout(config, tensor_names)
    assert layout.name == name
    assert evidence


def test_names_are_unique():
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)


def test_config_and_tensors_contradict_each_other():
    with pytest.raises(
        ConversionError, match="baseline_mode 'attnres', but the tensors are those of the released mHC"
    ):
        recognise_layout(
            {"model_type": "llama", "baseline_mode": "attnres"}, ["model.layers.0.attn_residual_connector.alpha_pre"]
        )


def test_inspect_released(released_source):
    source = released_source(use_depth_attention=True, depth_attention_stride=2)
    description = inspect_checkpoint(source)
    assert description.layout == "released_depth_attention"
    assert description.evidence == ["use_depth_attention is true"]
    assert (description.num_tensors, description.dtypes, description.files) == (48, {"F64": 48}, ["model.safetensors"])
    assert description.nbytes == 8 * description.num_parameters
    outcome = description.conversions["depth_attention"]
    assert outcome.startswith(
        "yes, to depth_qwen3, with depth_stride=2, depth_window=0, key_norm_position='after_rope'"
    )
    assert outcome in str(description)


@pytest.mark.parametrize(
    ("keys", "kind", "reason"),
    [
        ({"baseline_mode": "mhc"}, "the released mHC baseline", "Convert it to mhc"),
        ({"model_type": "gpt2"}, "a model that depthmix does not know", "Accepted are: Qwen3; "),
        ({"use_depth_attention": True, "mlp_bias": True}, "the released Depth-Attention layout", "mlp_bias is True"),
        ({"use_depth_attention": True, "hidden_size": 16}, "the released Depth-Attention layout", "has shape"),
    ],
)
def test_inspect_says_why_not(keys, kind, reason, released_source):
    description = inspect_checkpoint(released_source(**keys))
    assert description.kind == kind
    assert description.conversions["depth_attention"].startswith("no. ")
    assert reason in description.conversions["depth_attention"]
