# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Modules that hold the parameters by which layers are mixed."""

from collections.abc import Callable

import torch
from torch import nn


LOW_PRECISION = (torch.float16, torch.bfloat16)


def mixing_dtype() -> torch.dtype:
    """The dtype of mixing parameters where a model is built: the default one, but fp32 in place of 16 bits."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


class MixingModule(nn.Module):
    """
    A module that holds parameters by which layers are mixed: what this class is says which parameters these are.

    There are few of them, their values are large beside a step of training, and in 16 bits most steps would be
    rounded away. So they are fp32 wherever the model is built, loaded or cast in fp16 or bf16, and the operations take
    them as such beside activations of another dtype.

    Weight decay would pull them to zero, which is no special value of them, unlike of a matrix: what decays all the
    same is named in `decayed_parameters`.
    """

    decayed_parameters: tuple[str, ...] = ()
    # whether it says by how much a mix counts, and nothing at zero
    is_gate = False

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.dtype in LOW_PRECISION:
            param = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
        super().register_parameter(name, param)

    def _apply(self, fn: Callable, recurse: bool = True):
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            # not cast back, which would give rounded values
            return tensor.to(result.device, torch.float32) if result.dtype in LOW_PRECISION else result

        return super()._apply(keep, recurse)
