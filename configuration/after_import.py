# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Doing something with a module of another package once it has been imported, without importing it."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType


class _AfterImport(MetaPathFinder):
    """Calls a function with a module once that has been imported. It finds nothing by itself."""

    def __init__(self, module: str, function: Callable[[ModuleType], None]):
        self.module, self.function = module, function

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.module:
            return None
        # of several threads that look for the module one was the first
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.function(module)

        spec.loader.exec_module = exec_module
        return spec


def after_import(module: str, function: Callable[[ModuleType], None]) -> None:
    """Calls `function(module)` now if the module has been imported, or else as soon as it is."""
    if module in sys.modules:
        function(sys.modules[module])
    else:
        sys.meta_path.insert(0, _AfterImport(module, function))
