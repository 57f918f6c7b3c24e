# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""MoDAOlmo2 inside transformers: the checks of every causal language model, and what is its own."""

import functools

import pytest
from causal_lm_checks import CausalLMChecks

from depthmix import MoDAOlmo2ForCausalLM, MoDAOlmo2ForSequenceClassification


@pytest.fixture
def build(build):
    return functools.partial(build, model_class=MoDAOlmo2ForCausalLM)


class TestCausalLM(CausalLMChecks):
    variants = {
        "row 4": {},
        "row 5, reader norm": {"moda_attn_depth_proj": True, "moda_depth_key_mode": "reader_norm"},
        "row 3, pre-norm": {
            "moda_ffn_slots": False,
            "moda_norm_style": "pre",
            "num_attention_heads": 6,
            "head_dim": 16,
        },
        "window, post-norm": {"moda_depth_window": 3, "moda_norm_style": "post"},
    }
    absolute_variants = {"row 5, reader norm"}
    attentions = ("eager", "sdpa")
    sequence_classification_class = MoDAOlmo2ForSequenceClassification

    def num_depth_columns(self, model, layer):
        start, stop = model.config.depth_slots[layer]
        return stop - start
