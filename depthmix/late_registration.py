# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
When this package registers: what is imported first, a module of the Auto classes or one of this package's, does it.

Until then `import depthmix` costs nothing. Configurations are registered at once then; models are made when they are
looked up, since their modules cannot be imported while one of the host library that they need is being imported.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from depthmix.configuration.after_import import after_import


def register_when_used() -> None:
    """Part of `import depthmix`. Doing it again changes nothing."""
    for module, part in _PARTS.items():
        after_import(module, part)


def _register_configurations(module: ModuleType) -> None:
    from depthmix.auto import register_configurations

    register_configurations()


def _register_models(module: ModuleType) -> None:
    from depthmix.auto import register_models

    register_models()


def _complete_tables(module: ModuleType) -> None:
    from depthmix.host_tables import COMPLETIONS

    COMPLETIONS[module.__name__](module)


def _prepare_configurations(module: ModuleType) -> None:
    def prepare(made: type, family: Any) -> None:
        from depthmix.auto import prepare_configuration

        prepare_configuration(made, family)

    _call_with_made(module.ConfigurationClasses, "_make", prepare)


def _prepare_models(module: ModuleType) -> None:
    def prepare(made: dict[str, type], family: Any) -> None:
        from depthmix.auto import prepare_models

        prepare_models(made, family)

    _call_with_made(module.ModelClasses, "make", prepare)


def _call_with_made(maker: type, method: str, prepare: Callable[[Any, Any], None]) -> None:
    """Makes a method that makes classes on a backbone call `prepare` with them and with their family."""
    original = getattr(maker, method)
    if hasattr(original, "prepares_classes"):
        return

    @functools.wraps(original)
    def make(self, backbone):
        from depthmix.families import family_of

        made = original(self, backbone)
        prepare(made, family_of(getattr(self, "configurations", self), backbone))
        return made

    vars(make)["prepares_classes"] = True
    setattr(maker, method, make)


_PARTS = {
    "depthmix.configuration.depth_backbones": _prepare_configurations,
    "depthmix.modeling.depth_decoder": _prepare_models,
    "transformers.models.auto.configuration_auto": _register_configurations,
    "transformers.models.auto.modeling_auto": _register_models,
    "transformers.trainer": _complete_tables,
    "transformers.cli.serving.model_manager": _complete_tables,
}
