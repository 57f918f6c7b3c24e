# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What every benchmark needs: timing, and records of what was measured where."""

import csv
import datetime
import gc
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import transformers

import depthmix


# numbers of a CPU mean little; it serves to see that a benchmark runs
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Measurement:
    """
    One number. `ratio` compares with the yardstick of the same case, which is measured in the same run; `low` and
    `high` are the fastest and slowest repetition. `gib` is, for a model, the peak memory of a step besides what is
    held between steps (weights, optimizer state, the cache that decoding starts from); for an attention with its
    gradients, the peak memory besides its inputs; for another operation, what it has to read and write.
    """

    case: str
    size: str
    model: str
    milliseconds: float
    low: float
    high: float
    gib: float
    ratio: float = 1.0


@dataclass
class Timing:
    """Milliseconds of the repetitions of a step, and the peak GiB that it adds to what is allocated before."""

    times: list[float]
    peak_gib: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def measure(steps: list[Callable[[], object]], *, warmup: int = 3, repeats: int = 7) -> list[Timing]:
    """Times the steps in turn, round after round, so that drift of the machine affects them equally."""
    for step in steps:
        for _ in range(warmup):
            step()
    timings = [Timing([]) for _ in steps]
    if DEVICE == "cpu":
        for _ in range(repeats):
            for step, timing in zip(steps, timings, strict=True):
                start = time.perf_counter()
                step()
                timing.times.append(1000 * (time.perf_counter() - start))
        return timings
    for _ in range(repeats):
        for step, timing in zip(steps, timings, strict=True):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            timing.times.append(start.elapsed_time(end))
            timing.peak_gib = max(timing.peak_gib, (torch.cuda.max_memory_allocated() - before) / 2**30)
    return timings


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a graph, in which the host's time to launch it plays no part."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def release_memory() -> None:
    """Gives back what is deleted, so that the next model, or the next step, starts from the same state."""
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()


def environment() -> dict[str, str]:
    """Versions and machine, recorded with the numbers."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else "none",
        "depthmix": depthmix.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def write_results(path: Path, measurements: list) -> None:
    """Writes dataclasses of one kind to a CSV file whose first lines, marked by `#`, are the environment."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in environment().items())
        writer = csv.DictWriter(file, [field.name for field in fields(measurements[0])], lineterminator="\n")
        writer.writeheader()
        for measurement in measurements:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(measurement).items()})


def read_results(path: Path, kind: type) -> list:
    """What `write_results` wrote of this kind, if it was in the same environment, on whatever day; else nothing."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    written = dict(line.removeprefix("# ").split(": ", 1) for line in lines if line.startswith("#"))
    records = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    types = {field.name: field.type for field in fields(kind)}
    same_machine = written | {"date": ""} == environment() | {"date": ""}
    if not same_machine or any(record.keys() != types.keys() for record in records):
        print(f"{path} is of another environment or version, and is replaced.", flush=True)
        return []

    def parsed(name, text):
        # what is no such type is a number that may be None, which is written as nothing
        return types[name](text) if types[name] in (str, int, float) else float(text) if text else None

    return [kind(**{name: parsed(name, text) for name, text in record.items()}) for record in records]
