# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`python -m benchmarks.efficiency --size 1.5b` compares all ways of mixing over depth with the vanilla decoder: what
they add in parameters, operations, time and memory, beside what their papers say.

Writes a CSV file and a plot to benchmarks/results/. `--size tiny` tries the command out on any machine; its numbers
mean nothing.
"""

import argparse
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from transformers import DynamicCache

from depthmix.modeling.depth_modeling_common import HOST_CACHE_NAME

from . import models
from .flops import cost
from .harness import environment, measure, release_memory, write_results


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
# the same size
SYSTEMS = {
    "vanilla": System("fused vanilla", {}),
    "stock Qwen3": System("stock Qwen3", {}),
    "Depth-Attention": System("Depth-Attention", {"1.5b": 9.1, "3b": 11.2}, 0.0),
    "AttnRes Block": System("AttnRes", {"1.5b": 47.8, "3b": 75.1}, 4.0),
    "AttnRes Full": System("AttnRes Full", {}),
    "DenseFormer": System("DenseFormer", {"1.5b": 50.6, "3b": 47.9}, 24.0),
    "mHC": System("mHC", {"1.5b": 321.0, "3b": 308.0}, 1.5),
    "vanilla OLMo2": System("fused OLMo2", {}, yardstick="vanilla OLMo2"),
    "MoDA": System("MoDA row 4", {}, yardstick="vanilla OLMo2"),
}


@dataclass(frozen=True)
class Workload:
    """Tokens of the sequences of a train step, of the two prompts, and in the cache that decoding starts from."""

    train_batch: int = 2
    train: int = 2048
    prompts: tuple[int, int] = (32768, 131072)
    context: int = 2048
    repeats: int = 5


WORKLOADS = {"1.5b": Workload(train_batch=8), "3b": Workload(train_batch=4), "tiny": Workload(2, 32, (48, 64), 32, 1)}
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "vocab_size": 256,
}


@dataclass
class Row:
    """
    One system. Operations are per token of a train sequence; milliseconds are medians; memory is what a step takes at
    its peak besides what was there before (weights, optimizer state, cache), in GiB; the ratios and the extra memory
    are against its yardstick. None where it did not fit into memory, or where the paper says nothing.
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
    train_gib_ratio: float | None = None
    prefill_32k_ms: float | None = None
    prefill_32k_ratio: float | None = None
    prefill_32k_extra_gib: float | None = None
    prefill_128k_ms: float | None = None
    prefill_128k_ratio: float | None = None
    prefill_128k_extra_gib: float | None = None
    decode_ms: float | None = None
    decode_ratio: float | None = None
    paper_train_ratio: float | None = None
    paper_prefill_128k_extra_gib: float | None = None


def train_step(model, work: Workload) -> Callable[[], None]:
    """Forward, loss, backward and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = tokens_for(model, work.train_batch, work.train)
    model.train()

    def step():
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prefill(model, work: Workload, length: int) -> Callable[[], None]:
    """A forward over a prompt, which fills a growing cache."""
    ids = tokens_for(model, 1, length)

    @torch.no_grad()
    def step():
        model(ids, use_cache=True, logits_to_keep=1)

    return step


def decode(model, work: Workload) -> Callable[[], None]:
    """One token on top of a cache, eagerly."""
    cache, last = DynamicCache(config=model.config), tokens_for(model, 1, 1)
    with torch.no_grad():
        model(tokens_for(model, 1, work.context), **{HOST_CACHE_NAME: cache}, logits_to_keep=1)

    @torch.no_grad()
    def step():
        model(last, **{HOST_CACHE_NAME: cache}, logits_to_keep=1)
        cache.crop(-1)

    return step


def tokens_for(model, batch: int, length: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (batch, length), device=models.DEVICE)


def measure_system(name: str, size: str) -> Row:
    """All numbers of one system. What does not fit into memory is left out."""
    system, work = SYSTEMS[name], WORKLOADS[size]
    model = models.build(system.model, size)
    found = cost(model.config, work.train)
    row = Row(
        *(name, size, found.parameters, found.added_parameters, found.flops),
        100 * found.extra_flops / (found.flops - found.extra_flops),
        found.state_bytes,
        paper_prefill_128k_extra_gib=system.paper_prefill,
    )
    if size in system.paper_train:
        row.paper_train_ratio = 1 + system.paper_train[size] / 100

    model.eval()
    rounds = {"warmup": 1, "repeats": work.repeats}
    if timing := fits(name, "decode", lambda: measure([decode(model, work)], warmup=2, repeats=6 * work.repeats)):
        row.decode_ms = timing.median
    for label, length in zip(("32k", "128k"), work.prompts, strict=True):
        options = rounds if label == "32k" else {"warmup": 1, "repeats": 2}
        step = prefill(model, work, length)
        if timing := fits(name, f"prefill_{label}", lambda step=step, options=options: measure([step], **options)):
            setattr(row, f"prefill_{label}_ms", timing.median)
            # the memory itself, until it is compared
            setattr(row, f"prefill_{label}_extra_gib", timing.peak_gib)
    if timing := fits(name, "train_step", lambda: measure([train_step(model, work)], warmup=2, repeats=work.repeats)):
        row.train_ms, row.train_gib = timing.median, timing.peak_gib
    return row


def fits(name: str, case: str, run: Callable):
    """The timing of a single step, or None, and a message, if there is too little memory for it."""
    try:
        (timing,) = run()
        return timing
    except torch.OutOfMemoryError:
        print(f"{name}: out of memory in {case}", flush=True)
        return None
    finally:
        gc.collect()


def compared(rows: list[Row]) -> list[Row]:
    """The rows with their ratios to their yardsticks, and with the memory that they take more than these."""
    firsts = {row.system: Row(**vars(row)) for row in rows}
    for row in rows:
        first = firsts[SYSTEMS[row.system].yardstick]
        for ratio, value in (
            ("train_ratio", "train_ms"),
            ("train_gib_ratio", "train_gib"),
            ("prefill_32k_ratio", "prefill_32k_ms"),
            ("prefill_128k_ratio", "prefill_128k_ms"),
            ("decode_ratio", "decode_ms"),
        ):
            if getattr(row, value) is not None and getattr(first, value):
                setattr(row, ratio, getattr(row, value) / getattr(first, value))
        for extra in ("prefill_32k_extra_gib", "prefill_128k_extra_gib"):
            if getattr(row, extra) is not None and getattr(first, extra) is not None:
                setattr(row, extra, getattr(row, extra) - getattr(first, extra))
    return rows


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
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    arguments = parser.parse_args(argv)
    size = arguments.size
    if size == "tiny":
        models.SIZES["tiny"] = models.qwen3(2, **TINY)
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
    # yardsticks first, whatever else is asked for
    names = dict.fromkeys(each for name in arguments.systems for each in (SYSTEMS[name].yardstick, name))
    measured = []
    for name in names:
        measured.append(measure_system(name, size))
        if torch.cuda.is_available():
            release_memory()
        rows = compared([Row(**vars(row)) for row in measured])
        print(", ".join(columns(rows[-1])), flush=True)
        # written after every system: a later one may not finish
        write_results(path, rows)
        path.with_suffix(".svg").write_text(plot(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
