# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Registration that costs nothing until it is needed.

`import depthmix` imports nothing of the host library. Once that has imported its Auto classes, they know where to ask;
this package's modules are imported when somebody looks something up there. Earlier they cannot be: modules of the host
library that they need may just be on the way.
"""

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from depthmix.configuration.after_import import after_import


# Auto class -> how the names of its models end
HEADS = {
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
}


def register_when_used() -> None:
    """Part of `import depthmix`. Doing it again changes nothing."""
    for module, part in _PARTS.items():
        after_import(module, part)


# one thread fills, and others wait until it has
_FILLING = threading.RLock()


class _LateContent(dict):
    """
    What has been registered with an Auto class, for its `_extra_content`. It is filled when it is first used, and a
    value that is to be made (a `partial`) is made when it is looked up.
    """

    def __init__(self, content: dict, fill: Callable[[dict], None]):
        super().__init__(content)
        self.fill: Callable[[dict], None] | None = fill
        self.is_full = False

    def _filled(self) -> "_LateContent":
        if not self.is_full:
            with _FILLING:
                fill, self.fill = self.fill, None
                # what fills it asks for its content, too
                if fill is not None:
                    fill(self)
                    self.is_full = True
        return self

    def __getitem__(self, key):
        value = dict.__getitem__(self._filled(), key)
        if isinstance(value, functools.partial):
            self[key] = value = value()
        return value

    def __setitem__(self, key, value):
        dict.__setitem__(self._filled(), key, value)

    def __contains__(self, key):
        return dict.__contains__(self._filled(), key)

    # with it, `dict(self)` asks for every value
    def __iter__(self):
        return dict.__iter__(self._filled())

    def __len__(self):
        return dict.__len__(self._filled())

    def keys(self):
        return dict.keys(self._filled())

    def get(self, key, default=None):
        return self[key] if key in self else default  # noqa: SIM401

    def values(self):
        return [self[key] for key in self]

    def items(self):
        return [(key, self[key]) for key in self]


def _fill_late(mapping: Any, fill: Callable[[dict], None]) -> None:
    if not hasattr(mapping._extra_content, "fill"):
        mapping._extra_content = _LateContent(mapping._extra_content, fill)


def _register_configurations(module: ModuleType) -> None:
    def fill(content: dict) -> None:
        from depthmix.auto import register_configurations

        register_configurations()

    _fill_late(module.CONFIG_MAPPING, fill)


def _register_models(module: ModuleType) -> None:
    def fill(auto_class: str, content: dict) -> None:
        from depthmix.auto import add_models

        add_models(content, auto_class)

    for auto_class in HEADS:
        _fill_late(getattr(module, auto_class)._model_mapping, functools.partial(fill, auto_class))


def _complete_tables(module: ModuleType) -> None:
    from depthmix.host_tables import COMPLETIONS

    COMPLETIONS[module.__name__](module)


def _prepare_configurations(module: ModuleType) -> None:
    """Makes the maker of configuration classes prepare each that it makes."""
    original = module.ConfigurationClasses._make
    if hasattr(original, "prepares_classes"):
        return

    @functools.wraps(original)
    def make(self, backbone):
        from depthmix.auto import prepare_configuration
        from depthmix.families import family_of

        made = original(self, backbone)
        prepare_configuration(made, family_of(self, backbone))
        return made

    vars(make)["prepares_classes"] = True
    module.ConfigurationClasses._make = make


_PARTS = {
    "depthmix.configuration.depth_backbones": _prepare_configurations,
    "transformers.models.auto.configuration_auto": _register_configurations,
    "transformers.models.auto.modeling_auto": _register_models,
    "transformers.trainer": _complete_tables,
    "transformers.cli.serving.model_manager": _complete_tables,
    "transformers.cli.serving.utils": _complete_tables,
}
