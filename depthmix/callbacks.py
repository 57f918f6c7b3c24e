# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Callbacks for the Trainer: a slow start of the gates, and a log of what the mixing does."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from depthmix.inspection import depth_weights, gate_values
from depthmix.inspection.measures import gates_of


class GateWarmup(TrainerCallback):
    """
    Keeps gates small at first. After each step of the optimizer every gate is brought into `[-limit, limit]`, and the
    limit grows linearly from zero to `maximum` over `steps` steps. From then on gates are left alone.

    A gate that opens faster than the layers after it adapt raises the loss at first; see `docs/retrofit.md`.

    Args:
        steps (`int`):
            How many steps of the optimizer the limit grows for.
        maximum (`float`, *optional*, defaults to 1.0):
            The limit at the end of these.

    Raises:
        `ValueError`: if one of them is not positive; in training, if the model has no gates or they are sharded.

    ```python
    Trainer(model, arguments, train_dataset=dataset, callbacks=[GateWarmup(steps=500)]).train()
    ```
    """

    def __init__(self, steps: int, maximum: float = 1.0):
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"steps={steps!r}: must be a positive number of steps.")
        if not (math.isfinite(maximum) and maximum > 0):
            raise ValueError(f"maximum={maximum!r}: must be a positive, finite number.")
        self.steps, self.maximum = steps, maximum

    def limit(self, step: int) -> float | None:
        """The limit after so many steps; None where there is none any more."""
        return None if step >= self.steps else self.maximum * step / self.steps

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs
    ):
        """Checks that there are gates."""
        gates = list(gates_of(model))
        if not gates:
            raise ValueError("GateWarmup: must have a model with gates (depth_gate=True or moda_gate=True).")
        # a part of a gate, or none of it, can lie on another device
        if any(type(weight.data) is not Tensor or not weight.numel() for _, weight in gates):
            raise ValueError(f"GateWarmup: {gates[0][0]} must be whole on each device, and is sharded.")

    @torch.no_grad()
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs):
        """Applies the limit; the Trainer has counted the step by now."""
        limit = self.limit(state.global_step)
        if limit is not None:
            for _, weight in gates_of(model):
                weight.clamp_(-limit, limit)


class MixingLogger(TrainerCallback):
    """
    Logs, with each log of the Trainer and to whatever `report_to` names, gates (their mean, mean size and extremes,
    and each layer's mean) and the entropy of the depth weights and the weight of the last source, which is the layer's
    own or the newest. [`depthmix.inspection.depth_weights`] has these weights, for every method.

    The entropy is a share of the largest that the number of sources allows: 1 is equal weights, 0 a single source. The
    depth weights are those of one forward without gradients on `inputs`, for which the mixing parameters must be whole
    on each device, or gathered by FSDP2.

    Args:
        trainer (`Trainer`):
            The Trainer, to which the callback is then added.
        inputs (`dict`, *optional*):
            A batch, as the model takes it, to look at depth weights with. Left out, only gates are logged.
        every (`int`, *optional*, defaults to 1):
            With which of the Trainer's logs, counted from the first, depth weights are logged.
        maps (`bool`, *optional*, defaults to `False`):
            Whether the mean weight of each source in each target is logged too, such as `depth_map/layer_3/own`.

    Raises:
        `ValueError`: if `every` is not a positive number.

    ```python
    trainer = Trainer(model, arguments, train_dataset=dataset)
    trainer.add_callback(MixingLogger(trainer, tokenizer("def fibonacci(n):", return_tensors="pt")))
    ```
    """

    def __init__(
        self, trainer: Trainer, inputs: Mapping[str, Tensor] | None = None, every: int = 1, maps: bool = False
    ):
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every={every!r}: must be a positive number of logs.")
        if maps and inputs is None:
            raise ValueError("maps=True: must have inputs, on which the weights are looked at.")
        self.trainer, self.inputs, self.every, self.maps, self.count = trainer, inputs, every, maps, 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs):
        """Logs where the Trainer is about to."""
        if not control.should_log:
            return
        values = gate_summary(model)
        if self.inputs is not None and self.count % self.every == 0:
            values |= depth_usage(model, self.inputs, self.maps)
        self.count += 1
        if values:
            self.trainer.log(values)
            # which a log takes back, and the Trainer has its own still to write
            control.should_log = True


def gate_summary(model: nn.Module) -> dict[str, float]:
    """Mean, mean size and extremes of all gates, and the mean of each layer's; nothing without gates."""
    gates = gate_values(model)
    if not gates:
        return {}
    values = torch.cat([each.flatten() for each in gates.values()])
    found = {
        "gate/mean": values.mean(),
        "gate/mean_size": values.abs().mean(),
        "gate/lowest": values.min(),
        "gate/highest": values.max(),
    }
    found |= {f"gate/{layer.replace(' ', '_')}": each.mean() for layer, each in gates.items()}
    return {name: value.item() for name, value in found.items()}


def depth_usage(model: nn.Module, inputs: Mapping[str, Tensor], maps: bool = False) -> dict[str, float]:
    """
    Entropy of the depth weights, and the weight of the last source of each layer or site, by its number, on average
    over tokens and heads, and with `maps` those of all sources, by name; nothing where nothing is mixed.
    """
    rows = [row for row in depth_weights(model, inputs) if len(row.site.sources) > 1]
    if not rows:
        return {}
    means = [row.mean().mean(0).tolist() for row in rows]
    found = {f"depth/own_{row.site.number}": mean[-1] for row, mean in zip(rows, means, strict=True)}
    found["depth/entropy"] = sum(row.mean_entropy() for row in rows) / len(rows)
    if maps:
        for row, mean in zip(rows, means, strict=True):
            for source, weight in zip(row.site.sources, mean, strict=True):
                name = f"depth_map/{row.site.target}/{source}"
                found[name.replace(",", "").replace(" ", "_")] = weight
    return found
