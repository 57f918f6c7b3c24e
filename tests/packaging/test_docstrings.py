# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`help()` says something about every class, forward and operation."""

import ast
import inspect
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest

import depthmix
import depthmix.kernels
import depthmix.modeling


ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "configuration", "conversion", "depthmix", "examples", "kernels", "modeling")
# bases that leave the forward to what derives from them
WITHOUT_FORWARD = ("AttnResSite", "DecoderLayer", "MixingModule")
MODELS = [name for name in dir(depthmix) if hasattr(getattr(depthmix, name), "forward")]


@pytest.mark.parametrize("ending", ["Model", "ForCausalLM", "ForSequenceClassification"])
def test_forwards_of_models(ending):
    """What they take, what they return and what they raise, in words of this package."""
    names = [name for name in MODELS if name.endswith(ending) and not name.endswith("PreTrainedModel")]
    assert len(names) > 40
    for name in names:
        text = inspect.getdoc(getattr(depthmix, name).forward) or ""
        assert all(f"{part}:\n" in text for part in ("Args", "Returns", "Raises")), name
        assert "`[B, T" in text or "`[B, num_labels]`" in text, name


def test_modules_and_their_forwards():
    count = 0
    for found in pkgutil.iter_modules(depthmix.modeling.__path__):
        module = import_module(f"depthmix.modeling.{found.name}")
        for name, member in list(vars(module).items()):
            if inspect.isclass(member) and member.__module__ == module.__name__:
                assert vars(member).get("__doc__"), name
                if hasattr(member, "forward") and name not in WITHOUT_FORWARD and not name.endswith("PreTrainedModel"):
                    assert member.forward.__module__.startswith("depthmix."), name
                    assert member.forward.__doc__, name
                    count += 1
    assert count > 20


def test_operations():
    for name in depthmix.kernels.__all__:
        operation = getattr(depthmix.kernels, name)
        if inspect.isfunction(operation):
            text = inspect.getdoc(operation) or ""
            assert all(f"{part}:\n" in text for part in ("Args", "Returns", "Raises")), name


def test_docstrings_are_sentences_of_their_own():
    """A docstring that begins with "Of" or "The same" cannot be understood without the one before it."""
    wrong = []
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if text.startswith(("Of ", "The same ", "As [")):
                    wrong.append(f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}: {text[:40]}")
    assert wrong == []
