# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""In which dtypes operations compute, and what autocast has to say about that."""

import contextlib
from functools import reduce

import torch
from torch import Tensor


# This is asked once, since the compilers of older versions of torch cannot trace the question.
AUTOCAST_DEVICES = frozenset(
    device for device in ("cpu", "cuda", "xpu", "mps", "hpu") if torch.amp.is_autocast_available(device)
)


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """In what sums and softmaxes are computed: fp32, or fp64 where a tensor has it."""
    return torch.promote_types(mix_dtype(*tensors), torch.float32)


def mix_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype that the sum of the tensors would have."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """To what autocast brings the inputs of an attention; None if it is off or leaves this tensor alone."""
    device = tensor.device.type
    if tensor.dtype is torch.float64 or device not in AUTOCAST_DEVICES:
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    """The context in which matrix products keep the dtype of their inputs."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if device in AUTOCAST_DEVICES else contextlib.nullcontext()
