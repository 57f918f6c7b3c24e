# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""A result that appears under its name only when it is complete."""

import errno
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .checkpoint_source import foreign_entries
from .errors import ConversionError, raise_problems


def check_destination(dest: Path, overwrite: bool, code_files: Collection[str]) -> None:
    """
    Raises:
        [`ConversionError`]: if something is there that must not be replaced. Only a saved model may be, with the code
            that its config names and `code_files`.
    """
    if not dest.exists():
        parent = next(parent for parent in dest.resolve().parents if parent.exists())
        if not parent.is_dir():
            raise ConversionError(f"{parent} is a file, so there cannot be a folder {dest}.")
        return
    if not dest.is_dir():
        raise ConversionError(f"{dest} exists and is not a folder.")
    if os.path.ismount(dest):
        raise ConversionError(
            f"{dest} is a mount point, which cannot be replaced in one step. Name a folder inside it."
        )
    if os.path.samefile(dest, os.curdir):
        raise ConversionError(f"{dest} is the current folder, which cannot be replaced. Name a folder inside it.")
    names = os.listdir(dest)
    if names and not overwrite:
        raise ConversionError(
            f"{dest} is not empty. Choose another destination, or pass --overwrite (overwrite=True) to replace it."
        )
    raise_problems(
        f"{dest} holds what is no part of a saved model, so it is not overwritten. Move it away first",
        foreign_entries(dest, code_files),
    )
    if names and not any(name == "config.json" or name.endswith(".safetensors") for name in names):
        raise ConversionError(
            f"{dest} does not look like a model's folder, so it is not overwritten. Remove it yourself."
        )


def check_apart(dest: Path, source: Path) -> None:
    """
    Raises:
        [`ConversionError`]: if one of the two folders is the other or lies in it.
    """
    dest, source = dest.resolve(), source.resolve()
    if dest.is_relative_to(source) or source.is_relative_to(dest):
        raise ConversionError(f"The destination {dest} and the source {source} must be separate folders.")


@contextmanager
def staged_folder(dest: Path, overwrite: bool) -> Iterator[Path]:
    """
    A new folder beside `dest` that takes its place when the block ends, and is removed when the block raises.

    An older `dest` stays as it is until then, and is replaced only with `overwrite`. Parents of `dest` that were made
    for it are removed too when the block raises. A process that is killed cannot remove anything: it may leave the
    hidden folder, `.<name>.<hex>.incomplete`.
    """
    # the target of a link is replaced, not the link
    dest = dest.resolve()
    new_parents = [parent for parent in dest.parents if not parent.exists()]
    mark = secrets.token_hex(4)
    staging = dest.with_name(f".{dest.name}.{mark}.incomplete")
    replaced = dest.with_name(f".{dest.name}.{mark}.replaced")
    try:
        staging.mkdir(parents=True)
        yield staging
        if overwrite:
            with suppress(FileNotFoundError):
                dest.rename(replaced)
        try:
            staging.rename(dest)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise ConversionError(f"{dest} was filled by something else meanwhile, and is left as it is.") from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        if replaced.exists() and not dest.exists():
            replaced.rename(dest)
        # innermost first; fails from where something else is
        with suppress(OSError):
            for parent in new_parents:
                parent.rmdir()
        raise
    shutil.rmtree(replaced, ignore_errors=True)
