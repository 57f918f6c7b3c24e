# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Groups of parameters for an optimizer: which of them decay, and which have a learning rate of their own."""

import math
from typing import Any

from torch import nn


def mixing_parameters(model: nn.Module) -> dict[str, bool]:
    """
    The names of the parameters by which layers are mixed, and whether weight decay is meant for each. They are those
    of the instances of `MixingModule`, also where an adapter or a wrapper stands around the model or such a module.
    """
    # by the attribute and not by the class: the code of a saved model has a class of its own, FSDP2 derives another
    return {
        f"{prefix}.{name}" if prefix else name: name in module.decayed_parameters
        for prefix, module in model.named_modules()
        if hasattr(type(module), "decayed_parameters")
        for name in module._parameters
        if module._parameters[name] is not None
    }


def optimizer_groups(
    model: nn.Module, lr: float, mixing_lr: float | None = None, weight_decay: float = 0.0, **options: Any
) -> list[dict[str, Any]]:
    """
    Parameter groups for a torch optimizer, of all parameters that are to be trained. Mixing parameters have a learning
    rate of their own. Matrices decay; gains, biases, gates and the vectors and logits of the mixing do not.

    Args:
        model (`nn.Module`):
            A model of this package, bare or wrapped, before its parameters are flattened (FSDP1).
        lr (`float`):
            Learning rate of all parameters but the mixing ones.
        mixing_lr (`float`, *optional*):
            Learning rate of the mixing parameters; `lr` if left out. An adaptive optimizer moves a parameter by at
            most about its rate in a step, so at fine-tuning rates these need a multiple of `lr` to get anywhere.
        weight_decay (`float`, *optional*, defaults to 0.0):
            Of the parameters that decay; 0 for the others.
        options:
            Further options of the optimizer, put into every group.

    Returns:
        `list` of `dict` with the keys `params`, `lr` and `weight_decay`, without empty groups.

    Raises:
        `ValueError`: if a rate is negative or not finite, or nothing is to be trained; the message names the argument.

    ```python
    optimizer = torch.optim.AdamW(optimizer_groups(model, lr=2e-5, mixing_lr=2e-3, weight_decay=0.1))
    Trainer(model, arguments, train_dataset=dataset, optimizers=(optimizer, None)).train()
    ```
    """
    mixing_lr = lr if mixing_lr is None else mixing_lr
    for name, value in (("lr", lr), ("mixing_lr", mixing_lr), ("weight_decay", weight_decay)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}={value}: must be a finite number, zero or more.")
    mixing = mixing_parameters(model)
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # DeepSpeed keeps the shape of what it has partitioned
            is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) > 1
            # the logarithms of Kimi Linear's decay rates have the shape of a matrix
            decays = mixing.get(name, is_matrix and not name.endswith(".A_log"))
            groups.setdefault((name in mixing, decays), []).append(parameter)
    if not groups:
        raise ValueError("model has no parameters that require a gradient: there is nothing to optimize.")
    return [
        {
            "params": parameters,
            "lr": mixing_lr if is_mixing else lr,
            "weight_decay": weight_decay if decays else 0.0,
            **options,
        }
        for (is_mixing, decays), parameters in groups.items()
    ]
