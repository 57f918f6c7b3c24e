# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Self-contained code for saved models, so that they load with `trust_remote_code=True` where depthmix is not installed.

Transformers copies remote code as flat files that import each other by `from .name import …`. The modules of this
package import across folders by `from depthmix.<folder>.<module> import …`, one module per statement, and have names
that are unique over all folders: so one substitution turns them into such files, with comments and line numbers kept.
"""

import functools
import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from transformers.utils import CONFIG_NAME


BUNDLED_FOLDERS = ("configuration", "modeling", "kernels")
_ACROSS_FOLDERS = re.compile(rf"^from depthmix\.(?:{'|'.join(BUNDLED_FOLDERS)})\.(\w+) import\b", re.MULTILINE)
_SIBLING = re.compile(r"^\s*from \.(\w+) import\b", re.MULTILINE)
_NOT_FLAT = re.compile(r"^\s*(?:from\s+(?:depthmix\b|\.\.|\.\s+import|\.\w+\.)|import\s+depthmix\b).*", re.MULTILINE)


def collect_remote_code(auto_map: dict[str, str]) -> dict[str, str]:
    """
    The flat modules that the classes of an `auto_map` need, by file name.

    Raises:
        `ImportError`: if a module imports in a way that cannot be made flat; the message names file and statement.
    """
    files: dict[str, str] = {}
    pending = sorted({reference.split(".")[0] for reference in auto_map.values()})
    while pending:
        module = pending.pop()
        if f"{module}.py" in files:
            continue
        code = _ACROSS_FOLDERS.sub(r"from .\1 import", _module_path(module).read_text(encoding="utf-8"))
        if statement := _NOT_FLAT.search(code):
            raise ImportError(f"{module}.py: `{statement[0].strip()}` cannot be part of a saved model's code.")
        files[f"{module}.py"] = code
        pending += _SIBLING.findall(code)
    return dict(sorted(files.items()))


def write_remote_code(directory: str | Path, auto_map: dict[str, str]) -> list[str]:
    """Writes these modules into a folder and returns their file names."""
    files = collect_remote_code(auto_map)
    for name, code in files.items():
        Path(directory, name).write_text(code, encoding="utf-8", newline="\n")
    return list(files)


def users_references(auto_map: dict | None, code_files: Collection[str]) -> dict:
    """The entries of an `auto_map` that name none of these files of this package: what a user has registered."""
    return {
        auto_class: reference
        for auto_class, reference in (auto_map or {}).items()
        if not (isinstance(reference, str) and f"{reference.split('--')[-1].split('.')[0]}.py" in code_files)
    }


def ship_remote_code(config_class: type, auto_map: dict[str, str]) -> None:
    """
    Makes every save of a configuration as `config.json` write `auto_map` and the code beside it.

    The hook sits where all saves pass: `save_pretrained` and `push_to_hub` of configurations and models, the Trainer,
    a merged PEFT model and consolidated distributed checkpoints write the configuration through `to_json_file`. It is
    installed from here, so the code that is saved does not contain it. A subclass with a `model_type` of its own gets
    no code, and loses the entries that it took over from a model of this package, since they would load it as
    something else.
    """
    original = config_class.to_json_file
    if getattr(original, "ships_remote_code", None) is config_class:
        return
    # a configuration that derives from another family's has that family's hook
    while hasattr(original, "ships_remote_code"):
        original = original.__wrapped__

    @functools.wraps(original)
    def to_json_file(self, json_file_path, use_diff: bool = True):
        path = Path(json_file_path)
        if path.name == CONFIG_NAME:
            saved = getattr(self, "auto_map", None)
            if type(self).model_type == config_class.model_type:
                self.auto_map = auto_map | users_references(saved, write_remote_code(path.parent, auto_map))
            elif saved is not None:
                self.auto_map = users_references(saved, collect_remote_code(auto_map))
        return original(self, json_file_path, use_diff=use_diff)

    to_json_file.ships_remote_code = config_class
    config_class.to_json_file = to_json_file


def _module_path(module: str) -> Path:
    for folder in BUNDLED_FOLDERS:
        spec = find_spec(f"depthmix.{folder}.{module}")
        if spec is not None:
            return Path(spec.origin)
    raise ImportError(f"No module {module} in {', '.join(BUNDLED_FOLDERS)} of depthmix.")
