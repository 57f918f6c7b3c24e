# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Whether a saved model's folder runs depthmix's code and no other: `depthmix verify`."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from depthmix.auto import AUTO_MAPS
from depthmix.hub import MANIFEST, OWN_MARK, collect_remote_code, hash_code, own_versions
from depthmix.releases import released_hashes
from depthmix.version import __version__

from .checkpoint_io import (
    INDEX_FILE,
    PICKLE_SUFFIXES,
    SINGLE_FILE,
    check_text_size,
    find_file,
    read_json,
    read_text,
)
from .checkpoint_source import CONFIG_FILE, GENERATION_CONFIG_FILE, expand_path
from .errors import ConversionError, raise_problems
from .plain_text import printable
from .travelling_files import HUB_GENERATION


_CODE_SUFFIXES = (
    *(".py", ".pyc", ".pyo", ".pyw", ".pyd", ".pyx", ".pyz", ".whl", ".egg", ".pth", ".ipynb"),
    *(".so", ".dll", ".dylib", ".exe", ".node", ".jar", ".wasm", ".cu", ".ptx", ".cubin"),
    *(".sh", ".bat", ".cmd", ".ps1", ".js", ".rb", ".lua"),
)
_UNSAFE_SUFFIXES = (
    *(*PICKLE_SUFFIXES, ".pkl", ".pickle", ".joblib", ".dill", ".npy", ".npz", ".h5", ".hdf5", ".keras", ".msgpack"),
    *(".pb", ".pt2", ".ptl", ".torchscript", ".nemo", ".mar"),
)
# what can stand behind the suffix that says what a file is
_AROUND = re.compile(r"(\.(gz|bz2|xz|zst|lz4)|\.index\.json)$")
# files by which a library takes classes or modules from their names
_NAMING_FILES = ("adapter_config.json", "modules.json", "model_index.json")
# keys by which code is named, wherever they stand
_NAMING_KEYS = (
    *("auto_map", "custom_pipelines", "custom_generate", "auto_mapping", "kernel_config", "init_inputs"),
    "trust_remote_code",
)
# texts of a tokenizer's words, of which any may look like a name of code
_WORD_FILES = ("tokenizer.json", "vocab.json")
# keys whose value is the name of a stock implementation, or a repository with one
_CHOOSING_KEYS = ("attn_implementation", "experts_implementation")
# `repository--module.Class`
_REFERENCE = re.compile(r"[\w.-]+/[\w.-]+--[\w.]+|[\w./-]+--\w+\.\w+")


@dataclass(frozen=True)
class CodeCheck:
    """
    The outcome of [`verify_code`].

    Args:
        folder (`str`), release (`str`):
            What was checked, and the release whose code it has.
        files (`dict`), others (`dict`):
            Names of the files of code and their SHA-256: of this model, and of others of depthmix that were in the
            folder before, which nothing in it names.
    """

    folder: str
    release: str
    files: dict[str, str]
    others: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.folder}:", *(f"  {v}  {k}" for k, v in self.files.items())]
        if self.others:
            lines.append("also there, of other models of depthmix, and not used by this one:")
            lines += [f"  {v}  {k}" for k, v in self.others.items()]
        # last, where a terminal shows it
        lines.append(f"{self.folder}: the code is that of {self.release}")
        return "\n".join(printable(line) for line in lines)


def verify_code(folder: str | os.PathLike) -> CodeCheck:
    """
    Says whether the code in a saved model's folder is exactly that of a release of depthmix, or of the version that
    is installed, and nothing in the folder leads to other code. Nothing is run or unpickled.

    Raises:
        [`ConversionError`]: if it is not; the message lists files of code that are edited, missing or not depthmix's,
            keys that name other code, and weights in forms that can run code.
    """
    return _check_code(expand_path(folder, "folder"), os.fspath(folder))


def check_result(folder: Path, source: str) -> None:
    """
    Checks a new folder, in which what has travelled from `source` is all that can lead to other code.

    Raises:
        [`ConversionError`]: as [`verify_code`] does; the message speaks of the source.
    """
    _check_code(folder, source, f"What would travel from {source} leads to other code than depthmix's")


def _check_code(folder: Path, called: str, title: str | None = None) -> CodeCheck:
    if not folder.is_dir():
        raise ConversionError(f"{folder} is not a folder. Give the folder that holds a saved model.")
    if find_file(folder, CONFIG_FILE) is None:
        raise ConversionError(f"{folder} has no {CONFIG_FILE}.")
    config = read_json(folder / CONFIG_FILE)
    model_type = own_model_type(config, called)
    found = {path.name: _hash_file(path) for path in sorted(folder.glob("*.py")) if path.is_file()}
    candidates = dict(_known_code(model_type))
    # the one that fits best says what is wrong
    release = min(candidates, key=lambda name: len(set(candidates[name]["files"].items()) ^ set(found.items())))
    expected = candidates[release]
    raise_problems(
        title or f"{called} is not a folder with the code of {release} and no other",
        [*_code_problems(folder, expected["files"], found), *_other_problems(folder, expected["auto_map"])],
        limit=50,
    )
    used = {name: digest for name, digest in found.items() if name in expected["files"]}
    return CodeCheck(called, release, used, {name: found[name] for name in found.keys() - used.keys()})


def _hash_file(path: Path) -> str:
    check_text_size(path)
    return hash_code(path.read_bytes())


def own_code_names() -> set[str]:
    """The names of all files that saving a model of this package writes for its code."""
    return {MANIFEST, *(name for auto_map in AUTO_MAPS.values() for name in collect_remote_code(auto_map))}


def own_model_type(config: dict[str, Any], place: str | Path) -> str:
    """
    The model type of a `config.json`, which is one of this package's.

    Raises:
        [`ConversionError`]: if it is none; the message names those that look like it.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in AUTO_MAPS:
        if OWN_MARK not in config:
            raise ConversionError(
                f"{place}: model_type is {model_type!r}, as of one of depthmix's, but there is no {OWN_MARK}, which "
                "these are saved with: this is another model."
            )
        return model_type
    similar = get_close_matches(str(model_type), AUTO_MAPS, n=3)
    hint = f" Similar ones are {', '.join(similar)}." if similar else ""
    raise ConversionError(
        f"{place}: model_type is {model_type!r}, which is none of depthmix's {len(AUTO_MAPS)}, such as depth_qwen3: a "
        f"method, and a backbone.{hint} `depthmix inspect` says what a checkpoint is."
    )


def _known_code(model_type: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for version, families in reversed(released_hashes().items()):
        if model_type in families:
            yield f"depthmix {version}", families[model_type]
    auto_map = AUTO_MAPS[model_type]
    files = {name: hash_code(code) for name, code in collect_remote_code(auto_map).items()}
    yield f"the depthmix that is installed here ({__version__})", {"auto_map": auto_map, "files": files}


def _code_problems(folder: Path, expected: dict[str, str], found: dict[str, str]) -> Iterator[str]:
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            yield f"{name} is missing"
        elif name not in expected:
            # what saving another method's model over this folder's leaves there
            if found[name] not in own_versions(name):
                yield f"{name} is not depthmix's"
        elif found[name] != expected[name]:
            yield f"{name} is edited, or of another version: its SHA-256 is {found[name]}"
    for path in _entries(folder):
        name = path.relative_to(folder).as_posix()
        # what lies in sub-folders can be code of other loaders, as `custom_generate/generate.py` is
        if path.suffix.lower() in _CODE_SUFFIXES and name not in found.keys() | expected.keys():
            yield f"{name} is not depthmix's"


def _other_problems(folder: Path, auto_map: dict[str, str]) -> Iterator[str]:
    for path in _entries(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            try:
                find_file(folder, name)
            except ConversionError:
                yield f"{name} is a link that leads out of the folder"
                continue
        # opening a pipe would wait for somebody who writes
        if not path.is_file():
            yield f"{name} is not a regular file"
        elif Path(_AROUND.sub("", name.lower())).suffix in _UNSAFE_SUFFIXES:
            yield f"{name} can run code when it is opened"
        elif path.name in _NAMING_FILES:
            yield f"{name} can name code that other libraries import"
        elif path.name == INDEX_FILE:
            yield from _index_problems(folder, name, path)
        elif path.suffix.lower() == ".json" and name not in _WORD_FILES:
            yield from _pointers(name, path, auto_map)


def _index_problems(folder: Path, name: str, path: Path) -> Iterator[str]:
    """The host library opens whatever file an index names."""
    try:
        weight_map = read_json(path).get("weight_map")
    except ConversionError as error:
        yield f"{name} cannot be read: {error}"
        return
    if not isinstance(weight_map, dict):
        yield f"{name} has no weight_map"
        return
    for file in sorted({str(file) for file in weight_map.values()}):
        if Path(file).name != file or not file.endswith(".safetensors"):
            yield f"{name} names {file!r}, which is not a safetensors file of the folder"


def _pointers(name: str, path: Path, auto_map: dict[str, str]) -> Iterator[str]:
    try:
        content = json.loads(read_text(path))
    # a `ConversionError` is a `ValueError`
    except (OSError, ValueError, RecursionError) as error:
        yield f"{name} cannot be read: {error}"
        return
    if name == CONFIG_FILE:
        saved = content.pop("auto_map", None)
        if not isinstance(saved, dict):
            yield f"{name}: auto_map is {saved!r}, so that the code in the folder is not found"
            saved = {}
        for auto_class, reference in saved.items():
            if auto_map.get(auto_class) != reference:
                yield f"{name}: auto_map of {auto_class} names {reference!r}, which is not depthmix's"
        yield from (f"{name}: auto_map has no {auto_class}" for auto_class in auto_map.keys() - saved.keys())
        if content.get("transformers_weights") not in (None, SINGLE_FILE):
            yield f"{name}: transformers_weights is {content['transformers_weights']!r}, another file of weights"
    if name == GENERATION_CONFIG_FILE:
        if not isinstance(content, dict):
            yield f"{name} must hold an object, not a {type(content).__name__}"
            return
        for key, allowed in HUB_GENERATION.items():
            if content.get(key) not in allowed:
                yield f"{name}: with {key} set, transformers generates by other people's code on the Hub"
    yield from (f"{name}: {place}" for place in _named_code(content))


def _named_code(content: Any, place: str = "") -> Iterator[str]:
    """Where in the content of a JSON file code is named. Without recursion: files can be nested deeply."""
    pending = [(place, content)]
    while pending:
        place, value = pending.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                is_repository = key.removeprefix("_") in _CHOOSING_KEYS and "/" in str(inner)
                if is_repository or (key in _NAMING_KEYS and inner):
                    yield f"{place}{key} names code: {inner!r}"
                else:
                    pending.append((f"{place}{key}.", inner))
        elif isinstance(value, list):
            pending += [(place, inner) for inner in value]
        elif isinstance(value, str) and _REFERENCE.fullmatch(value):
            yield f"{place.removesuffix('.')} names code: {value!r}"


def _entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
