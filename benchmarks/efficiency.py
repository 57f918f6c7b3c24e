# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`python -m benchmarks.efficiency --size 1.5b` compares all ways of mixing over depth with the vanilla decoder: what
they add in parameters, operations, time and memory, beside what their papers say.

Writes a CSV file and a plot to benchmarks/results/. With `--systems` and `--cases` it measures a part and leaves the
rest of a file of the same environment as it is; ratios are always of one run. `--size tiny` tries the command out on
any machine; its numbers mean nothing.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

import torch

from . import models
from .flops import cost
from .harness import Timing, environment, measure, read_results, release_memory, write_results


@dataclass(frozen=True)
class System:
    """
    Args:
        model (`str`):
            Its name in `models.MODELS`.
        paper_train (`dict`), paper_prefill (`float`, *optional*):
            What the table of the Depth-Attention paper (arXiv 2606.05014) says of it: by how many per cent a train
            step takes longer, by size, and by how many GiB a prefill of 128K tokens takes more memory.
        yardstick (`str`):
            The system that it is compared with.
    """

    model: str
    paper_train: dict[str, float]
    paper_prefill: float | None = None
    yardstick: str = "vanilla"


# yardsticks are fused like all others; what that saves them is seen from the model of transformers. MoDA is OLMo2 of
# the same size; the looped models run half of the layers twice. The control of the release is the vanilla model but
# for the order of key norm and rotation
SYSTEMS = {
    "vanilla": System("fused vanilla", {}),
    "stock Qwen3": System("stock Qwen3", {}),
    "control": System("control", {}),
    "Depth-Attention": System("Depth-Attention", {"1.5b": 9.1, "3b": 11.2}, 0.0),
    "AttnRes Block": System("AttnRes", {"1.5b": 47.8, "3b": 75.1}, 4.0),
    "AttnRes Full": System("AttnRes Full", {}),
    "DenseFormer": System("DenseFormer", {"1.5b": 50.6, "3b": 47.9}, 24.0),
    "mHC": System("mHC", {"1.5b": 321.0, "3b": 308.0}, 1.5),
    "looped vanilla": System("looped vanilla", {}, yardstick="looped vanilla"),
    "looped Depth-Attention": System("looped Depth-Attention", {}, yardstick="looped vanilla"),
    "vanilla OLMo2": System("fused OLMo2", {}, yardstick="vanilla OLMo2"),
    "MoDA": System("MoDA row 4", {}, yardstick="vanilla OLMo2"),
}


@dataclass(frozen=True)
class Workload:
    """Tokens of the two prompts, and in the cache that decoding starts from. A train step is that of the size."""

    prompts: tuple[int, int] = (32768, 131072)
    context: int = 2048


WORKLOADS = {"1.5b": Workload(), "3b": Workload(), "tiny": Workload((48, 64), 32)}
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "vocab_size": 256,
}


@dataclass(frozen=True)
class Case:
    """What makes a step of a model, by size, and how often it runs. With graphs of CUDA, compilation takes minutes."""

    prepare: Callable[..., Callable[[], None]]
    warmup: int
    repeats: int


CASES = {
    "decode": Case(lambda model, size: models.decode(model, 1, WORKLOADS[size].context), 2, 30),
    "decode_compiled": Case(
        lambda model, size: models.decode(model, 1, WORKLOADS[size].context, compiled=True), 8, 30
    ),
    "prefill_32k": Case(lambda model, size: models.prefill(model, WORKLOADS[size].prompts[0]), 1, 5),
    "prefill_128k": Case(lambda model, size: models.prefill(model, WORKLOADS[size].prompts[1]), 1, 1),
    "train": Case(
        lambda model, size: models.train_step(model, models.SIZES[size].batch, models.SIZES[size].tokens), 2, 5
    ),
}


@dataclass
class Row:
    """
    One system. Operations are per token of a train sequence; milliseconds are medians; memory is what a step takes at
    its peak besides what was there before (weights, optimizer state), in GiB; ratios and everything extra are against
    its yardstick. None where it was not measured or did not fit into memory, or where the paper says nothing.
    """

    system: str
    size: str
    parameters: int
    added_parameters: int
    forward_flops: int
    extra_flops_percent: float
    state_bytes_per_token: int
    train_ms: float | None = None
    train_ratio: float | None = None
    train_gib: float | None = None
    train_extra_gib: float | None = None
    prefill_32k_ms: float | None = None
    prefill_32k_ratio: float | None = None
    prefill_32k_gib: float | None = None
    prefill_32k_extra_gib: float | None = None
    prefill_128k_ms: float | None = None
    prefill_128k_ratio: float | None = None
    prefill_128k_gib: float | None = None
    prefill_128k_extra_gib: float | None = None
    decode_ms: float | None = None
    decode_ratio: float | None = None
    decode_compiled_ms: float | None = None
    decode_compiled_ratio: float | None = None
    paper_train_ratio: float | None = None
    paper_prefill_128k_extra_gib: float | None = None


def fields_of(case: str) -> list[str]:
    named = {f"{case}_{quantity}" for quantity in ("ms", "ratio", "gib", "extra_gib")}
    return [field.name for field in fields(Row) if field.name in named]


def measure_system(name: str, size: str, cases: list[str]) -> Row:
    """The numbers of one system, not yet compared."""
    system, shape = SYSTEMS[name], models.SIZES[size]
    model = models.build(system.model, size)
    found = cost(model.config, shape.tokens)
    row = Row(
        *(name, size, found.parameters, found.added_parameters, found.flops, 0.0, found.state_bytes),
        paper_prefill_128k_extra_gib=system.paper_prefill,
    )
    if size in system.paper_train:
        row.paper_train_ratio = 1 + system.paper_train[size] / 100
    for case in cases:
        prepare = partial(CASES[case].prepare, model, size)
        repeats = 1 if size == "tiny" else CASES[case].repeats
        timing = time_if_it_fits(f"{name}, {case}", model, prepare, warmup=CASES[case].warmup, repeats=repeats)
        for quantity, value in (("ms", timing and timing.median), ("gib", timing and timing.peak_gib)):
            if f"{case}_{quantity}" in fields_of(case):
                setattr(row, f"{case}_{quantity}", value)
    return row


def time_if_it_fits(label: str, model, prepare: Callable[[], Callable[[], None]], **options) -> Timing | None:
    """
    The timing of the step that is prepared, or None, and a message, if there is too little memory for it. In both
    cases nothing but the model's weights is left in memory.
    """
    try:
        return measure([prepare()], **options)[0]
    except torch.OutOfMemoryError:
        print(f"{label}: out of memory", flush=True)
        return None
    finally:
        # here the exception, whose traceback holds what the step had made, is gone already
        model.zero_grad()
        release_memory()


def compared(rows: list[Row]) -> list[Row]:
    """The rows with what is said of them by their yardsticks, which are among them."""
    by_name = {row.system: row for row in rows}
    found = []
    for row in rows:
        first, row = by_name[SYSTEMS[row.system].yardstick], replace(row)
        row.extra_flops_percent = 100 * (row.forward_flops / first.forward_flops - 1)
        for case in CASES:
            milliseconds, yardstick = getattr(row, f"{case}_ms"), getattr(first, f"{case}_ms")
            if milliseconds is not None and yardstick is not None:
                setattr(row, f"{case}_ratio", milliseconds / yardstick)
                if f"{case}_gib" in fields_of(case):
                    extra = getattr(row, f"{case}_gib") - getattr(first, f"{case}_gib")
                    setattr(row, f"{case}_extra_gib", extra)
        found.append(row)
    return found


def merged(rows: list[Row], earlier: list[Row], cases: list[str]) -> list[Row]:
    """Rows of this run, with the cases that only an earlier one measured, and the systems that only that measured."""
    by_name = {row.system: row for row in earlier}
    others = [field for case in CASES if case not in cases for field in fields_of(case)]
    for row in rows:
        old = by_name.get(row.system, row)
        by_name[row.system] = replace(row, **{field: getattr(old, field) for field in others})
    return [by_name[name] for name in SYSTEMS if name in by_name]


def plot(rows: list[Row]) -> str:
    """An SVG picture: two groups of bars, what was measured and, as a line across, what the paper says."""
    groups = (
        ("train step, ratio to vanilla", "train_ratio", "paper_train_ratio"),
        ("prefill of 128K tokens, extra memory in GiB", "prefill_128k_extra_gib", "paper_prefill_128k_extra_gib"),
    )
    left, width, height = 130, 420, 22
    parts, y = [], 10
    for title, key, paper_key in groups:
        values = [getattr(row, name) or 0.0 for row in rows for name in (key, paper_key)]
        scale = width / max(*values, 1e-9)
        y += 26
        parts.append(f'<text x="{left}" y="{y}" font-weight="bold">{escape(title)}</text>')
        for row in rows:
            y += height
            value, paper = getattr(row, key), getattr(row, paper_key)
            label = "did not fit" if value is None else f"{value:.2f}"
            label += "" if paper is None else f" (paper {paper:g})"
            bar = max(scale * (value or 0.0), 0.0)
            parts.append(f'<text x="{left - 8}" y="{y}" text-anchor="end">{escape(row.system)}</text>')
            parts.append(f'<rect x="{left}" y="{y - 12}" width="{bar:.1f}" height="14" fill="#4878a8"/>')
            if paper is not None:
                at = left + scale * paper
                parts.append(f'<path d="M{at:.1f} {y - 15}v20" stroke="#c04040" stroke-width="2"/>')
            parts.append(f'<text x="{left + max(bar, scale * (paper or 0)) + 8:.1f}" y="{y}">{escape(label)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 190}" height="{y + 20}"'
    return "\n".join([f'{head} font-family="sans-serif" font-size="13">', *parts, "</svg>", ""])


def columns(row: Row) -> Iterator[str]:
    """What is printed of a row."""
    for entry in fields(row):
        value = getattr(row, entry.name)
        if value is not None and entry.name != "size":
            yield f"{entry.name} {value:.4g}" if isinstance(value, float) else f"{entry.name} {value}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.efficiency", description=__doc__)
    parser.add_argument("--size", choices=WORKLOADS, required=True)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="system")
    # compiling all layers of a model takes minutes
    usual = [case for case in CASES if case != "decode_compiled"]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=usual, help=f"default: {' '.join(usual)}")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    arguments = parser.parse_args(argv)
    size, cases = arguments.size, arguments.cases
    if size == "tiny":
        models.SIZES["tiny"] = replace(models.qwen3(2, **TINY), tokens=32)
    elif not torch.cuda.is_available():
        parser.error(f"--size {size} needs a GPU; --size tiny tries the command out")
    else:
        models.SELECTED[:] = [SYSTEMS[name].model for name in arguments.systems]
        for gate in (size, *(["700m"] if "MoDA" in arguments.systems else [])):
            models.check_function(gate)
            release_memory()
    print(*(f"{name} {value}" for name, value in environment().items()), sep=", ", flush=True)

    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"efficiency_{size}.csv"
    earlier = read_results(path, Row)
    # yardsticks first, whatever else is asked for
    names = dict.fromkeys(each for name in arguments.systems for each in (SYSTEMS[name].yardstick, name))
    measured = []
    for name in names:
        measured.append(measure_system(name, size, cases))
        release_memory()
        rows = compared(measured)
        print(", ".join(columns(rows[-1])), flush=True)
        # written after every system: a later one may not finish
        rows = merged(rows, earlier, cases)
        write_results(path, rows)
        path.with_suffix(".svg").write_text(plot(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
