# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The table and the pictures of finished trials."""

import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.study.plots import read_details
from benchmarks.study.records import compare, student_quantile

from .arms import ARMS
from .continuation import Row


CONTROL = ("vanilla", 1.0)


def by_arm(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """The rows of each arm and scale, in the arms' order."""
    found: dict[tuple[str, float], list[Row]] = {}
    order = {arm.name: place for place, arm in enumerate(ARMS)}
    for row in sorted(rows, key=lambda row: (order[row.system], row.scale, row.seed)):
        found.setdefault((row.system, row.scale), []).append(row)
    return found


def table(rows: Iterable[Row]) -> Iterator[str]:
    """A line of Markdown for each arm and scale, with means over its seeds."""
    groups = by_arm(rows)
    yield (
        "| | relative rate | loss at the start | loss at the end | beside vanilla | p | pairs | mean weights "
        "| exchanged weights | mean size of gates | mixing moved |"
    )
    yield f"|{'---|' * 11}"
    for (name, scale), group in groups.items():
        cells = [name, f"{scale:g}", mean_of(group, "loss_at_start"), mean_of(group, "loss")]
        if name == CONTROL[0] or CONTROL not in groups:
            cells += ["", "", ""]
        else:
            found = compare(group, groups[CONTROL])
            several = found.pairs > 1
            cells.append(f"{found.mean:+.4f}" + (f" ± {found.half_width:.4f}" if several else ""))
            cells += [f"{found.p_value:.2g}" if several else "", str(found.pairs)]
        names = ("loss_of_mean_weights", "loss_of_exchanged_weights", "gate_mean_size", "mixing_moved")
        cells += [mean_of(group, each) for each in names]
        yield f"| {' | '.join(cells)} |"


def mean_loss(rows: list[Row]) -> float:
    return statistics.mean(row.loss for row in rows)


def mean_of(rows: list[Row], name: str) -> str:
    values = [getattr(row, name) for row in rows]
    return "" if None in values else f"{statistics.mean(values):.4f}"


def summary(rows: Iterable[Row]) -> str:
    return "\n".join(table(rows))


def write_plots(folder: Path, rows: Iterable[Row], details: Path) -> list[Path]:
    """
    Writes `retrofit_curves.png`, the held-out loss beside vanilla's against tokens, on average over the seeds, with a
    95 % interval from three seeds on, and `retrofit_gates.png`, the mean size of the gates against steps.

    Raises:
        `ImportError`: without matplotlib, which nothing else here needs.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plots draws with matplotlib: `pip install matplotlib`.") from error
    groups, lines = by_arm(rows), read_details([details])
    vanilla = {row.seed: lines[row.key]["curve"] for row in groups[CONTROL]}
    # one line for each arm: the scale that most seeds have, and of those the best
    shown: dict[str, list[Row]] = {}
    for (name, _), group in groups.items():
        shown[name] = min(shown.get(name, group), group, key=lambda each: (-len(each), mean_loss(each)))
    curves, gates = (Figure(figsize=(10, 4.5), layout="constrained") for _ in range(2))
    curve_axes, gate_axes = curves.subplots(), gates.subplots()
    for name, chosen in shown.items():
        paired = [(lines[row.key]["curve"], vanilla[row.seed]) for row in chosen if row.seed in vanilla]
        if name != CONTROL[0] and paired:
            tokens = [point[0] / 1e6 for point in paired[0][0]]
            points = [[own[i][2] - control[i][2] for own, control in paired] for i in range(len(tokens))]
            beside = [statistics.mean(point) for point in points]
            (line,) = curve_axes.plot(tokens, beside, label=f"{name}, x{chosen[0].scale:g}, seeds: {len(paired)}")
            if len(paired) > 2:
                factor = student_quantile(len(paired) - 1) / math.sqrt(len(paired))
                half = [factor * statistics.stdev(point) for point in points]
                lower = [mean - each for mean, each in zip(beside, half, strict=True)]
                upper = [mean + each for mean, each in zip(beside, half, strict=True)]
                curve_axes.fill_between(tokens, lower, upper, alpha=0.15, color=line.get_color(), linewidth=0)
        with_gates = [lines[row.key]["gates"] for row in chosen if lines[row.key]["gates"]]
        if with_gates:
            steps = [point["step"] for point in with_gates[0]]
            sizes = [statistics.mean(each[i]["gate/mean_size"] for each in with_gates) for i in range(len(steps))]
            gate_axes.plot(steps, sizes, label=f"{name}, x{chosen[0].scale:g}")
    curve_axes.axhline(0, color="black", linewidth=0.8)
    # some arms are ten times as far from vanilla as others
    curve_axes.set_yscale("symlog", linthresh=0.01)
    curve_axes.set(xlabel="million tokens of the continuation", ylabel="held-out loss beside vanilla, nats per token")
    gate_axes.set(xlabel="steps of the continuation", ylabel="mean size of the gates")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for figure, axes, name in ((curves, curve_axes, "curves"), (gates, gate_axes, "gates")):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
        paths.append(folder / f"retrofit_{name}.png")
        figure.savefig(paths[-1], dpi=100)
    return paths
