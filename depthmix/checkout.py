# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Python that is started in a clone finds this package there, and its subpackages, which lie beside it under other names,
only where they are installed. Without an editable install these are two copies, and after a `git pull` two states.
"""

import configparser
from collections.abc import Iterator, Sequence
from pathlib import Path


def refuse_mixed_states(folders: Sequence[str]) -> None:
    """
    Compares the clone that this package is imported from with the installed copy that its subpackages come from.

    Args:
        folders (sequence of `str`):
            Where the package was found, in the order in which its modules are looked for.

    Raises:
        `ImportError`: if a file of the two differs, or is in one of them only.
    """
    package, *others = map(Path, folders)
    installed = next((each for each in others if (each / "modeling").is_dir()), None)
    if installed is None or (package / "modeling").is_dir():
        return
    clone = package.parent
    different = sorted(_differences(clone, installed))
    if different:
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        raise ImportError(
            f"depthmix is imported from {package}, and its subpackages from {installed}, which is another state: "
            f"{different[0]} differs{more}. Start Python in another folder, or install again: `pip install .`, or "
            "`pip install -e .`, which stays up to date."
        )


def _differences(clone: Path, installed: Path) -> Iterator[str]:
    """The files that are not the same, or missing on one side, as they are called in the clone."""
    setup = configparser.ConfigParser()
    setup.read(clone / "setup.cfg", encoding="utf-8")
    for line in setup.get("options", "package_dir", fallback="").split("\n"):
        name, _, folder = (part.strip() for part in line.partition("="))
        own, other = clone / folder, installed.joinpath(*name.split(".")[1:])
        if not name or not own.is_dir():
            continue
        # the installed package has the subpackages in it, of which the clone has most beside it
        files = {path.relative_to(own) for path in own.rglob("*.py")} | {
            Path(path.name) for path in other.glob("*.py")
        }
        for file in files:
            if _content(own / file) != _content(other / file):
                yield f"{folder}/{file}"


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
