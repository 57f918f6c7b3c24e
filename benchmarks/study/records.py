# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What is kept of finished runs, and the statistics over them."""

import csv
import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .training import Outcome, Run


@dataclass(frozen=True)
class Row:
    """A finished run: what was trained, what came out, and where. One line of `runs.csv`."""

    key: str
    system: str
    shape: str
    rate: float
    seed: int
    tokens: int
    batch: int
    length: int
    vocab_size: int
    warm_up: float
    last: float
    decay: float
    beta_1: float
    beta_2: float
    clip: float
    std: float
    scaled_output: bool
    embedding_std: float | None
    parameters: int
    steps: int
    loss: float
    bits_per_byte: float
    train_loss: float
    seconds: float
    step_ms: float
    peak_gib: float
    execution: str
    workers: int
    corpus: str
    gpu: str
    depthmix: str
    torch: str
    transformers: str
    triton: str
    date: str

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.loss)

    @property
    def pairs_by(self) -> tuple:
        """What two runs must share for their difference to be that of their systems, and of the systems' rates."""
        return tuple(getattr(self, name) for name in _SHARED_BY_PAIRS)


_SHARED_BY_PAIRS = (
    *("shape", "seed", "tokens", "batch", "length", "vocab_size", "corpus"),
    *("warm_up", "last", "decay", "beta_1", "beta_2", "clip", "std", "scaled_output", "embedding_std"),
)


def row_of(run: Run, outcome: Outcome, corpus: str, workers: int, environment: dict[str, str]) -> Row:
    recipe = asdict(run.recipe)
    values = asdict(run) | recipe | recipe["start"] | asdict(outcome) | environment
    values |= {"key": run.key, "corpus": corpus, "workers": workers}
    return Row(**{each.name: values[each.name] for each in fields(Row)})


def append_row(path: Path, row) -> None:
    """Adds a line for a [`Row`] or another dataclass, and before the first one that of the names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(row)], lineterminator="\n")
        if is_new:
            writer.writeheader()
        # all digits, since differences of losses are what is looked for
        writer.writerow({name: "" if value is None else value for name, value in asdict(row).items()})


def append_details(path: Path, run: Run, outcome: Outcome) -> None:
    """Adds the curve and the depth weights as a line of JSON."""
    details = {"key": run.key, "label": run.label, "curve": outcome.curve, "depth_weights": outcome.depth_weights}
    append_json(path, details)


def append_json(path: Path, details: dict) -> None:
    """Adds a line of JSON, with numbers of five digits behind the point."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(_rounded(details)) + "\n")


def _rounded(values):
    if isinstance(values, dict):
        return {name: _rounded(each) for name, each in values.items()}
    if isinstance(values, list | tuple):
        return [_rounded(each) for each in values]
    return round(values, 5) if isinstance(values, float) else values


def read_rows(paths: Iterable[Path], kind: type = Row) -> list:
    """
    The rows of CSV files, as [`Row`] or another dataclass with a `key`; of a run that is in several, the first.

    Raises:
        `ValueError`: if a file has other columns.
    """
    names = {each.name: each.type for each in fields(kind)}
    rows: dict[str, Any] = {}
    for path in paths:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames != list(names):
                raise ValueError(f"{path}: its columns are not those of finished runs: {', '.join(names)}.")
            for record in reader:
                row = kind(**{name: _parsed(type_, record[name]) for name, type_ in names.items()})
                rows.setdefault(row.key, row)
    return list(rows.values())


def _parsed(kind, text: str):
    if kind is bool:
        return text == "True"
    if kind in (str, int, float):
        return kind(text)
    return float(text) if text else None


def best_rates(rows: Iterable[Row]) -> dict[str, Row]:
    """The row with the lowest held-out loss of each system."""
    best: dict[str, Row] = {}
    for row in rows:
        if not row.diverged and (row.system not in best or row.loss < best[row.system].loss):
            best[row.system] = row
    return best


@dataclass(frozen=True)
class Comparison:
    """
    Paired differences of held-out losses, the system's minus the control's, over the seeds that both have: their mean,
    the half width of the 95% interval, and the two-sided p-value of Student's t test. The last two need two pairs.
    """

    system: str
    control: str
    pairs: int
    mean: float
    half_width: float
    p_value: float

    @property
    def verdict(self) -> str:
        if self.pairs < 2:
            return "one seed"
        if self.p_value > 0.05:
            return "noise"
        return "better" if self.mean < 0 else "worse"


def compare(system: Iterable[Row], control: Iterable[Row], value: Callable[[Row], float] = lambda row: row.loss):
    """
    The comparison of rows, at most one a seed on each side.

    Raises:
        `ValueError`: if there is no pair, or a seed has two rows on one side.
    """
    sides: list[dict[tuple, Row]] = []
    for rows in (system, control):
        side: dict[tuple, Row] = {}
        for row in rows:
            if row.pairs_by in side:
                raise ValueError(f"{row.system}, seed {row.seed}: there are two runs for one pair.")
            side[row.pairs_by] = row
        sides.append(side)
    shared = sorted(sides[0].keys() & sides[1].keys(), key=str)
    if not shared:
        raise ValueError("The runs share no seed with the same data, tokens and recipe, so nothing can be paired.")
    differences = [value(sides[0][key]) - value(sides[1][key]) for key in shared]
    names = [next(iter(side.values())).system for side in sides]
    mean, count = statistics.mean(differences), len(differences)
    if count < 2:
        return Comparison(*names, count, mean, math.nan, math.nan)
    error = statistics.stdev(differences) / math.sqrt(count)
    p_value = student_p_value(mean / error, count - 1) if error else float(mean == 0)
    return Comparison(*names, count, mean, error * student_quantile(count - 1), p_value)


def student_p_value(t: float, degrees: int) -> float:
    """Two-sided, for a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan(abs(t) / math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    if degrees % 2:
        term, total = cosine, cosine if degrees > 1 else 0.0
        for i in range(3, degrees - 1, 2):
            term *= cosine * cosine * (i - 1) / i
            total += term
        inside = 2 / math.pi * (theta + sine * total)
    else:
        term = total = 1.0
        for i in range(2, degrees - 1, 2):
            term *= cosine * cosine * (i - 1) / i
            total += term
        inside = sine * total
    return max(0.0, 1 - inside)


def student_quantile(degrees: int, p_value: float = 0.05) -> float:
    """The `t` of a two-sided p-value."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p_value(middle, degrees) > p_value else (low, middle)
    return high
