# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`python -m benchmarks.lean --sizes 3b 1.5b` compares train steps with those of the stock model with liger-kernel, which
has to be installed: milliseconds, and the peak memory of a step besides weights and optimizer state.

Each row is measured in processes of its own, since liger-kernel changes a process, one after the other, in rounds. A
row is a name of the list that `--help` shows; `name@cudnn` and `name@flash` put that attention of PyTorch's first.
`--profile NAME` prints instead which kernels a step of one row spends its time in.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import depthmix
from depthmix.modeling import lean_loss

from . import models
from .efficiency import TINY
from .harness import DEVICE, environment, measure, write_results


@dataclass(frozen=True)
class System:
    """
    Args:
        model (`str`):
            Its name in `models.MODELS`.
        loss (`str`):
            How the loss is computed: from all logits, by `"liger"`, or by `"torch"` without them.
        yardstick (`str`):
            The row that it is compared with.
    """

    model: str
    loss: str = "logits"
    yardstick: str = "stock + Liger"


SYSTEMS = {
    "stock": System("stock Qwen3"),
    "stock + Liger": System("stock Qwen3", "liger"),
    "vanilla": System("fused vanilla"),
    "vanilla, lean": System("fused vanilla", "liger"),
    "Depth-Attention": System("Depth-Attention"),
    "Depth-Attention, lean": System("Depth-Attention", "liger"),
    "Depth-Attention with gates, lean": System("Depth-Attention, gates", "liger"),
    "Depth-Attention, lean by torch": System("Depth-Attention", "torch"),
    "AttnRes Block, lean": System("AttnRes", "liger"),
    "AttnRes Full, lean": System("AttnRes Full", "liger"),
    "DenseFormer, lean": System("DenseFormer", "liger"),
    "mHC, lean": System("mHC", "liger"),
    "stock OLMo2 + Liger": System("stock OLMo2", "liger", "stock OLMo2 + Liger"),
    "vanilla OLMo2, lean": System("fused OLMo2", "liger", "stock OLMo2 + Liger"),
    "MoDA, lean": System("MoDA row 4", "liger", "stock OLMo2 + Liger"),
    "MoDA on Qwen3, lean": System("MoDA on Qwen3", "liger"),
}
USUAL = ["stock", "stock + Liger", "Depth-Attention", "Depth-Attention, lean", "AttnRes Block, lean"]
ATTENTIONS = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}


@dataclass
class Row:
    """
    One system. Milliseconds are the median over the steps of all its processes, `low` and `high` the least and the
    largest median of a process; `gib` is the peak memory of a step besides what is held between steps, `held_gib`
    that. `loss` is that of the first step. Ratios are to the yardstick of the same run and size; None without it.
    """

    size: str
    system: str
    milliseconds: float
    low: float
    high: float
    gib: float
    held_gib: float
    loss: float
    processes: int
    ratio: float | None = None
    gib_ratio: float | None = None


def split(row: str) -> tuple[str, str | None]:
    """The system of a row, and the attention that comes first."""
    name, _, attention = row.partition("@")
    return name, attention or None


def first_attention(attention: str | None):
    return sdpa_kernel(ATTENTIONS[attention], set_priority=True) if attention else contextlib.nullcontext()


def prepare(row: str, size: str):
    """The step of a row, in this process."""
    name, attention = split(row)
    model, shape = models.build(SYSTEMS[name].model, size), models.SIZES[size]
    choose_loss(model, name)
    torch.manual_seed(1)
    step = models.train_step(model, shape.batch, shape.tokens)

    def with_attention():
        with first_attention(attention):
            return step()

    return with_attention


def choose_loss(model, name: str) -> None:
    """Gives a model of a system the loss of that system; for liger-kernel's this changes the whole process."""
    system = SYSTEMS[name]
    if system.loss == "torch":
        lean_loss.liger_function = lambda name: None
    elif system.loss == "liger" and lean_loss.liger_function("liger_fused_linear_cross_entropy") is None:
        raise RuntimeError(f"{name} needs liger-kernel, which is not installed.")
    if system.loss != "logits":
        if system.model.startswith("stock"):
            from transformers.integrations.liger import apply_liger_kernel

            apply_liger_kernel(model, None)
        else:
            depthmix.apply_liger_kernel(model)


def work(row: str, size: str, steps: int) -> dict:
    """What a process does: measures one row."""
    step = prepare(row, size)
    loss = step().item()
    timing = measure([step], warmup=2, repeats=steps)[0]
    held = torch.cuda.memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    return {"times": timing.times, "gib": timing.peak_gib, "held_gib": held, "loss": loss}


def start(row: str, size: str, steps: int) -> subprocess.Popen:
    """A process that has imported everything by the time that it is told to go."""
    command = [sys.executable, "-m", "benchmarks.lean", "--sizes", size, "--work", row, "--steps", str(steps)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def summary(row: str, size: str, found: list[dict]) -> Row:
    medians = [statistics.median(each["times"]) for each in found]
    return Row(
        *(size, row, statistics.median(t for each in found for t in each["times"]), min(medians), max(medians)),
        gib=max(each["gib"] for each in found),
        held_gib=found[0]["held_gib"],
        loss=found[0]["loss"],
        processes=len(found),
    )


def compared(rows: list[Row]) -> list[Row]:
    by_name = {(row.size, row.system): row for row in rows}
    result = []
    for row in rows:
        yardstick = by_name.get((row.size, SYSTEMS[split(row.system)[0]].yardstick))
        if yardstick is not None:
            # on a CPU no memory is measured
            gib_ratio = row.gib / yardstick.gib if yardstick.gib else None
            row = replace(row, ratio=row.milliseconds / yardstick.milliseconds, gib_ratio=gib_ratio)
        result.append(row)
    return result


def describe(row: Row) -> str:
    ratio = "" if row.ratio is None else f"  {row.ratio:.3f}x"
    ratio += "" if row.gib_ratio is None else f" {row.gib_ratio:.3f}x"
    return (
        f"{row.size:5} {row.system:32} {row.milliseconds:8.2f} ms ({row.low:.2f} to {row.high:.2f})"
        f" {row.gib:7.2f} GiB + {row.held_gib:.2f}  loss {row.loss:.4f}{ratio}"
    )


def profile(row: str, size: str, lines: int) -> None:
    """Prints the kernels of one step, those that take longest first, and how long the GPU had nothing to do."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    step = prepare(row, size)
    activity = ProfilerActivity.CUDA if DEVICE == "cuda" else ProfilerActivity.CPU
    for _ in range(3):
        step()
    wall = measure([step], warmup=0, repeats=3)[0].median
    with record(activities=[activity]) as found:
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    attribute = "self_device_time_total" if DEVICE == "cuda" else "self_cpu_time_total"
    kernels = sorted(found.key_averages(), key=lambda each: getattr(each, attribute), reverse=True)
    busy = sum(getattr(each, attribute) for each in kernels) / 1000
    print(f"{size} {row}: {wall:.2f} ms, of which kernels {busy:.2f} ms, in {sum(k.count for k in kernels)} launches")
    for each in kernels[:lines]:
        milliseconds = getattr(each, attribute) / 1000
        share = 100 * milliseconds / busy
        print(f"{milliseconds:9.3f} ms {share:5.1f} % {each.count:6}  {each.key[:150]}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lean", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=("3b", "1.5b", "tiny"), required=True)
    parser.add_argument("--rows", nargs="+", default=USUAL, help=f"usually {USUAL}; there are {list(SYSTEMS)}")
    parser.add_argument("--attention", choices=ATTENTIONS, help="adds, after each row, the same with this one first")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each row")
    parser.add_argument("--steps", type=int, default=8, help="steps that a process measures")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after these no further process is begun")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the CSV file")
    parser.add_argument("--name", default="lean", help="name of the CSV file")
    parser.add_argument("--profile", metavar="ROW", help="prints the kernels of this row")
    parser.add_argument("--lines", type=int, default=60, help="of a profile")
    parser.add_argument("--work", metavar="ROW", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    for row in (*arguments.rows, *filter(None, (arguments.profile, arguments.work))):
        name, attention = split(row)
        if name not in SYSTEMS or attention not in (None, *ATTENTIONS):
            parser.error(f"there is no row {row!r}")
    if "tiny" in arguments.sizes:
        models.SIZES["tiny"] = replace(models.qwen3(2, **TINY), tokens=32)
    if {*arguments.sizes} != {"tiny"} and DEVICE == "cpu":
        parser.error(f"--sizes {' '.join(arguments.sizes)} needs a GPU; tiny tries the command out")

    if arguments.work:
        sys.stdin.readline()
        print(json.dumps(work(arguments.work, arguments.sizes[0], arguments.steps)))
        return
    if arguments.profile:
        for size in arguments.sizes:
            profile(arguments.profile, size, arguments.lines)
        return

    start_time = time.monotonic()
    print(*(f"{name} {value}" for name, value in environment().items()), sep=", ", flush=True)
    rows = list(arguments.rows)
    if arguments.attention:
        rows = [each for row in rows for each in (row, f"{row}@{arguments.attention}")]
    cases = [(size, row) for size in arguments.sizes for row in rows]
    found: dict[tuple[str, str], list[dict]] = {case: [] for case in cases}
    failed: set[tuple[str, str]] = set()
    arguments.output.mkdir(parents=True, exist_ok=True)
    # the order is reversed each time, so that nobody always comes after the same neighbour
    tasks = [case for i in range(arguments.rounds) for case in cases[:: 1 if i % 2 == 0 else -1]]
    following = start(*tasks[0][::-1], arguments.steps)
    for i, (size, row) in enumerate(tasks):
        process = following
        if i + 1 < len(tasks):
            # it imports what it needs while this one measures
            following = start(*tasks[i + 1][::-1], arguments.steps)
        if (size, row) in failed or time.monotonic() - start_time > arguments.seconds:
            process.kill()
            process.wait()
            continue
        output, _ = process.communicate("go\n")
        if process.returncode:
            print(f"{size} {row}: failed; its error stands above", flush=True)
            failed.add((size, row))
            continue
        found[size, row].append(json.loads(output.splitlines()[-1]))
        measured = compared([summary(row, size, each) for (size, row), each in found.items() if each])
        print(describe(next(each for each in measured if (each.size, each.system) == (size, row))), flush=True)
        # written after every process: a later one may not finish
        write_results(arguments.output / f"{arguments.name}.csv", measured)
    print(f"\nall rounds, {time.monotonic() - start_time:.0f} s")
    for measured_row in compared([summary(row, size, each) for (size, row), each in found.items() if each]):
        print(describe(measured_row))
    missing = [f"{size} {row}" for (size, row), each in found.items() if not each]
    if missing:
        raise SystemExit(f"not measured: {', '.join(missing)}")


if __name__ == "__main__":
    main()
