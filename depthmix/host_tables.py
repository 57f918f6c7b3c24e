# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the host library decides past its Auto classes, and what this package adds there when it is imported."""

import functools
from collections.abc import Callable
from types import ModuleType

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


# by the module that is completed when it has been imported
COMPLETIONS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.trainer": exempt_from_decay,
    "transformers.cli.serving.model_manager": show_to_server,
}
