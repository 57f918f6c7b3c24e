# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Who may import whom, and how it must be spelt.

The saved code of a model is made by rewriting import statements, so their spelling in the three bundled folders
matters as much as their direction.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

from depthmix.hub import BUNDLED_FOLDERS


pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
SOURCES = {
    "configuration": ROOT / "configuration",
    "kernels": ROOT / "kernels" / "depth_ops",
    "modeling": ROOT / "modeling",
    "conversion": ROOT / "conversion",
    "": ROOT / "depthmix",
}
# what each folder may import besides itself and the standard library; the umbrella, "", may import everything
ALLOWED = {
    "configuration": {"huggingface_hub", "transformers"},
    "kernels": {"torch", "triton"},
    "modeling": {"depthmix.configuration", "depthmix.kernels", "liger_kernel", "torch", "transformers"},
    "conversion": {
        "depthmix.auto",
        "depthmix.configuration",
        "depthmix.families",
        "depthmix.hub",
        "depthmix.inspection",
        "depthmix.modeling",
        "depthmix.releases",
        "depthmix.version",
        "huggingface_hub",
        "safetensors",
        "torch",
        "tqdm",
        "transformers",
        "yaml",
    },
}
MODULES = [(folder, path) for folder, root in SOURCES.items() for path in sorted(root.rglob("*.py"))]
BUNDLED = [(folder, path) for folder, path in MODULES if folder in BUNDLED_FOLDERS]


def module_id(value):
    return value.stem if isinstance(value, Path) else value or "umbrella"


def imports(path):
    """`(statement, imported module, whether at top level, whether in a try block)` for each imported module."""

    def visit(node, in_try):
        for child in ast.iter_child_nodes(node):
            guarded = in_try or (isinstance(node, ast.Try) and child in node.body)
            modules = []
            if isinstance(child, ast.Import):
                modules = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                modules = ["." * child.level + (child.module or "")]
            yield from ((child, module, isinstance(node, ast.Module), guarded) for module in modules)
            yield from visit(child, guarded)

    return visit(ast.parse(path.read_text(encoding="utf-8")), False)


def owner(module):
    """`depthmix.<folder>` for a module of ours, the top-level package for others."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "depthmix" else parts[0]


def test_every_folder_has_modules():
    assert {folder for folder, _ in MODULES} == set(SOURCES) == {*ALLOWED, ""}
    assert set(BUNDLED_FOLDERS) < set(SOURCES)
    # it would shadow Hugging Face's `kernels` for whoever starts Python in the root of the repository
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize(("folder", "path"), [m for m in MODULES if m[0]], ids=module_id)
def test_import_direction(folder, path):
    allowed = ALLOWED[folder] | {"", f"depthmix.{folder}"} | sys.stdlib_module_names
    for statement, module, _, _ in imports(path):
        assert owner(module) in allowed, f"{path.name}:{statement.lineno}: {ast.unparse(statement)}"


@pytest.mark.parametrize(("folder", "path"), BUNDLED, ids=module_id)
def test_import_spelling_of_bundled_modules(folder, path):
    for statement, module, top_level, guarded in imports(path):
        place = f"{path.name}:{statement.lineno}: {ast.unparse(statement)}"
        if isinstance(statement, ast.Import):
            assert len(statement.names) == 1, place
            assert owner(module).split(".")[0] != "depthmix", place
        elif module.startswith("."):
            assert module.count(".") == 1, place
            assert (path.parent / f"{module[1:]}.py").is_file(), place
        elif module.startswith("depthmix"):
            assert top_level, place
            _, other, name = module.split(".")
            assert other != folder, place
            assert (SOURCES[other] / f"{name}.py").is_file(), place
        # what is not installed with the package; a file that imports it unguarded does not load from the Hub
        if owner(module) not in sys.stdlib_module_names | {"", "torch", "transformers", "huggingface_hub"}:
            assert guarded or module.startswith("depthmix."), place


@pytest.mark.parametrize(("folder", "path"), MODULES, ids=module_id)
def test_no_module_climbs_out_of_its_folder(folder, path):
    for statement, module, _, _ in imports(path):
        assert not module.startswith(".."), f"{path.name}:{statement.lineno}: {ast.unparse(statement)}"
        assert module != ".", f"{path.name}:{statement.lineno}: {ast.unparse(statement)}"


def test_names_of_bundled_modules_are_unique():
    names = Counter(path.stem for _, path in BUNDLED if path.stem != "__init__")
    assert max(names.values()) == 1, names
    # a saved model's folder must be able to hold them beside each other and beside a user's files
    assert not {"utils", "common", "modeling", "configuration"} & set(names)
    assert all(path.parent == SOURCES[folder] for folder, path in BUNDLED)


def python_files():
    return sorted(
        path
        for folder in (*SOURCES.values(), *(ROOT / name for name in ("tests", "examples", "benchmarks")))
        for path in folder.rglob("*.py")
    )


def test_licence_header():
    header = "# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0."
    files = python_files()
    assert Path(__file__) in files
    without = [path for path in files if path.read_text(encoding="utf-8").split("\n", 1)[0] != header]
    assert not without
