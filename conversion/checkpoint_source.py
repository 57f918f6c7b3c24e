# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""From what the user calls a source to a local folder."""

import os
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import model_info, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .checkpoint_io import INDEX_FILE, SINGLE_FILE, WEIGHT_FILES, no_weights_message, read_json
from .errors import ConversionError
from .plain_text import one_line, without_token


CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG_FILE,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
CHAT_TEMPLATE_FOLDER = "additional_chat_templates"
# what the host reads besides configuration and weights, chat templates in a folder excepted
READ_FILES = (GENERATION_CONFIG_FILE, *TOKENIZER_FILES, "chat_template.jinja", "chat_template.json")
# files that belong to a checkpoint besides its weights; code and pickled files never travel
COMPANION_FILES = (
    *READ_FILES,
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    "NOTICE.md",
    "NOTICE.txt",
)

_DOWNLOADED = (
    CONFIG_FILE,
    CARD_FILE,
    "model*.safetensors",
    "model.safetensors.index.json",
    f"{CHAT_TEMPLATE_FOLDER}/*.jinja",
    *COMPANION_FILES,
)


def locate_checkpoint(source: str | os.PathLike, revision: str | None = None, token: str | bool | None = None) -> Path:
    """
    The folder of a checkpoint, which is downloaded into the Hub's cache if `source` is a Hub id.

    Raises:
        [`ConversionError`]: if there is no such folder, or the Hub cannot deliver a checkpoint in safetensors form.
    """
    folder = expand_path(source, "source")
    if folder.is_dir():
        if revision is not None:
            raise ConversionError(
                f"revision={revision!r} is for checkpoints on the Hub, and {folder} is a local folder."
            )
        return folder
    if folder.exists():
        raise ConversionError(f"{folder} is a file. Give the folder that holds config.json and the safetensors files.")
    hub_id = os.fspath(source)
    if not is_hub_id(hub_id):
        raise ConversionError(f"There is no folder {folder}, and this is not the form of a Hub id (`owner/name`).")
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, token=token, allow_patterns=list(_DOWNLOADED)))
    # without a network the errors are those of the Hub client's HTTP library
    except Exception as error:
        raise ConversionError(
            f"There is no local folder {hub_id}, and the Hub did not deliver a checkpoint of that name: "
            f"{one_line(error)}"
        ) from without_token(error)
    if not any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        raise ConversionError(no_weights_message(hub_id, _names_in_repo(hub_id, revision, token, folder)))
    return folder


def expand_path(text: str | os.PathLike, role: str) -> Path:
    """
    A path that the user gave, with the home folder in place of a tilde.

    Raises:
        [`ConversionError`]: if it is empty, names a user that is not there, or cannot be a path.
    """
    if not os.fspath(text):
        raise ConversionError(f"The {role} is empty: give a folder{' or a Hub id' if role == 'source' else ''}.")
    if "\0" in os.fspath(text):
        raise ConversionError(f"The {role} {os.fspath(text)!r} has a NUL character, which no path can have.")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConversionError(f"The {role} {os.fspath(text)!r} names a home folder that is not known.") from error


def hub_id_of(source: str | os.PathLike, folder: Path) -> str | None:
    """The Hub id of a checkpoint, if it was named by one or lies in the Hub's cache."""
    repository = folder.resolve().parent.parent
    if folder.resolve().parent.name == "snapshots" and repository.name.startswith("models--"):
        hub_id = repository.name.removeprefix("models--").replace("--", "/", 1)
        # the name of a folder can be any text
        return hub_id if is_hub_id(hub_id) else None
    return None if Path(source).expanduser().is_dir() else os.fspath(source)


def list_entries(folder: Path) -> list[str]:
    """The files of a folder and, with a slash, its sub-folders; of chat templates the files."""
    names = []
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            names.append(path.name)
        elif path.name == CHAT_TEMPLATE_FOLDER:
            names += [f"{path.name}/{name}" for name in list_entries(path)]
        else:
            names.append(f"{path.name}/")
    return names


def foreign_entries(folder: Path, code_files: Collection[str]) -> list[str]:
    """What lies in a folder and is no part of a saved model, whose code is `code_files` and what its config names."""
    known = (CONFIG_FILE, CARD_FILE, ".gitattributes", *COMPANION_FILES, *code_files, *_own_code(folder))
    patterns = (*WEIGHT_FILES, f"{CHAT_TEMPLATE_FOLDER}/*.jinja")
    return [
        name
        for name in list_entries(folder)
        if name not in known and not any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def _own_code(folder: Path) -> Iterator[str]:
    path = folder / CONFIG_FILE
    auto_map = read_json(path).get("auto_map") if path.is_file() else None
    # `repository--module.Class`, or a list of such
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        for reference in value if isinstance(value, list) else [value]:
            yield f"{str(reference).split('--')[-1].split('.')[0]}.py"


def _names_in_repo(hub_id: str, revision: str | None, token: str | bool | None, folder: Path) -> list[str]:
    """All files of a repository, or those that the cache has of it."""
    try:
        return [file.rfilename for file in model_info(hub_id, revision=revision, token=token).siblings or ()]
    # offline, say, which the Hub's client reports in several ways. They only make a message more helpful
    except Exception:
        return [path.name for path in folder.glob("*")]


def is_hub_id(text: str) -> bool:
    """Whether a text has the form of a Hub id."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True
