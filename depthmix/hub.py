# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Self-contained code for saved models, so that they load with `trust_remote_code=True` where depthmix is not installed.

Transformers copies remote code as flat files that import each other by `from .name import …`. The modules of this
package import across folders by `from depthmix.<folder>.<module> import …`, one module per statement, and have names
that are unique over all folders: so one substitution turns them into such files, with comments and line numbers kept.
The configuration's file gets one addition, by which it brings the models' files along.

Beside the code lies `depthmix_code.json`, which lists these files with their hashes.
"""

import functools
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import cast

from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME

from depthmix.releases import released_hashes
from depthmix.version import __version__


logger = logging.getLogger(__name__)

MANIFEST = "depthmix_code.json"
# the field by which a saved configuration of this package is told from other people's of the same model type
OWN_MARK = "depth_impl"
# no file of code is larger, nor the list of them: what is there under such a name may be anything
_CODE_LIMIT = 2**24
# the name of a file that is being written
UNFINISHED_FILE = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
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
        files[f"{module}.py"], siblings = _flat_code(_module_path(module))
        pending += siblings
    if "AutoConfig" in auto_map:
        files[f"{auto_map['AutoConfig'].split('.')[0]}.py"] += _naming_of_models(auto_map)
    return dict(sorted(files.items()))


@functools.cache
def _flat_code(path: Path) -> tuple[str, list[str]]:
    """A module's code as it stands in a saved model's folder, and the modules beside it that it imports."""
    code = _ACROSS_FOLDERS.sub(r"from .\1 import", path.read_text(encoding="utf-8"))
    if statement := _NOT_FLAT.search(code):
        raise ImportError(f"{path.name}: `{statement[0].strip()}` cannot be part of a saved model's code.")
    return code, _SIBLING.findall(code)


def own_versions(name: str) -> set[str]:
    """
    The hashes that a file of code has in the models of this version and of all releases: a configuration's file names
    the classes of a model, so that it differs between backbones. Empty for a name that is none of depthmix's.
    """
    # not at the top: it needs this module
    from depthmix.auto import AUTO_MAPS

    module = name.removesuffix(".py")
    families = [family for release in released_hashes().values() for family in release.values()]
    found = {family["files"][name] for family in families if name in family["files"]}
    try:
        path = _module_path(module)
        code, _ = _flat_code(path)
    except ImportError:
        return found
    maps = [auto_map for auto_map in AUTO_MAPS.values() if auto_map["AutoConfig"].split(".")[0] == module]
    found |= {hash_code(code + addition) for addition in ("", *map(_naming_of_models, maps))}
    # transformers copies the package's own file for classes that are registered by hand
    return found | {hash_code(path.read_bytes())}


def write_remote_code(directory: str | Path, auto_map: dict[str, str]) -> list[str]:
    """
    Writes these modules and the list of their hashes into a folder, and returns the file names of the modules.

    What is not ours is not lost: a file that somebody has edited is kept under another name, which is logged, and a
    link is replaced, not followed.
    """
    files = collect_remote_code(auto_map)
    folder = Path(directory)
    for name in _edited_files(folder, files):
        kept = next(path for path in _other_names(folder / name) if not os.path.lexists(path))
        os.rename(folder / name, kept)
        logger.warning(f"{folder / name} had been edited. It is kept as {kept.name}; {name} is now depthmix's own.")
    for name, code in files.items():
        write_in_place(folder / name, code)
    content = {"depthmix": __version__, "files": {name: hash_code(code) for name, code in files.items()}}
    write_in_place(folder / MANIFEST, json.dumps(content, indent=2) + "\n")
    return list(files)


def hash_code(code: str | bytes) -> str:
    return hashlib.sha256(code.encode() if isinstance(code, str) else code).hexdigest()


def read_manifest(folder: Path) -> dict[str, str]:
    """The files that a folder's list names, with their hashes; empty if there is no such list."""
    path = folder / MANIFEST
    # opening a pipe would wait for somebody who writes
    if not path.is_file() or path.stat().st_size > _CODE_LIMIT:
        return {}
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {str(name): str(digest) for name, digest in files.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def write_in_place(path: Path, text: str) -> None:
    """Writes a file that is there completely or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` that takes its place when the block ends. A link is replaced, not followed."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield unfinished
        if path.is_file() and not path.is_symlink():
            shutil.copymode(path, unfinished)
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _naming_of_models(auto_map: dict[str, str]) -> str:
    """
    Statements that make transformers copy the models' files wherever it copies the configuration's: it follows the
    text of a file. A configuration that is loaded from a folder and saved by itself then is a complete model's.
    """
    references = [reference.split(".") for auto_class, reference in auto_map.items() if auto_class != "AutoConfig"]
    config_module = auto_map["AutoConfig"].split(".")[0]
    classes = {module: sorted(name for other, name in references if other == module) for module, _ in references}
    classes.pop(config_module, None)
    if not classes:
        return ""
    statements = "\n".join(
        f"    from .{module} import {', '.join(names)}" for module, names in sorted(classes.items())
    )
    return f'''

def _models_of_this_configuration():
    """Never called. Transformers copies the files that it names along with this one."""
{statements}
'''


def _edited_files(folder: Path, files: dict[str, str]) -> list[str]:
    """Which of these files are in a folder with content that is not, and never was, depthmix's."""
    listed = read_manifest(folder)
    edited = []
    for name, code in files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            continue
        digest = hash_code(path.read_bytes()) if path.stat().st_size <= _CODE_LIMIT else None
        if digest is None or (digest not in {hash_code(code), listed.get(name)} and digest not in own_versions(name)):
            edited.append(name)
    return edited


def _other_names(path: Path) -> Iterator[Path]:
    yield path.with_name(f"{path.name}.edited")
    for number in range(2, 10_000):
        yield path.with_name(f"{path.name}.edited{number}")


def users_references(auto_map: dict | None, code_files: Collection[str]) -> dict:
    """The entries of an `auto_map` that name none of these files of this package: what a user has registered."""
    return {
        auto_class: reference
        for auto_class, reference in (auto_map or {}).items()
        if not (isinstance(reference, str) and f"{reference.split('--')[-1].split('.')[0]}.py" in code_files)
    }


def ship_remote_code(config_class: type[PreTrainedConfig], auto_map: dict[str, str]) -> None:
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
        original = vars(original)["__wrapped__"]

    @functools.wraps(original)
    def to_json_file(self, json_file_path, use_diff: bool = True):
        path = Path(json_file_path)
        if path.name == CONFIG_NAME:
            saved = getattr(self, "auto_map", None)
            if type(self).model_type == config_class.model_type:
                self.auto_map = auto_map | users_references(saved, write_remote_code(path.parent, auto_map))
            elif saved is not None:
                self.auto_map = users_references(saved, collect_remote_code(auto_map))
            with replacing(path) as unfinished:
                return original(self, unfinished, use_diff=use_diff)
        return original(self, json_file_path, use_diff=use_diff)

    vars(to_json_file)["ships_remote_code"] = config_class
    setattr(config_class, to_json_file.__name__, to_json_file)


def refuse_foreign_configurations(config_class: type[PreTrainedConfig], auto_map: dict[str, str]) -> None:
    """
    Makes a configuration class refuse a configuration that names other people's code.

    Model types are short names that others use too. A class that is registered is taken before the code that a
    checkpoint names, so such a checkpoint would be loaded as something that it is not.
    """
    original = cast(MethodType, config_class.from_dict)
    if getattr(original, "refuses_foreign_code", None) is config_class:
        return

    # asked for by the first configuration that is read: it reads all files of the family
    @functools.cache
    def own_files() -> Collection[str]:
        return collect_remote_code(auto_map).keys() | {
            name
            for release in released_hashes().values()
            for name in release.get(config_class.model_type, {}).get("files", ())
        }

    @functools.wraps(original.__func__)
    def from_dict(cls, config_dict, **kwargs):
        # a subclass with a `model_type` of its own has code of its own, and another type is refused by the class
        is_ours = cls.model_type == config_class.model_type == config_dict.get("model_type", config_class.model_type)
        if is_ours and (named := _foreign_code(config_dict, own_files, cls)):
            raise ValueError(
                f"The model type is {cls.model_type!r}, which is also the name of one of depthmix's, but auto_map is "
                f"{named}: this is another model, and {cls.__name__} does not load it. Load it in a process that does "
                "not import depthmix, with trust_remote_code=True if you trust its code. Beside depthmix its classes "
                "are those of transformers.dynamic_module_utils.get_class_from_dynamic_module(REFERENCE, FOLDER)."
            )
        return original.__func__(cls, config_dict, **kwargs)

    vars(from_dict)["refuses_foreign_code"] = config_class
    setattr(config_class, from_dict.__name__, classmethod(from_dict))


def _foreign_code(
    config_dict: dict, own_files: Callable[[], Collection[str]], config_class: type[PreTrainedConfig]
) -> str | None:
    """What an `auto_map` says, in short, if its configuration or all of its models are not depthmix's."""
    saved = config_dict.get("auto_map")
    if not isinstance(saved, dict) or not saved:
        return None
    foreign = users_references(saved, own_files())
    is_foreign = "AutoConfig" in foreign if "AutoConfig" in saved else len(foreign) == len(saved)
    # other people's files and fields may have the same names; this field is in every configuration of ours
    if not is_foreign and OWN_MARK not in config_dict:
        return f"{str(saved)[:200]!r} and it has no {OWN_MARK}, which {config_class.__name__} is saved with"
    return f"{str(foreign)[:200]!r}" if is_foreign else None


@functools.cache
def _module_path(module: str) -> Path:
    for folder in BUNDLED_FOLDERS:
        spec = find_spec(f"depthmix.{folder}.{module}")
        if spec is not None and spec.origin is not None:
            return Path(spec.origin)
    raise ImportError(f"No module {module} in {', '.join(BUNDLED_FOLDERS)} of depthmix.")
