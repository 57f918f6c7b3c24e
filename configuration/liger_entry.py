# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
How liger-kernel finds our models. It looks the model type up in a table of functions; the Trainer
(`use_liger_kernel=True`) and `AutoLigerKernelForCausalLM` go by it, and say nothing of a type that is not there.

It is not imported here, since that takes Triton and all of its kernels along: types are entered once somebody does.
Saved models carry this file, so that theirs are entered too where this package is not installed.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .after_import import after_import


LIGER = "liger_kernel.transformers.monkey_patch"
_model_types: list[str] = []


def enter_into_liger(model_type: str) -> None:
    """Lets liger-kernel know a model type, now or when it is imported. Doing it again changes nothing."""
    if model_type in _model_types:
        return
    _model_types.append(model_type)
    if LIGER in sys.modules:
        _enter_all(sys.modules[LIGER])
    elif len(_model_types) == 1:
        after_import(LIGER, _enter_all)


def _enter_all(liger: ModuleType) -> None:
    for model_type in _model_types:
        # another copy of this code, of a saved model, may have been first: its entry does the same
        liger.MODEL_TYPE_TO_APPLY_LIGER_FN.setdefault(model_type, _entry())


def _entry() -> Callable[..., None]:
    # liger-kernel passes on what this signature names, and drops the rest
    def apply_liger_kernel_to_depthmix(
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        swiglu: bool = True,
        model: Any = None,
    ) -> None:
        """Sets what a model does or, without one, what models of this type do that are built later."""
        options = {
            "rope": rope,
            "cross_entropy": cross_entropy,
            "fused_linear_cross_entropy": fused_linear_cross_entropy,
            "rms_norm": rms_norm,
            "swiglu": swiglu,
        }
        if model is not None:
            model.apply_liger_kernel(**options)
        else:
            check_liger_options(cross_entropy, fused_linear_cross_entropy)
            vars(apply_liger_kernel_to_depthmix)["options"] = options

    return apply_liger_kernel_to_depthmix


def check_liger_options(cross_entropy: bool, fused_linear_cross_entropy: bool) -> None:
    """
    Raises:
        `ValueError`: for two ways to compute one loss.
    """
    if cross_entropy and fused_linear_cross_entropy:
        raise ValueError(
            "cross_entropy=True and fused_linear_cross_entropy=True: only one of them can compute the loss. The "
            "second is on unless it is set to False."
        )


def options_of_new_models(model_type: str) -> dict[str, bool]:
    """With what liger-kernel was last called for models of this type that were to be built later; else nothing."""
    table = getattr(sys.modules.get(LIGER), "MODEL_TYPE_TO_APPLY_LIGER_FN", {})
    return getattr(table.get(model_type), "options", {})
