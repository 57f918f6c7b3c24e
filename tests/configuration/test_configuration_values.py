# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Values that no model computes with, or that would take all time or memory, are refused before anything is made."""

import math
import time
import tracemalloc

import pytest
from huggingface_hub.errors import StrictDataclassError

from depthmix import AttnResConfig, DenseFormerConfig, DepthQwen3Config, MHCConfig, MoDAOlmo2Config
from depthmix.families import FAMILIES


EVERY = pytest.mark.parametrize(
    "config_class", [AttnResConfig, DenseFormerConfig, DepthQwen3Config, MHCConfig, MoDAOlmo2Config]
)
# fields, and the field, value and rule of the message
HOST_FIELDS = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be at most 4096"),
    ({"num_labels": 10**8}, "num_labels=100000000: must be at most 1048576"),
    ({"num_labels": "many"}, "num_labels='many': must be a whole number"),
    ({"id2label": {"first": "x"}}, "id2label has the key 'first': must be the number of a label"),
    ({"vocab_size": 10**5000}, "more than 38 digits): must be at most 2147483647"),
    ({"head_dim": 7}, "head_dim=7: must be even"),
    ({"max_position_embeddings": 0}, "max_position_embeddings=0: must be positive"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan: must be a finite number"),
    ({"rms_norm_eps": math.inf}, "rms_norm_eps=inf: must be a finite number"),
    ({"rms_norm_eps": 1e39}, "rms_norm_eps=1e+39: must be a finite number, as fp32 has them"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0: must be at least 0"),
    ({"initializer_range": -0.1}, "initializer_range=-0.1: must be at least 0"),
    ({"attention_dropout": 1.5}, "attention_dropout=1.5: must be at most 1"),
    ({"attention_dropout": math.nan}, "attention_dropout=nan: must be a finite number"),
    ({"sliding_window": -5}, "sliding_window=-5: must be at least 0"),
    ({"hidden_act": "bogus"}, "hidden_act='bogus': must be an activation of transformers"),
    ({"dtype": "load"}, "dtype='load': must be a floating dtype"),
    ({"dtype": False}, "dtype=False: must be a floating dtype"),
    ({"torch_dtype": "int64"}, "torch_dtype='int64': must be a floating dtype"),
    ({"pad_token_id": 97}, "pad_token_id=97: must be less than vocab_size=97"),
    ({"rope_theta": math.nan}, "rope_theta=nan: must be a finite number"),
    ({"rope_theta": 0}, "rope_theta=0: must be positive"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta=-1.0: must be positive"),
    ({"rope_parameters": {"rope_type": "bogus"}}, "rope_type='bogus': must be one of default"),
    ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor=0.0: must be positive"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "factor='two': must be a number"),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, math.inf], "long_factor": [1.0, 1.0]}},
        "short_factor=inf: must be a finite number",
    ),
    ({"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention': must be one of"),
]


@EVERY
@pytest.mark.parametrize(("fields", "message"), HOST_FIELDS)
def test_fields_of_the_host(config_class, fields, message, tiny):
    with pytest.raises(StrictDataclassError) as caught:
        config_class(**tiny | fields)
    assert message in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("config_class", "fields", "message"),
    [
        (MHCConfig, {"mhc_alpha_init": math.nan}, "mhc_alpha_init=nan: must be a finite number"),
        (MHCConfig, {"mhc_alpha_init": -(10**39)}, "more than 38 digits): must be a finite number, as fp32 has them"),
        (
            MoDAOlmo2Config,
            {"hidden_size": 36, "head_dim": None},
            "hidden_size=36: must give each of num_attention_heads=4 an even",
        ),
        (
            MoDAOlmo2Config,
            {"hidden_size": 3, "head_dim": None},
            "hidden_size=3: must be at least num_attention_heads=4",
        ),
        (
            DepthQwen3Config,
            {"num_hidden_layers": 10**9, "layer_types": ["full_attention"]},
            "num_hidden_layers=1000000000: must be at most 4096",
        ),
        (MHCConfig, {"mhc_sinkhorn_iters": 10**9}, "mhc_sinkhorn_iters=1000000000: must be at most 1000"),
        (MHCConfig, {"mhc_num_streams": 10**6}, "mhc_num_streams=1000000: must be at most 64"),
        (AttnResConfig, {"attnres_recency_bias_init": -math.inf}, "attnres_recency_bias_init=-inf: must be a finite"),
        (DepthQwen3Config, {"num_loops": 10**9}, "num_loops=1000000000: must be at most 1024"),
        (AttnResConfig, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0: must be positive"),
        (DenseFormerConfig, {"layer_types": ["sliding_attention"] * 4}, "sliding_window=None: must be positive"),
    ],
)
def test_fields_of_a_family(config_class, fields, message, tiny):
    with pytest.raises(StrictDataclassError) as caught:
        config_class(**tiny | {"sliding_window": None} | fields)
    assert message in str(caught.value.__cause__)


@EVERY
def test_nothing_is_made_of_a_size_that_is_refused(config_class, tiny):
    started = time.process_time()
    tracemalloc.start()
    for fields in ({"num_hidden_layers": 10**9}, {"num_labels": 10**8}):
        with pytest.raises(StrictDataclassError):
            config_class(**tiny | fields)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6 and time.process_time() - started < 2


@EVERY
def test_what_published_checkpoints_have_is_accepted(config_class, tiny):
    config = config_class(
        **tiny | {"pad_token_id": -1, "rms_norm_eps": 1e-06, "attention_dropout": 0, "num_hidden_layers": 200},
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    )
    assert config.rope_parameters["factor"] == 8.0


HOSTILE = {
    "mhc_qwen3_moe": [
        ({"num_experts": 10**9}, "num_experts=1000000000: must be at most 16384"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5: must be at most 4"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0: must be positive"),
        ({"moe_intermediate_size": -4}, "moe_intermediate_size=-4: must be positive"),
    ],
    "depth_olmoe": [
        ({"num_experts": -1}, "num_experts=-1: must be at least 0"),
        ({"clip_qkv": math.nan}, "clip_qkv=nan: must be a finite number"),
    ],
    "mhc_mistral": [({"sliding_window": 0}, "sliding_window=0: must be positive where a layer has a window")],
    "attnres_olmo3": [({"sliding_window": None}, "sliding_window=None: must be positive where a layer has a window")],
    "value_residual_qwen3": [
        ({"layer_types": ["full_attention"] * 5000}, "layer_types has 5000 entries: must have at")
    ],
    "depth_smollm3": [
        ({"no_rope_layers": [1]}, "no_rope_layers has 1 entries: must have one for each of 36 layers"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval=0: must be positive"),
    ],
}


if "attnres_kimi_linear" in FAMILIES:
    HOSTILE["attnres_kimi_linear"] = [
        ({"num_experts_per_tok": None}, "num_experts_per_tok=None: must be a whole number where there are experts"),
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, "num_key_value_heads=2: must be num_attention_heads=4"),
    ]


@pytest.mark.parametrize(
    ("model_type", "fields", "rule"), [(name, *case) for name, cases in HOSTILE.items() for case in cases]
)
def test_fields_of_other_backbones(model_type, fields, rule):
    with pytest.raises(StrictDataclassError, match=rule):
        FAMILIES[model_type].find_class("Config")(**fields)
