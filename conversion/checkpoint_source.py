# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""From what the user calls a source to a local folder."""

import os
from pathlib import Path

from huggingface_hub import model_info, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .checkpoint_io import INDEX_FILE, SINGLE_FILE, no_weights_message
from .errors import ConversionError


# files that belong to a checkpoint besides its weights; code and pickled files never travel
COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    "NOTICE.md",
    "NOTICE.txt",
)
CHAT_TEMPLATE_FOLDER = "additional_chat_templates"
CARD_FILE = "README.md"

_DOWNLOADED = (
    "config.json",
    CARD_FILE,
    "model*.safetensors",
    "model.safetensors.index.json",
    f"{CHAT_TEMPLATE_FOLDER}/*.jinja",
    *COMPANION_FILES,
)


def locate_checkpoint(source: str | os.PathLike, revision: str | None = None, token: str | None = None) -> Path:
    """
    The folder of a checkpoint, which is downloaded into the Hub's cache if `source` is a Hub id.

    Raises:
        [`ConversionError`]: if there is no such folder, or the Hub cannot deliver a checkpoint in safetensors form.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ConversionError(
                f"revision={revision!r} is for checkpoints on the Hub, and {folder} is a local folder."
            )
        return folder
    if folder.exists():
        raise ConversionError(f"{folder} is a file. Give the folder that holds config.json and the safetensors files.")
    hub_id = os.fspath(source)
    if not _may_be_hub_id(hub_id):
        raise ConversionError(f"There is no folder {folder}, and this is not the form of a Hub id (`owner/name`).")
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, token=token, allow_patterns=list(_DOWNLOADED)))
    except OSError as error:
        raise ConversionError(
            f"There is no local folder {hub_id}, and the Hub did not deliver a checkpoint of that name: {error}"
        ) from error
    if not any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        raise ConversionError(no_weights_message(hub_id, _names_in_repo(hub_id, revision, token, folder)))
    return folder


def hub_id_of(source: str | os.PathLike, folder: Path) -> str | None:
    """The Hub id of a checkpoint, if it was named by one or lies in the Hub's cache."""
    repository = folder.resolve().parent.parent
    if folder.resolve().parent.name == "snapshots" and repository.name.startswith("models--"):
        return repository.name.removeprefix("models--").replace("--", "/", 1)
    return None if Path(source).expanduser().is_dir() else os.fspath(source)


def _names_in_repo(hub_id: str, revision: str | None, token: str | None, folder: Path) -> list[str]:
    """All files of a repository, or those that the cache has of it."""
    try:
        return [file.rfilename for file in model_info(hub_id, revision=revision, token=token).siblings]
    # offline, say, which the Hub's client reports in several ways. They only make a message more helpful
    except Exception:
        return [path.name for path in folder.glob("*")]


def _may_be_hub_id(text: str) -> bool:
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True
