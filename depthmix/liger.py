# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Leaner training of a model that is there already, as liger-kernel's users know it, with or without that package."""

from typing import Any

from torch import nn


def apply_liger_kernel(
    model: nn.Module,
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
) -> dict[str, str]:
    """
    Makes a causal language model compute its loss in training without all logits in memory: by liger-kernel's kernels
    on a GPU if that is installed (`pip install liger-kernel`), else in plain PyTorch. `Trainer` does the same with
    `TrainingArguments(use_liger_kernel=True)`, for which liger-kernel must be installed. Nothing but the model is
    changed.

    In training the outputs then have no logits, unless the forward gets `skip_logits=False`. A head with adapters,
    hooks, sharding or quantisation is called piece by piece, so that these take effect. Under a compiler, and with a
    loss function of one's own, all logits are computed.

    Args:
        model (`nn.Module`):
            A model of this package, or what wraps one, such as a PEFT model.
        rope, rms_norm, swiglu (`bool`, *optional*, defaults to `True`):
            Without effect: the models of this package have operations of their own for these.
        cross_entropy (`bool`, *optional*, defaults to `False`):
            Whether the loss is computed from all logits by liger-kernel's kernel, which must be installed.
        fused_linear_cross_entropy (`bool`, *optional*, defaults to `True`):
            Whether the loss is computed without all logits; `False` restores the usual one.

    Returns:
        `dict[str, str]`: what does the work of each of these operations, and how the loss is computed.

    Raises:
        `TypeError`: if there is no model of this package in it.
        `ValueError`: if both kinds of loss are asked for, or `cross_entropy` of a model without a loss over tokens.
        `ImportError`: if `cross_entropy` is asked for and liger-kernel is not installed.

    Example:

        >>> from depthmix import DepthQwen3Config, DepthQwen3ForCausalLM, apply_liger_kernel

        >>> sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = DepthQwen3ForCausalLM(DepthQwen3Config(vocab_size=99, num_key_value_heads=1, **sizes))
        >>> apply_liger_kernel(model)["swiglu"]
        'depthmix'
    """
    # the code of a saved model has the same method in classes of its own
    ours: list[Any] = [module for module in model.modules() if hasattr(type(module), "apply_liger_kernel")]
    if not ours:
        raise TypeError(f"model is a {type(model).__name__}: there is no model of depthmix in it.")
    return ours[0].apply_liger_kernel(
        rope=rope,
        cross_entropy=cross_entropy,
        fused_linear_cross_entropy=fused_linear_cross_entropy,
        rms_norm=rms_norm,
        swiglu=swiglu,
    )
