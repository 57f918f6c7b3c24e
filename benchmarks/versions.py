# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`python -m benchmarks.versions FOLDER` compares this checkout with another one, of an earlier version, in one run.

Processes of both versions hold the same model and take turns at measuring it, so that drift of the machine affects
them equally. There are several of each, since what differs between processes of one version is no difference between
versions.
"""

import argparse
import configparser
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]

# name -> what is measured: the kind, and how many layers at most, if not all
KINDS = {
    "train_step": {},
    "decode_eager_batch_1_16_layers": {"layers": 16},
    "decode_compiled_batch_1_16_layers": {"layers": 16, "compiled": True},
}


@dataclass
class Comparison:
    """
    One model in both versions. Milliseconds are medians over all processes of a version, `low` the fastest step of
    any; `ratio` is after to before, with the least and the largest ratio of a round; `noise` is the ratio of two
    processes of the same version, the one that is furthest from 1. `gib` is the peak memory of a step.
    """

    case: str
    size: str
    model: str
    before: float
    after: float
    ratio: float
    ratio_low: float
    ratio_high: float
    noise: float
    before_low: float
    after_low: float
    before_gib: float
    after_gib: float


def link_packages(checkout: Path, folder: Path) -> None:
    """Makes a folder from which the packages of a checkout are imported, whatever is installed."""
    setup = configparser.ConfigParser()
    setup.read(checkout / "setup.cfg")
    for line in setup["options"]["package_dir"].strip().splitlines():
        package, source = (part.strip() for part in line.split("="))
        target = folder.joinpath(*package.split("."))
        if "." in package:
            target.symlink_to(checkout / source)
            continue
        target.mkdir(parents=True)
        for file in (checkout / source).iterdir():
            (target / file.name).symlink_to(file)
    (folder / "benchmarks").symlink_to(checkout / "benchmarks")


class Worker:
    """A process that measures one version, and does as it is told, a line of JSON at a time."""

    def __init__(self, checkout: Path, folder: Path):
        if not folder.exists():
            link_packages(checkout.resolve(), folder)
        # without -P the modules beside this file would be found, and not as a package
        command = [sys.executable, "-P", __file__, "--work", str(folder)]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, order: str, **arguments) -> None:
        self.process.stdin.write(json.dumps([order, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("A process of this comparison ended early; its error stands above.")
        answer = json.loads(line)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def ask(self, order: str, **arguments):
        self.tell(order, **arguments)
        return self.answer()


def work(folder: str) -> None:
    """What a process does: orders come on the standard input, answers leave by what was the standard output."""
    answers = os.fdopen(os.dup(1), "w")
    # what libraries print must not come between the answers
    os.dup2(2, 1)
    import torch

    import depthmix
    from benchmarks import harness, models

    if not Path(depthmix.__file__).is_relative_to(folder):
        raise RuntimeError(f"depthmix is imported from {depthmix.__file__}, not from {folder}.")
    step = None

    def prepare(kind: str, size: str, model: str, layers: int | None = None, compiled: bool = False) -> None:
        nonlocal step
        step = None
        harness.release_memory()
        shape = models.SIZES[size]
        fields = {} if layers is None else {"num_hidden_layers": min(layers, shape.fields["num_hidden_layers"])}
        built = models.build(model, size, **fields)
        if kind == "train_step":
            # compiles the kernels while others do so too; whole steps of all processes at once would not fit
            ids = models.token_ids(built.train(), 1, shape.tokens)
            built(ids, labels=ids, use_cache=False).loss.backward()
            built.zero_grad()
            step = models.train_step(built, shape.batch, shape.tokens)
        else:
            step = models.decode(built, batch=1, context=min(2048, 16 * shape.tokens), compiled=compiled)
            for _ in range(8):
                step()
        if harness.DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def measure(warmup: int, repeats: int) -> tuple[list[float], float]:
        timing = harness.measure([step], warmup=warmup, repeats=repeats)[0]
        # the memory belongs to whichever process has its turn
        if harness.DEVICE == "cuda":
            torch.cuda.empty_cache()
        return timing.times, timing.peak_gib

    orders = {"prepare": prepare, "measure": measure}
    for line in sys.stdin:
        order, arguments = json.loads(line)
        try:
            answer = orders[order](**arguments)
        except Exception:
            step, answer = None, traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)


def compare(workers: dict[str, list[Worker]], case: str, size: str, model: str, rounds: int) -> Comparison:
    everyone = [worker for pair in zip(*workers.values(), strict=True) for worker in pair]
    kind = "train_step" if case == "train_step" else "decode"
    for worker in everyone:
        worker.tell("prepare", kind=kind, size=size, model=model, **KINDS[case])
    for answer in [worker.answer for worker in everyone]:
        answer()
    repeats = {"warmup": 1, "repeats": 3} if kind == "train_step" else {"warmup": 5, "repeats": 25}
    for worker in everyone:
        worker.ask("measure", **repeats | {"repeats": 1})
    times = {worker: [] for worker in everyone}
    peaks = dict.fromkeys(everyone, 0.0)
    for i in range(rounds):
        # the order is reversed each time, so that nobody always comes after the same neighbour
        for worker in everyone[:: 1 if i % 2 == 0 else -1]:
            measured, peak = worker.ask("measure", **repeats)
            times[worker].append(measured)
            peaks[worker] = max(peaks[worker], peak)

    def flat(version: str) -> list[float]:
        return [t for worker in workers[version] for measured in times[worker] for t in measured]

    def median_of_round(version: str, i: int) -> float:
        return statistics.median(t for worker in workers[version] for t in times[worker][i])

    before, after = flat("before"), flat("after")
    ratios = [median_of_round("after", i) / median_of_round("before", i) for i in range(rounds)]
    medians = {worker: statistics.median(t for measured in times[worker] for t in measured) for worker in everyone}
    noises = [medians[w] / medians[version[0]] for version in workers.values() for w in version[1:]]
    return Comparison(
        *(case, size, model, statistics.median(before), statistics.median(after)),
        ratio=statistics.median(after) / statistics.median(before),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        noise=max(noises, key=lambda ratio: abs(ratio - 1), default=1.0),
        before_low=min(before),
        after_low=min(after),
        before_gib=max(peaks[worker] for worker in workers["before"]),
        after_gib=max(peaks[worker] for worker in workers["after"]),
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__.strip().splitlines()[0])
    parser.add_argument("before", type=Path, help="checkout of the other version")
    parser.add_argument(
        "cases", nargs="+", metavar="case:size:model", help=f"such as train_step:3b:AttnRes; cases: {', '.join(KINDS)}"
    )
    parser.add_argument("--rounds", type=int, default=6, help="how often each process has its turn")
    parser.add_argument("--processes", type=int, default=2, help="of each version")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after these no further case is begun")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the CSV file")
    parser.add_argument("--name", default="versions", help="name of the CSV file")
    arguments = parser.parse_args(argv)
    cases = [case.split(":") for case in arguments.cases]
    if not (arguments.before / "setup.cfg").exists():
        parser.error(f"{arguments.before} is no checkout: it has no setup.cfg")

    # two sequences of warming up and at most eight rounds fit into the cache of a compiled decoding
    if not 1 <= arguments.rounds <= 8:
        parser.error(f"--rounds {arguments.rounds}: it must be from 1 to 8, as decoding fills a cache of fixed size")

    # a process that measures imports them from its own version
    from .harness import environment, write_results
    from .models import MODELS, SIZES

    for case in cases:
        if len(case) != 3 or any(part not in known for part, known in zip(case, (KINDS, SIZES, MODELS), strict=True)):
            parser.error(f"no such case: {':'.join(case)}")
    start = time.monotonic()
    print(*(f"{name} {value}" for name, value in environment().items()), sep=", ", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    comparisons, left_out, failed = [], [], False
    with tempfile.TemporaryDirectory() as folder:
        checkouts = {"before": arguments.before, "after": ROOT}
        workers = {
            version: [Worker(checkout, Path(folder) / version) for _ in range(arguments.processes)]
            for version, checkout in checkouts.items()
        }
        try:
            for case in cases:
                begun = time.monotonic() - start
                # after a failure an answer may still be under way, and would be taken for another
                if begun > arguments.seconds or failed:
                    left_out.append(f"{':'.join(case)} (not begun)")
                    continue
                try:
                    c = compare(workers, *case, arguments.rounds)
                except RuntimeError as error:
                    print(error, flush=True)
                    left_out.append(f"{':'.join(case)} (failed)")
                    failed = True
                    continue
                comparisons.append(c)
                ended = time.monotonic() - start
                print(
                    f"{c.case:34} {c.size:5} {c.model:16} {c.before:9.3f} -> {c.after:9.3f} ms {c.ratio:7.4f}x"
                    f" ({c.ratio_low:.4f} to {c.ratio_high:.4f}, noise {c.noise:.4f},"
                    f" fastest {c.before_low:.3f} -> {c.after_low:.3f})"
                    f"  {c.before_gib:.2f} -> {c.after_gib:.2f} GiB  [{begun:.0f} to {ended:.0f} s]",
                    flush=True,
                )
                # written after every number: a later case may not finish
                write_results(arguments.output / f"{arguments.name}.csv", comparisons)
        finally:
            for version in workers.values():
                for worker in version:
                    worker.process.kill()
                    worker.process.wait()
    if left_out:
        raise SystemExit(f"not measured: {', '.join(left_out)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    else:
        main()
