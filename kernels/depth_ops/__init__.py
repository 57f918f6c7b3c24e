# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Operations that mix along the depth of a model. They need torch alone, and are faster with Triton."""

from .attn_res_op import attn_res, attn_res_additive, attn_res_phase_1, attn_res_phase_2, attn_res_weights
from .depth_average_op import depth_average
from .depth_value_mix_op import depth_value_mix, depth_value_weights
from .gated_linear_op import gated_linear, gated_product
from .hyper_connection_op import hyper_connection_read, hyper_connection_write, stream_readout
from .moda_attention_op import moda_attention, moda_attention_weights
from .moda_stream import DepthStream, moda_attention_over_stream
from .norm_rotary_mix_op import norm_rotary_mix
from .shared_input_linear_op import shared_input_linear


__all__ = [
    "DepthStream",
    "attn_res",
    "attn_res_additive",
    "attn_res_phase_1",
    "attn_res_phase_2",
    "attn_res_weights",
    "depth_average",
    "depth_value_mix",
    "depth_value_weights",
    "gated_linear",
    "gated_product",
    "hyper_connection_read",
    "hyper_connection_write",
    "moda_attention",
    "moda_attention_over_stream",
    "moda_attention_weights",
    "norm_rotary_mix",
    "shared_input_linear",
    "stream_readout",
]


def __dir__() -> list[str]:
    return __all__
