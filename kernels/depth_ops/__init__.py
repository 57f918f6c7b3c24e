# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Operations that mix along the depth of a model. They need torch alone, and are faster with Triton."""

from .attn_res import attn_res, attn_res_phase_1, attn_res_phase_2, attn_res_weights
from .depth_average import depth_average
from .depth_stream import DepthStream, moda_attention_over_stream
from .depth_value_mix import depth_value_mix, depth_value_weights
from .hyper_connection import hyper_connection_read, hyper_connection_write, stream_readout
from .moda_attention import moda_attention, moda_attention_weights
from .norm_rotary_mix import norm_rotary_mix
from .shared_input_linear import shared_input_linear


__all__ = [
    "DepthStream",
    "attn_res",
    "attn_res_phase_1",
    "attn_res_phase_2",
    "attn_res_weights",
    "depth_average",
    "depth_value_mix",
    "depth_value_weights",
    "hyper_connection_read",
    "hyper_connection_write",
    "moda_attention",
    "moda_attention_over_stream",
    "moda_attention_weights",
    "norm_rotary_mix",
    "shared_input_linear",
    "stream_readout",
]
