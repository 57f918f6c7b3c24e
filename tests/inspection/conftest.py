# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""A small awake model of every method, and of each way in which a method mixes."""

import pytest
import torch
from family_models import BACKBONE_FIELDS, wake

from depthmix.families import FAMILIES


SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MHC = {"mhc_num_streams": 3, "mhc_sinkhorn_iters": 3}
# name: model type and fields
VARIANTS = {
    "depth_attention": ("depth_qwen3", {"depth_stride": 1}),
    "depth_attention-gate": ("depth_olmo2", {"depth_stride": 2, "depth_window": 1, "depth_gate": True}),
    "depth_attention-loops": ("depth_llama", {"depth_stride": 2, "num_loops": 2}),
    "attnres-block": ("attnres", {"attnres_block_size": 3, "attnres_recency_bias": True}),
    "attnres-full": ("attnres_olmo2", {"attnres_variant": "full", "attnres_scale": "sum"}),
    "attnres-cumulative": ("attnres", {"attnres_variant": "cumulative", "attnres_block_size": 2}),
    "attnres-additive": ("attnres", {"attnres_block_size": 2, "attnres_routing": "additive"}),
    "attnres-additive_cumulative": (
        "attnres_mistral",
        {"attnres_variant": "cumulative", "attnres_block_size": 2, "attnres_routing": "additive"},
    ),
    "denseformer": ("denseformer", {}),
    "denseformer-spaced": ("denseformer_olmo2", {"dwa_dilation": 2, "dwa_period": 2, "num_hidden_layers": 4}),
    "mhc": ("mhc", MHC),
    "mhc-post_norms": ("mhc_olmo2", MHC),
    "moda": ("moda_qwen3", {"moda_gate": True, "moda_attn_depth_proj": True}),
    "moda-window": ("moda_olmo2", {"moda_depth_window": 3, "moda_depth_key_mode": "reader_norm"}),
    "value_residual": ("value_residual_qwen2", {}),
    "value_residual-fixed": ("value_residual_olmo2", {"value_residual_learnable": False}),
}


def build_small(model_type, ending="ForCausalLM", **fields):
    family = FAMILIES[model_type]
    own = {"head_dim": 8} if "head_dim" in BACKBONE_FIELDS[family.backbone.model_type] else {}
    torch.manual_seed(0)
    config = family.find_class("Config")(**SMALL | own | fields)
    return wake(family.find_class(ending)(config).eval())


@pytest.fixture
def small():
    """`small(model_type, **fields)` gives an awake model; equal arguments give equal weights."""
    return build_small


@pytest.fixture
def variants():
    """Name to model type and fields of each."""
    return VARIANTS


@pytest.fixture(params=VARIANTS)
def model(request):
    """A model of each of the variants."""
    model_type, fields = VARIANTS[request.param]
    return build_small(model_type, **fields)


@pytest.fixture
def inputs():
    """Two rows, the second of which begins with padding."""
    ids = torch.randint(3, SMALL["vocab_size"], (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, :2], mask[1, :2] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def other_inputs():
    """Two rows of the same length."""
    return {"input_ids": torch.randint(3, SMALL["vocab_size"], (2, 7), generator=torch.Generator().manual_seed(2))}
