# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Modules that are loaded when something of them is asked for, for the `depthmix` command."""

import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _LateModule(ModuleType):
    """
    What `import` gives until the first look-up. Unlike that of `importlib.util.LazyLoader` it answers by itself where
    it comes from, since the host library asks that of each package that it can use.
    """

    __spec__: ModuleSpec

    def __init__(self, spec: ModuleSpec, mappings: Mapping[str, Collection[str]]):
        super().__init__(spec.name)
        self.late_mappings = mappings
        self.__spec__, self.__loader__, self.__file__, self.__package__ = spec, spec.loader, spec.origin, spec.parent

    def __getattr__(self, name: str):
        spec, mappings = self.__spec__, vars(self)["late_mappings"]
        if name in mappings:
            return _LateMapping(self, name, mappings[name])
        # `from module import name` asks for it
        if name == "__path__" and spec.submodule_search_locations is None:
            raise AttributeError(name)
        _end_delay(self)
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations
        try:
            spec.loader.exec_module(self)  # type: ignore[union-attr]
        except BaseException:
            sys.modules.pop(spec.name, None)
            raise
        return getattr(self, name)


def _end_delay(module: ModuleType) -> None:
    module.__class__ = ModuleType


class _LateMapping(Mapping):
    """A mapping of a late module of which some keys are known, so that asking for these does not load it."""

    def __init__(self, module: ModuleType, name: str, known: Collection[str]):
        self._module, self._name, self._known = module, name, known

    def _loaded(self) -> Mapping:
        if isinstance(self._module, _LateModule):
            # any name but those of its mappings loads it
            getattr(self._module, "__all__", None)
        found: Mapping = vars(self._module)[self._name]
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._known or key in self._loaded()

    def __getitem__(self, key: str) -> Any:
        return self._loaded()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded())

    def __len__(self) -> int:
        return len(self._loaded())


def import_late(name: str, **mappings: Collection[str]) -> None:
    """
    Makes `import name` cost nothing until the module is used. Nothing is done if it is imported or not there.

    Args:
        name (`str`):
            A package, or a module of one that may be imported now.
        mappings:
            Mappings of the module that others import by name, and keys that they have.
    """
    if name in sys.modules or (spec := find_spec(name)) is None:
        return
    sys.modules[name] = _LateModule(spec, mappings)


def is_loaded(name: str) -> bool:
    """Whether a package has been imported and, where that was late, been used since."""
    return name in sys.modules and not isinstance(sys.modules[name], _LateModule)
