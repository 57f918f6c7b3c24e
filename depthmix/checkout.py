# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Python that is started in a clone finds this package there, and its subpackages, which lie beside it under other names,
only where they are installed. Without an editable install these are two copies, and after a `git pull` two states.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path


# subpackage -> its folder in a clone, as setup.cfg maps them
_FOLDERS = {
    "configuration": "configuration",
    "modeling": "modeling",
    "kernels": "kernels/depth_ops",
    "conversion": "conversion",
}


def refuse_mixed_states(folders: Sequence[str]) -> None:
    """
    Compares the clone that this package is imported from with the installed copy that its subpackages come from.

    Args:
        folders (sequence of `str`):
            Where the package was found, in the order in which its modules are looked for.

    Raises:
        `ImportError`: if a file of the two differs, or is in one of them only.
    """
    clone, *others = map(Path, folders)
    installed = next((each for each in others if (each / "modeling").is_dir()), None)
    if installed is None or (clone / "modeling").is_dir():
        return
    different = sorted(_differences(clone, installed))
    if different:
        raise ImportError(
            f"depthmix is imported from {clone}, and its subpackages from {installed}, which is another state: "
            f"{different[0]} differs{f', and {len(different) - 1} more' if len(different) > 1 else ''}. Start Python "
            "in another folder, or install again: `pip install .`, or `pip install -e .`, which stays up to date."
        )


def _differences(clone: Path, installed: Path) -> Iterator[str]:
    pairs = {clone: installed} | {clone.parent / folder: installed / name for name, folder in _FOLDERS.items()}
    for own, other in pairs.items():
        names = {path.name for folder in (own, other) for path in folder.glob("*.py")}
        yield from (
            f"{own.relative_to(clone.parent)}/{name}"
            for name in names
            if _content(own / name) != _content(other / name)
        )


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
