# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Pictures of finished runs: their loss as they train, and the depth weights that they end with."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

from .records import Row, best_rates
from .report import groups
from .systems import SYSTEMS


# the first points lie far above where the lines can be told apart
SHOWN_FROM = 0.15


def read_details(paths: Iterable[Path]) -> dict[str, dict]:
    """The lines of files of JSON lines, by the key of their run; of a run that is in several, the first."""
    found: dict[str, dict] = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for line in file:
                details = json.loads(line)
                found.setdefault(details["key"], details)
    return found


def shown_rows(rows: Iterable[Row], details: dict[str, dict]) -> list[Row]:
    """
    Each system's run of seed 0 at its best rate, in the systems' order, of the settings that were trained the longest.

    Raises:
        `ValueError`: if no finished run has its curve.
    """
    of_seed_0 = [row for row in rows if row.seed == 0 and row.key in details and row.system in SYSTEMS]
    if not of_seed_0:
        raise ValueError("No finished run has its curve in a file of details, so there is nothing to draw.")
    best = best_rates(groups(of_seed_0)[0])
    return [best[name] for name in SYSTEMS if name in best]


def write_plots(folder: Path, rows: Iterable[Row], details: dict[str, dict]) -> list[Path]:
    """
    Writes `study_curves.png`, and `study_depth_weights.png` if a system has any.

    Raises:
        `ImportError`: without matplotlib, which nothing else here needs.
        `ValueError`: if there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plots draws with matplotlib: `pip install matplotlib`.") from error
    shown = shown_rows(rows, details)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"curves": draw_curves(Figure(figsize=(10, 4.2), layout="constrained"), shown, details)}
    weighted = [row for row in shown if details[row.key]["depth_weights"]]
    if weighted:
        pictures["depth_weights"] = draw_depth_weights(Figure(layout="constrained"), weighted, details)
    paths = []
    for name, figure in pictures.items():
        paths.append(folder / f"study_{name}.png")
        figure.savefig(paths[-1], dpi=100)
    return paths


def draw_curves(figure, rows: list[Row], details: dict[str, dict]):
    """Held-out loss (of the sequences that curves are measured on) against tokens and against time."""
    by_tokens, by_time = figure.subplots(1, 2, sharey=True)
    for row in rows:
        points = [point for point in details[row.key]["curve"] if point[0] >= SHOWN_FROM * row.tokens]
        tokens, losses = [point[0] for point in points], [point[2] for point in points]
        label = f"{row.system}, rate {row.rate:g}: {row.loss:.4f}"
        by_tokens.plot([each / 1e6 for each in tokens], losses, label=label)
        # not as it passed, which holds compilation and waiting for others
        step = row.step_ms / 1000 / (row.batch * row.length)
        by_time.plot([each * step for each in tokens], losses)
    by_tokens.set(xlabel="million tokens", ylabel="held-out loss on a part, nats per token")
    by_tokens.legend(title="and at the end on all of it", fontsize="small")
    at_a_time = sorted({row.workers for row in rows})
    alone = at_a_time == [1]
    shared = "" if alone else f", {' or '.join(map(str, at_a_time))} workers sharing the GPU"
    by_time.set(xlabel=f"seconds at the run's median step{shared}")
    for axes in (by_tokens, by_time):
        axes.grid(alpha=0.3)
    first = rows[0]
    figure.suptitle(f"{first.shape}, {first.tokens / 1e6:g}M tokens, seed 0")
    return figure


def draw_depth_weights(figure, rows: list[Row], details: dict[str, dict]):
    """
    A map for each system, of its means over tokens (and heads), and of their deviations over tokens if they depend on
    these: a line for each layer or site, its sources from the oldest to its own.
    """
    maps = []
    for row in rows:
        weights = details[row.key]["depth_weights"]
        mean = by_source(weights["mean"])
        # the first layer or site has itself alone, for which static weights have no number
        maps.append((f"{row.system}\nmean", mean if weights["deviation"] else [[1.0], *mean]))
        if weights["deviation"]:
            maps.append((f"{row.system}\ndeviation over tokens", by_source(weights["deviation"])))
    figure.set_size_inches(3.1 * len(maps), 7)
    for axes, (title, lines) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
        widest = max(map(len, lines))
        cells = [[*line, *[math.nan] * (widest - len(line))] for line in lines]
        axes.imshow(cells, aspect="auto", vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
        axes.set(title=title, xlabel="source, oldest first", xticks=range(widest))
        axes.set_ylabel("layer or site")
        if widest <= 4:
            for y, line in enumerate(lines):
                for x, value in enumerate(line):
                    axes.text(
                        *(x, y, f"{value:.2f}"), ha="center", va="center", fontsize=8, color="wk"[int(value > 0.6)]
                    )
    return figure


def by_source(weights: list) -> list[list[float]]:
    """For each layer or site one number for each source: where heads differ, their mean."""
    return [
        [sum(heads) / len(heads) for heads in zip(*each, strict=True)] if isinstance(each[0], list) else each
        for each in weights
    ]
