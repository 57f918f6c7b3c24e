# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`python -m examples.retrofit --out FOLDER` pretrains a small vanilla model and continues it in all ways of `arms.py`.

Each seed has a pretrained model and a data order of its own. A trial is a line of FOLDER/retrofit.csv as soon as it
ends; what is there is not repeated, so that a run which was stopped can be started again.
"""

import argparse
import multiprocessing
import statistics
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import fields, replace
from pathlib import Path

import torch

from benchmarks.harness import environment
from benchmarks.study.corpus import build_corpus, python_roots
from benchmarks.study.records import append_json, append_row, read_rows
from benchmarks.study.systems import SHAPES
from benchmarks.study.training import Recipe, Run

from .arms import ARMS, Trial, trials
from .continuation import CONTINUATION, PRETRAINING, Row, pretrain, read_record, train
from .report import summary, write_plots


# seconds that a trial is expected to take before one has ended
FIRST_GUESS = 60.0


class Experiment:
    """The trials that are left, dealt to worker processes until they are done or the time is up."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.out = arguments, arguments.out
        self.deadline = None if arguments.time_limit is None else time.monotonic() + arguments.time_limit
        self.rows_file, self.details_file = self.out / "retrofit.csv", self.out / "retrofit.jsonl"
        self.failed: dict[str, str] = {}

    def run_of(self, system: str, recipe: Recipe, seed: int) -> Run:
        arguments = self.arguments
        recipe = replace(recipe, batch=arguments.batch, length=arguments.length)
        return Run(system, arguments.shape, recipe, seed, arguments.vocab_size)

    def rows(self) -> list[Row]:
        return read_rows([self.rows_file] if self.rows_file.exists() else [], Row)

    def left(self, rows: list[Row]) -> list[Trial]:
        done = {row.key for row in rows} | self.failed.keys()
        arms = [arm for arm in ARMS if not self.arguments.arms or arm.name in self.arguments.arms]
        return [trial for trial in trials(arms, self.arguments.seeds, rows) if trial.key not in done]

    def has_time(self, rows: list[Row]) -> bool:
        expected = statistics.median([row.seconds for row in rows] or [FIRST_GUESS])
        return self.deadline is None or time.monotonic() + 1.3 * expected < self.deadline

    def execution(self) -> str:
        return "eager" if self.arguments.device == "cpu" else "graph"

    def prepare(self) -> None:
        """The corpus, in the cache if it is not there already."""
        arguments = self.arguments
        self.corpus = arguments.cache / f"corpus-{arguments.vocab_size}"
        built = build_corpus(self.corpus, arguments.source or python_roots(), vocab_size=arguments.vocab_size)
        self.checksum = built.description.checksum

    def submit(self, pool: ProcessPoolExecutor, trial: Trial) -> Future:
        """Starts a trial, after the pretraining of its seed if that is still to do."""
        pretraining = self.run_of("vanilla", replace(PRETRAINING, tokens=self.arguments.base_tokens), trial.seed)
        base = self.out / f"base_{trial.seed}"
        where = self.corpus, base, self.arguments.device, self.execution()
        record = read_record(base)
        if record is None:
            pool.submit(pretrain, pretraining, *where).result()
            print(f"pretrained, seed {trial.seed}: {read_record(base)['loss']:.4f} nats", flush=True)
        elif record["key"] != pretraining.key:
            raise SystemExit(f"{base} was pretrained with other settings; give another --out, or remove it.")
        run = self.run_of(trial.arm.name, replace(CONTINUATION, tokens=self.arguments.tokens), trial.seed)
        return pool.submit(train, trial, run, pretraining, *where)

    def note(self, trial: Trial, future: Future) -> None:
        try:
            told = future.result()
        except Exception as error:
            traceback.print_exc()
            self.failed[trial.key] = f"{type(error).__name__}: {error}"
            print(f"FAILED {trial.key}: {error}", flush=True)
            return
        values = told["values"] | {"workers": self.arguments.workers, "corpus": self.checksum} | environment()
        row = Row(**{each.name: values[each.name] for each in fields(Row)})
        append_row(self.rows_file, row)
        append_json(self.details_file, told["details"])
        print(f"{row.key}: {row.loss_at_start:.4f} -> {row.loss:.4f}, {row.seconds:.0f} s", flush=True)

    def run(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        running: dict[Future, Trial] = {}
        self.prepare()
        with ProcessPoolExecutor(self.arguments.workers, mp_context=context) as pool:
            while True:
                rows = self.rows()
                busy = {trial.key for trial in running.values()}
                for trial in self.left(rows):
                    if len(running) < self.arguments.workers and trial.key not in busy and self.has_time(rows):
                        running[self.submit(pool, trial)] = trial
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    self.note(running.pop(future), future)
        left = self.left(self.rows())
        print(summary(self.rows()))
        print(f"{len(left)} trials left.", *(trial.key for trial in left), sep="\n  ")
        if self.failed:
            raise SystemExit("failed:\n  " + "\n  ".join(f"{key}: {why}" for key, why in self.failed.items()))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.retrofit", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pretrained model and the results")
    parser.add_argument("--summary", action="store_true", help="only print the table of what has finished")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="only draw what has finished, with matplotlib")
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], help="only these")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="all rates are tried with the first")
    parser.add_argument("--shape", choices=SHAPES, default="5m")
    parser.add_argument("--base-tokens", type=int, default=PRETRAINING.tokens, help="to pretrain on")
    parser.add_argument("--tokens", type=int, default=CONTINUATION.tokens, help="to continue on")
    parser.add_argument("--batch", type=int, default=PRETRAINING.batch, help="sequences in a step")
    parser.add_argument("--length", type=int, default=PRETRAINING.length, help="tokens in a sequence")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=1, help="trials at a time")
    parser.add_argument("--time-limit", type=float, help="seconds after which no trial runs any more, about")
    parser.add_argument("--cache", type=Path, default=Path("study_cache"), help="folder for the tokenised corpus")
    parser.add_argument("--source", type=Path, nargs="+", help="folders of packages to read instead of this Python's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    if arguments.workers < 1:
        parser.error(f"--workers {arguments.workers}: must be at least 1.")
    experiment = Experiment(arguments)
    if arguments.summary:
        print(summary(experiment.rows()))
    elif arguments.plots is not None:
        print(*write_plots(arguments.plots, experiment.rows(), experiment.details_file), sep="\n")
    else:
        experiment.run()


if __name__ == "__main__":
    main()
