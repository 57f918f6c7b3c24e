# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The error that says why a checkpoint cannot be read or converted."""

from .plain_text import printable


class ConversionError(ValueError):
    """
    A checkpoint is damaged, unsafe or not convertible; the message names what is wrong and what to do.

    Each of the `lines` becomes one line that is fit for a terminal and shows no token, whatever it quotes.
    """

    def __init__(self, *lines: str):
        super().__init__("\n".join(printable(line) for line in lines))


def raise_problems(title: str, problems: list[str], limit: int = 10) -> None:
    """Raises one [`ConversionError`] that lists the first `limit` problems; does nothing if there are none."""
    if not problems:
        return
    # shorter than a message of its own, so that all of them can be read
    listed = [f"  - {printable(problem, 500)}" for problem in problems[:limit]]
    if len(problems) > limit:
        listed.append(f"  and {len(problems) - limit} more")
    raise ConversionError(f"{title} ({len(problems)} found):", *listed)
