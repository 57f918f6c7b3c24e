# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the host library decides past its Auto classes, and what this package adds there when it is imported."""

import functools
from collections.abc import Sequence
from functools import partial
from types import ModuleType

from depthmix.configuration.after_import import after_import
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


def show_to_server(manager: ModuleType, model_classes: Sequence[type]) -> None:
    """Lets the server of `transformers serve` find classes, which it looks up in `transformers` by their names."""
    for model_class in model_classes:
        setattr(manager.transformers, model_class.__name__, model_class)


def register_past_auto_classes(model_classes: Sequence[type]) -> None:
    """Part of `depthmix.auto.register`; takes all models that have been registered."""
    after_import("transformers.trainer", exempt_from_decay)
    after_import("transformers.cli.serving.model_manager", partial(show_to_server, model_classes=model_classes))
