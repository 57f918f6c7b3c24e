# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""A result that appears under its name only when it is complete, and takes the place of an older one in one step."""

import ctypes
import errno
import hashlib
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from depthmix.hub import UNFINISHED_FILE

from .checkpoint_source import foreign_entries
from .errors import ConversionError, raise_problems
from .reports import format_bytes


try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

# of `renameat2`, in Linux's fcntl.h and fs.h
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# bytes of a file's name, on every file system in common use
_NAME_LIMIT = 255
_KINDS = ("incomplete", "replaced")


def check_destination(dest: Path, overwrite: bool, code_files: Collection[str]) -> None:
    """
    Raises:
        [`ConversionError`]: if something is there that must not be replaced. Only a saved model may be, with the code
            that its config names and `code_files`, and only if it can be removed afterwards.
    """
    if len(os.fsencode(dest.name)) > _NAME_LIMIT:
        raise ConversionError(f"{dest}: the name of a folder has at most {_NAME_LIMIT} bytes.")
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
    check_model_only(dest, code_files)
    if names and not any(name == "config.json" or name.endswith(".safetensors") for name in names):
        raise ConversionError(
            f"{dest} does not look like a model's folder, so it is not overwritten. Remove it yourself."
        )
    for folder in (dest.resolve().parent, dest, *(path for path in dest.iterdir() if path.is_dir())):
        if not _may_change(folder):
            raise ConversionError(
                f"{folder} belongs to another user or is read-only, so that {dest} could not be removed when it has "
                "been replaced. Choose another destination, or have it removed first."
            )


def check_model_only(folder: Path, code_files: Collection[str]) -> None:
    """
    Raises:
        [`ConversionError`]: if a folder that is to be replaced holds anything else than a saved model.
    """
    raise_problems(
        f"{folder} holds what is no part of a saved model, so it is not overwritten. Move it away first",
        foreign_entries(folder, code_files),
    )


def check_apart(dest: Path, source: Path) -> None:
    """
    Raises:
        [`ConversionError`]: if one of the two folders is the other or lies in it.
    """
    dest, source = dest.resolve(), source.resolve()
    if dest.is_relative_to(source) or source.is_relative_to(dest):
        raise ConversionError(f"The destination {dest} and the source {source} must be separate folders.")


def check_space(dest: Path, nbytes: int) -> None:
    """
    Raises:
        [`ConversionError`]: if there is not room for so many bytes where `dest` is to be.
    """
    existing = next(parent for parent in dest.resolve().parents if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise ConversionError(
            f"{existing} has {format_bytes(free)} free, and {format_bytes(nbytes)} are to be written."
        )


def clear_leftovers(dest: Path, code_files: Collection[str]) -> list[str]:
    """
    Puts right what an earlier run that was killed has left beside `dest`, and says what was done.

    A folder of a run that is still going is locked and left alone, and so is one that holds anything but a model. If
    `dest` itself is missing, the model that the earlier run had moved away takes its place again.
    """
    dest = dest.resolve()
    remarks = []
    # the model that was moved away first: it is the one that must not be lost
    for kind in reversed(_KINDS):
        for folder in _leftovers(dest, kind):
            with _locked(folder) as is_free:
                if not is_free:
                    continue
                if kind == "replaced" and not dest.exists():
                    folder.rename(dest)
                    remarks.append(
                        f"An earlier run was ended while it replaced {dest}. The older model is back there."
                    )
                    continue
                try:
                    foreign = foreign_entries(folder, code_files)
                except ConversionError as error:
                    foreign = [str(error)]
                if names := [name for name in foreign if not UNFINISHED_FILE.fullmatch(name)]:
                    remarks.append(f"{folder} is left over and holds {', '.join(names[:5])}, so it was not removed.")
                    continue
                shutil.rmtree(folder, ignore_errors=True)
            if folder.exists():
                remarks.append(f"{folder} is left over and could not be removed. Remove it yourself.")
            else:
                remarks.append(f"{folder}, left over from an earlier run, was removed.")
    return remarks


@contextmanager
def staged_folder(
    dest: Path,
    overwrite: bool,
    check_replaced: Callable[[Path], None] = lambda folder: None,
    more_follows: bool = False,
) -> Iterator[Path]:
    """
    A new folder beside `dest` that takes its place when the block ends, and is removed when the block raises.

    An older `dest` stays as it is until then, and is replaced only with `overwrite`. Everything is on the disk before
    the older one goes. Where the system can exchange two folders there is no moment without a model; elsewhere
    [`clear_leftovers`] ends what a killed process has begun. Parents of `dest` that were made for it are removed too
    when the block raises. The first signal that raises in the block ends it, and later ones are ignored until
    everything is cleaned up. One that comes when the new folder takes its place is too late to stop anything; if more
    follows, it is handled then.

    Args:
        dest (`Path`):
            Where the folder is to be. The target of a link is replaced, not the link.
        overwrite (`bool`):
            Whether an older folder is replaced.
        check_replaced (`Callable`, *optional*):
            Takes the older folder once it has no name any more under which others could change it, and raises if it
            must not go. Then it is back.
        more_follows (`bool`, *optional*, defaults to `False`):
            Whether the caller has something left to do that a signal should stop.
    """
    dest = dest.resolve()
    new_parents = [parent for parent in dest.parents if not parent.exists()]
    mark = secrets.token_hex(4)
    staging, replaced = (_beside(dest, mark, kind) for kind in _KINDS)
    with _one_signal(more_follows) as hold_signals:
        try:
            dest.parent.mkdir(parents=True, exist_ok=True)
            with _made_and_locked(staging):
                yield staging
                _flush(staging)
                hold_signals()
                _put_in_place(staging, dest, replaced, overwrite, check_replaced)
                for folder in (dest.parent, *(parent.parent for parent in new_parents)):
                    _flush_entry(folder)
        except BaseException:
            # innermost first; fails from where something else is
            with suppress(OSError):
                for parent in new_parents:
                    parent.rmdir()
            raise


def _put_in_place(
    staging: Path, dest: Path, replaced: Path, overwrite: bool, check_replaced: Callable[[Path], None]
) -> None:
    if overwrite and dest.is_dir():
        if _exchange(staging, dest):
            # now the older one has the hidden name
            try:
                check_replaced(staging)
            except BaseException:
                if not _exchange(staging, dest):
                    staging.rename(replaced)
                raise
            shutil.rmtree(staging, ignore_errors=True)
            return
        with suppress(FileNotFoundError):
            dest.rename(replaced)
    try:
        if replaced.exists():
            check_replaced(replaced)
        staging.rename(dest)
    except BaseException as error:
        # where another process was faster, its model is the newest
        if replaced.exists() and not dest.exists():
            replaced.rename(dest)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            shutil.rmtree(replaced, ignore_errors=True)
            raise ConversionError(f"{dest} was filled by something else meanwhile, and is left as it is.") from error
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two folders in one step; False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    # the second folder may have gone meanwhile
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOENT, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(second))


def _beside(dest: Path, mark: str, kind: str) -> Path:
    return dest.with_name(f".{_short_name(dest, mark, kind)}.{mark}.{kind}")


def _short_name(dest: Path, mark: str, kind: str) -> str:
    """The name of `dest`, or, where that would make the hidden name too long, its beginning and a digest of it."""
    room = _NAME_LIMIT - len(f"..{mark}.{kind}")
    name = os.fsencode(dest.name)
    if len(name) <= room:
        return dest.name
    digest = f"~{hashlib.sha256(name).hexdigest()[:16]}"
    return name[: room - len(digest)].decode("ascii", "ignore") + digest


def _leftovers(dest: Path, kind: str) -> list[Path]:
    mark = "0" * 8
    pattern = re.compile(rf"\.{re.escape(_short_name(dest, mark, kind))}\.[0-9a-f]{{8}}\.{kind}")
    if not dest.parent.is_dir():
        return []
    found = [path for path in dest.parent.iterdir() if pattern.fullmatch(path.name)]
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


@contextmanager
def _made_and_locked(folder: Path) -> Iterator[None]:
    """A new folder, locked for as long as the block runs, and removed if it raises."""
    made = False
    while not made:
        try:
            folder.mkdir(exist_ok=True)
            with _locked(folder) as is_mine:
                # another run that clears up may have taken it for a leftover before it was locked
                made = is_mine is not False and folder.exists()
                if made:
                    yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Holds the lock of a folder, which ends with the process. False: another one has it. None: there are no locks."""
    if fcntl is None:
        yield None
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_mine = True
        except BlockingIOError:
            is_mine = False
        except OSError:
            is_mine = None
        yield is_mine
    finally:
        os.close(descriptor)


def _may_change(folder: Path) -> bool:
    if os.access in os.supports_effective_ids:
        return os.access(folder, os.W_OK | os.X_OK, effective_ids=True)
    return os.access(folder, os.W_OK | os.X_OK)


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        _flush_entry(path)
    _flush_entry(folder)


def _flush_entry(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # folders on Windows
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        # file systems that cannot flush a folder
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _one_signal(more_follows: bool) -> Iterator[Callable[[], None]]:
    """
    Within the block the first signal is handled as before, and while that unwinds the block others are ignored. After
    a call of what the block gets none is handled before its end, and then only if more follows.
    """
    # Python handles signals in the main thread only
    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # those that end the process at once, or are ignored, stay so
    handlers = {number: signal.getsignal(number) for number in numbers if in_main_thread}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    state = {"held": False, "unwinding": False, "waiting": None}

    def handle(number, frame):
        if state["held"]:
            state["waiting"] = number
        elif not state["unwinding"]:
            state["unwinding"] = True
            handlers[number](number, frame)
            # it did not raise
            state["unwinding"] = False

    def hold():
        state["held"] = True

    try:
        for number in handlers:
            signal.signal(number, handle)
        yield hold
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if more_follows and state["waiting"] is not None:
        signal.raise_signal(state["waiting"])
