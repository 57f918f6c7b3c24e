# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Operations that mix along the depth of a model. They need torch alone."""

from .attn_res import attn_res, attn_res_phase_1, attn_res_phase_2, attn_res_weights
from .depth_value_mix import depth_value_mix, depth_value_weights


__all__ = [
    "attn_res",
    "attn_res_phase_1",
    "attn_res_phase_2",
    "attn_res_weights",
    "depth_value_mix",
    "depth_value_weights",
]
