# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The error that says why a checkpoint cannot be read or converted."""


class ConversionError(ValueError):
    """A checkpoint is damaged, unsafe or not convertible; the message names what is wrong and what to do."""


def raise_problems(title: str, problems: list[str], limit: int = 10) -> None:
    """Raises one [`ConversionError`] that lists the first `limit` problems; does nothing if there are none."""
    if not problems:
        return
    lines = [f"{title} ({len(problems)} found):", *(f"  - {problem}" for problem in problems[:limit])]
    if len(problems) > limit:
        lines.append(f"  and {len(problems) - limit} more")
    raise ConversionError("\n".join(lines))
