# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the host library decides past its Auto classes, and what this package adds there when it is imported."""

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from depthmix.families import FAMILIES
from depthmix.late_registration import HEADS
from depthmix.optimizer import mixing_parameters


def exempt_from_decay(trainer_module: ModuleType) -> None:
    """
    Takes what must not decay out of what `Trainer.get_decay_parameter_names` returns. The host library goes by names
    such as `bias` and `norm`. Doing it again changes nothing.
    """
    original = trainer_module.Trainer.get_decay_parameter_names
    if hasattr(original, "knows_mixing_parameters"):
        return

    @functools.wraps(original)
    def get_decay_parameter_names(self, model) -> list[str]:
        exempt = {name for name, decays in mixing_parameters(model).items() if not decays}
        return [name for name in original(self, model) if name not in exempt]

    vars(get_decay_parameter_names)["knows_mixing_parameters"] = True
    trainer_module.Trainer.get_decay_parameter_names = get_decay_parameter_names


def show_to_server(manager: ModuleType) -> None:
    """Lets the server of `transformers serve` find classes, which it looks up in `transformers` by their names."""
    for family in FAMILIES.values():
        for ending in HEADS.values():
            model_class = family.find_class(ending)
            setattr(manager.transformers, model_class.__name__, model_class)


def give_response_templates(serving: ModuleType) -> None:
    """
    Lets the server of `transformers serve` find tool calls and thoughts in what models of this package write, by the
    model type of the stock model. Doing it again changes nothing.
    """
    original = serving.get_response_template
    if hasattr(original, "knows_backbones"):
        return

    @functools.wraps(original)
    def get_response_template(processor, model):
        stock_type = _stock_type(model.config)
        known_as = model if stock_type is None else SimpleNamespace(config=SimpleNamespace(model_type=stock_type))
        return original(processor, known_as)

    vars(get_response_template)["knows_backbones"] = True
    vars(serving)["get_response_template"] = get_response_template


def _stock_type(config: Any) -> str | None:
    """The model type of the stock model that a model of this package stands on; None for other models."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return None
    if family.backbone.model_type != "dense":
        return family.backbone.model_type
    if config.use_qk_norm:
        return "qwen3"
    return "qwen2" if config.attention_bias and not config.attention_output_bias else "llama"


# by the module that is completed when it has been imported
COMPLETIONS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.trainer": exempt_from_decay,
    "transformers.cli.serving.model_manager": show_to_server,
    "transformers.cli.serving.utils": give_response_templates,
}
