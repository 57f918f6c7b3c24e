# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Operations that mix along the depth of a model. They need torch alone, and are faster with Triton."""

from .attn_res import attn_res, attn_res_phase_1, attn_res_phase_2, attn_res_weights
from .depth_stream import DepthStream, moda_attention_over_stream
from .depth_value_mix import depth_value_mix, depth_value_weights
from .moda_attention import moda_attention, moda_attention_weights
from .norm_rotary_mix import norm_rotary_mix


__all__ = [
    "DepthStream",
    "attn_res",
    "attn_res_phase_1",
    "attn_res_phase_2",
    "attn_res_weights",
    "depth_value_mix",
    "depth_value_weights",
    "moda_attention",
    "moda_attention_over_stream",
    "moda_attention_weights",
    "norm_rotary_mix",
]
