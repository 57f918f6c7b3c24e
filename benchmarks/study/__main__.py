# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`python -m benchmarks.study --plan first_look --time-limit 540 --workers 2 --out FOLDER` trains what a plan lists and
is not finished yet. Each run is a line of FOLDER/runs.csv as soon as it ends.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.harness import environment

from .corpus import build_corpus, python_roots
from .plans import PLANS, expected_seconds, unique
from .plots import read_details, write_plots
from .records import Row, append_details, append_row, read_rows, row_of
from .report import summary
from .training import EXECUTIONS, Outcome, Run


HERE = Path(__file__).parent
COMMITTED = HERE.parent / "results" / "study"
# how much longer runs take together than one after another (26.9 ms of a step became 59.7)
SHARING = 1.1
# seconds that must be left for a run to be started that will not end in time and is kept
WORTH_A_START = 45


class Study:
    """
    The runs of a plan, dealt to worker processes until they are done or the time is up.

    A run is started if it is expected to end in time, or if it can be kept and there is time to get somewhere.
    """

    def __init__(self, arguments: argparse.Namespace, finished: list[Row], deadline: float | None):
        self.arguments, self.deadline = arguments, deadline
        self.finished, self.lock = finished, threading.Lock()
        done = {row.key for row in finished}
        self.waiting = [run for run in unique(PLANS[arguments.plan].runs(finished)) if run.key not in done]
        if arguments.systems:
            self.waiting = [run for run in self.waiting if run.system in arguments.systems]
        # those that run now: how long each takes alone, and when it was started
        self.running: dict[str, tuple[float, float]] = {}
        self.failed: list[str] = []
        self.left: list[str] = []
        self.out: Path = arguments.out
        self.corpus = arguments.cache / f"corpus-{self.waiting[0].vocab_size if self.waiting else 2048}"

    def next_run(self) -> Run | None:
        """The next one for which there is time, or `None`."""
        with self.lock:
            now = time.monotonic()
            for index, run in enumerate(self.waiting):
                expected = expected_seconds(run, self.finished)
                if self.deadline is None or self.has_time(expected, now):
                    self.running[run.key] = (expected, now)
                    return self.waiting.pop(index)
            return None

    def has_time(self, expected: float, now: float) -> bool:
        """
        Whether a run that takes so long alone ends before the deadline, sharing the GPU evenly with those that run
        now until they end; or, where it is kept, whether it is worth its start.
        """
        left = self.deadline - now
        if self.arguments.checkpoints is not None and left > WORTH_A_START:
            return True
        others = [max(0.0, alone - (now - since) / self.arguments.workers) for alone, since in self.running.values()]
        together = expected + sum(min(each, expected) for each in others)
        return 1.1 * together * (SHARING if any(others) else 1) + 5 < left

    def note(self, run: Run, told: dict) -> None:
        with self.lock:
            del self.running[run.key]
            if "outcome" in told:
                outcome = Outcome(**told["outcome"])
                row = row_of(run, outcome, self.checksum, self.arguments.workers, self.environment)
                append_row(self.out / "runs.csv", row)
                append_details(self.out / "details.jsonl", run, outcome)
                self.finished.append(row)
                print(
                    f"{run.label}: {row.loss:.4f} nats, {row.bits_per_byte:.4f} bits per byte, {row.step_ms:.2f} ms a "
                    f"step, {row.seconds:.0f} s",
                    flush=True,
                )
            elif "paused" in told:
                self.left.append(f"{run.label}: {told['paused']}")
                print(self.left[-1], flush=True)
            else:
                self.failed.append(f"{run.label}: {told['failed']}")
                print(f"FAILED {self.failed[-1]}", flush=True)

    def job(self, run: Run, execution: str) -> str:
        kept = {name: getattr(self.arguments, name) for name in ("checkpoints", "models")}
        return json.dumps(
            {
                "run": asdict(run),
                "corpus": str(self.corpus),
                **{name: None if folder is None else str(folder) for name, folder in kept.items()},
                "device": self.arguments.device,
                "execution": execution,
                "deadline": self.deadline,
            }
        )

    def work(self) -> None:
        """What one thread does: hands runs to a process of its own, and starts another where that has failed."""
        process = None
        while (run := self.next_run()) is not None:
            told = {"failed": "no answer"}
            for execution in self.executions():
                if process is None or process.poll() is not None:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "benchmarks.study.worker"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=self.log,
                        text=True,
                        cwd=HERE.parents[1],
                    )
                process.stdin.write(self.job(run, execution) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
                told = json.loads(line) if line else {"failed": f"the worker ended, see {self.out / 'log.txt'}"}
                if "failed" not in told:
                    break
                process.wait()
                print(f"{run.label}: not {execution}: {told['failed']}", flush=True)
            self.note(run, told)
        if process is not None:
            process.stdin.close()
            process.wait()

    def executions(self) -> list[str]:
        """Those to try. Left to choose, a run whose step cannot be recorded is trained without a recording."""
        if self.arguments.execution != "auto":
            return [self.arguments.execution]
        return ["eager"] if self.arguments.device == "cpu" else ["graph", "eager"]

    def run(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        if not self.waiting:
            print("All runs of the plan are finished.")
            return
        began = time.monotonic()
        roots = self.arguments.source or python_roots()
        corpus = build_corpus(self.corpus, roots, vocab_size=self.waiting[0].vocab_size)
        described = asdict(corpus.description)
        (self.out / "corpus.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        self.checksum = corpus.description.checksum
        # after the processes that built it: it starts CUDA
        self.environment = environment()
        print(
            f"Corpus {self.checksum}, {corpus.description.train_tokens / 1e6:.1f}M tokens to train on and "
            f"{corpus.description.held_out_tokens / 1e6:.2f}M held out, after {time.monotonic() - began:.0f} s.",
            flush=True,
        )
        del corpus
        with open(self.out / "log.txt", "a", encoding="utf-8") as self.log:
            threads = [threading.Thread(target=self.work) for _ in range(self.arguments.workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for run in self.waiting:
            self.left.append(f"{run.label}: not started")
        print(f"{len(self.left)} left.", *self.left, sep="\n  ")
        if self.failed:
            raise SystemExit("failed:\n  " + "\n  ".join(self.failed))


def list_plans(rows: list[Row]) -> None:
    """Every plan with its runs that are left and how long they are expected to take on a GPU of their own."""
    done = {row.key for row in rows}
    for name, plan in PLANS.items():
        runs = unique(plan.runs(rows))
        left = [run for run in runs if run.key not in done]
        seconds = sum(expected_seconds(run, rows) for run in left)
        print(f"{name}: {len(left)} of {len(runs)} runs left, about {seconds:.0f} s of a GPU. Decides {plan.decides}.")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    parser.add_argument("--plan", choices=PLANS, help="what to train")
    parser.add_argument("--list", action="store_true", help="the plans, what they decide and how long they take")
    parser.add_argument("--summary", action="store_true", help="tables of what has finished")
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="draw learning curves and depth weights of what has finished"
    )
    parser.add_argument("--systems", nargs="+", metavar="system", help="only these of the plan")
    parser.add_argument("--out", type=Path, default=Path("study_output"), help="folder for what comes out")
    parser.add_argument("--time-limit", type=float, help="seconds after which everything has ended")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--results", type=Path, default=COMMITTED, help="folder with CSV files of runs that are finished already"
    )
    parser.add_argument("--checkpoints", type=Path, help="folder to continue runs from that had to stop")
    parser.add_argument("--models", type=Path, help="folder for the trained models, in bf16, each with its tokenizer")
    parser.add_argument("--cache", type=Path, default=Path("study_cache"), help="folder for the tokenised corpus")
    parser.add_argument("--source", type=Path, nargs="+", help="folders of packages to read instead of this Python's")
    parser.add_argument("--execution", choices=("auto", *EXECUTIONS), default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    arguments = parser.parse_args(argv)
    if arguments.workers < 1:
        parser.error(f"--workers {arguments.workers}: must be at least 1.")
    rows = read_rows([*sorted(arguments.results.glob("*.csv")), *sorted(arguments.out.glob("runs.csv"))])
    if arguments.list:
        list_plans(rows)
        return
    if arguments.summary:
        print(summary(rows))
        return
    if arguments.plots is not None:
        details = read_details([*sorted(arguments.results.glob("*.jsonl")), *arguments.out.glob("details.jsonl")])
        try:
            print(*write_plots(arguments.plots, rows, details), sep="\n")
        except (ImportError, ValueError) as error:
            parser.error(str(error))
        return
    if arguments.plan is None:
        parser.error("one of --plan, --list, --summary and --plots is needed.")
    for name in ("out", "checkpoints", "models", "cache"):
        if (path := getattr(arguments, name)) is not None:
            setattr(arguments, name, path.resolve())
    # some seconds to end everything in
    deadline = None if arguments.time_limit is None else began + arguments.time_limit - 8
    Study(arguments, rows, deadline).run()


if __name__ == "__main__":
    main()
