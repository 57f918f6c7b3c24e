# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The public face of the operations: names, modules, and the examples of the docstrings."""

import doctest
import importlib
import re
import types

import pytest

import depthmix.kernels


@pytest.mark.parametrize("name", depthmix.kernels.__all__)
def test_docstring_says_everything_and_its_example_runs(name):
    operation = getattr(depthmix.kernels, name)
    for section in ("Args:", "Returns:", "Raises:", "Example:"):
        assert section in operation.__doc__ or (section, name) == ("Returns:", "DepthStream"), section
    assert re.search(r"arXiv \d{4}\.\d{5}|\[`\w+`\]", operation.__doc__) or name == "shared_input_linear"
    (test,) = doctest.DocTestFinder(recurse=False).find(operation, name, globs={})
    assert len(test.examples) > 2
    result = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(test)
    assert result.failed == 0


def test_dir_shows_public_names_only():
    assert dir(depthmix.kernels) == sorted(depthmix.kernels.__all__)
    assert not any(isinstance(getattr(depthmix.kernels, name), types.ModuleType) for name in dir(depthmix.kernels))


@pytest.mark.parametrize("name", depthmix.kernels.__all__)
def test_no_operation_shadows_a_module(name):
    operation = getattr(depthmix.kernels, name)
    assert importlib.util.find_spec(f"depthmix.kernels.{name}") is None
    # what `import depthmix.kernels.<module> as m` gives
    stem = operation.__module__.rpartition(".")[2]
    assert isinstance(getattr(depthmix.kernels, stem), types.ModuleType)
