# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Pure PyTorch form of the depth-weighted average of DenseFormer (arXiv 2402.02622): the definition that the kernel is
judged against.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .depth_precision import accumulation_dtype


def depth_average_reference(sources: Sequence[Tensor], weight: Tensor) -> Tensor:
    """The weighted sum of the sources, `[X, D]`. See `depth_average`."""
    dtype = accumulation_dtype(sources[-1])
    weight_N = weight.to(dtype)
    mixed_XD = weight_N[:1] * sources[0]
    for i, source_XD in enumerate(sources[1:], start=1):
        # This rounds once. A product and a sum would keep an fp32 copy of each source for the backward.
        mixed_XD = torch.addcmul(mixed_XD, source_XD, weight_N[i : i + 1])
    return mixed_XD.to(sources[-1].dtype)
