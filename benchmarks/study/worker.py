# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
A process that trains one run after another: a line of JSON in for each, and one out.

What a run prints goes to stderr. After a run that failed the process ends, since a GPU may be in any state.
"""

import gc
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

from .corpus import load_corpus
from .training import Outcome, Paused, Run, Trainer


def train_run(
    run: Run,
    corpus_folder: Path,
    device: str,
    execution: str,
    deadline: float | None,
    checkpoints: Path | None,
    models: Path | None,
) -> Outcome:
    """One run from its start, or from its checkpoint, to its outcome; its model is saved into a folder of `models`."""
    began = time.monotonic()

    def report(message: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {run.label}: {message}", file=sys.stderr, flush=True)

    trainer = Trainer(run, load_corpus(corpus_folder), device, execution)
    checkpoint = None if checkpoints is None else checkpoints / f"{run.key}.pt"
    outcome = trainer.train(deadline=deadline, checkpoint=checkpoint, report=report)
    if models is not None:
        trainer.save_model(models / run.key, corpus_folder / "tokenizer.json")
    return outcome


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def answer(job: dict) -> dict:
    """The outcome, or why there is none, as what JSON can say."""
    run = Run.from_dict(job["run"])
    places = [None if job[name] is None else Path(job[name]) for name in ("corpus", "checkpoints", "models")]
    try:
        outcome = train_run(run, places[0], job["device"], job["execution"], job["deadline"], *places[1:])
        return {"outcome": asdict(outcome)}
    except Paused as paused:
        return {"paused": str(paused)}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    # the lines go where only they go, whatever prints
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        told = answer(json.loads(line))
        release()
        lines.write(json.dumps(told) + "\n")
        if "failed" in told:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
