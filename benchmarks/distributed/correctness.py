# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Loss and gradients of every family in every arrangement, beside those of one process, with tiny models."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from transformers.utils import logging

from depthmix.families import FAMILIES
from depthmix.kernels.depth_dispatch import INTERPRETED

from ..harness import DEVICE, write_results
from .processes import BACKEND, launch, reason_of, save_once


import family_models  # isort: skip
import pipeline_worker  # isort: skip
import two_process_worker as checks  # isort: skip


# those of `depthmix.pipeline`, and the stages of a rank
SCHEDULES = {"pipeline, 1F1B": ("Schedule1F1B", 1), "pipeline, interleaved": ("ScheduleInterleaved1F1B", 2)}
# models compute it in fp32, in which it has steps of 5e-7
LOSS_LIMIT = 1e-5
# each embeds and predicts in stages of its own, and no stage has the router logits of all layers
STAGED = {"tie_word_embeddings": False, "output_router_logits": False}


@dataclass
class Check:
    """
    Differences from one process: of the loss, and of a parameter's gradient relative to its norm, each the largest
    of all processes, and the limit for that of gradients. None where something failed, which the verdict says.
    """

    family: str
    arrangement: str
    ranks: int
    backend: str
    loss: float | None
    gradients: float | None
    limit: float
    verdict: str


def limit_of(family: str, arrangement: str) -> float:
    """
    For gradients. Models are in fp64, but for kernels, which are compared in fp32, and the recurrence of Kimi Linear,
    which has its gradients in fp32; in two dimensions the final norm is a unit of its own, and so computes in fp32.
    """
    if "kernels" in arrangement or FAMILIES[family].backbone.model_type == "kimi_linear":
        return 1e-4
    return 1e-5 if " x " in arrangement else 1e-10


def arrangements(family: str, ranks: int) -> list[str]:
    """Those that there are for a family; the models have four layers."""
    found = ["DDP", "FSDP2", "FSDP2, checkpointing"]
    if DEVICE == "cuda" or INTERPRETED:
        found.append("FSDP2, kernels")
    found.append("tensor parallel" if ranks == 2 else "FSDP2 x tensor parallel")
    if FAMILIES[family].method in ("depth_attention", "attnres"):
        found += [name for name, (_, stages) in SCHEDULES.items() if stages * ranks <= 4]
    return found


def measured(family: str, arrangement: str, place: Path) -> dict[str, float]:
    """The errors that this process finds."""
    pair, staged = FAMILIES[family], arrangement in SCHEDULES
    folder = place / f"{family}{'_staged' if staged else ''}"
    # an even vocabulary, since tensor parallelism splits the head
    fields = family_models.AWAKE_FIELDS[pair.method] | {"vocab_size": 98} | (STAGED if staged else {})
    save_once(lambda: family_models.wake(family_models.new_model(pair, **fields)), folder)
    if staged:
        schedule, stages = SCHEDULES[arrangement]
        checkpoint = place / f"{family}_{schedule}"
        return pipeline_worker.run(folder, schedule, stages * dist.get_world_size(), True, checkpoint)
    ids = torch.randint(3, 98, (2 * dist.get_world_size(), 12), generator=torch.Generator().manual_seed(1))
    ids = ids.to(checks.device())
    match arrangement:
        case "DDP":
            return checks.ddp(folder, ids, "plain")
        case "FSDP2":
            return checks.fsdp(folder, ids, "plain")
        case "FSDP2, checkpointing":
            return checks.fsdp(folder, ids, "non_reentrant")
        case "FSDP2, kernels":
            return checks.kernels(folder, ids)
        case "tensor parallel":
            return checks.tensor_parallel(folder, ids)
    return checks.two_dimensions(folder, ids)


def run_cases(cases: list[tuple[str, str]], place: Path) -> None:
    """What each process does; the first one writes a line for each case that is done."""
    logging.disable_progress_bar()
    if DEVICE == "cpu":
        checks.do_repeated_work_once()
    for family, arrangement in cases:
        found: list = [None] * dist.get_world_size()
        dist.all_gather_object(found, measured(family, arrangement, place))
        if dist.get_rank() == 0:
            # of a pipeline only the last stage has a loss
            loss, gradients = (max(each[key] for each in found if key in each) for key in ("loss", "gradients"))
            limit = limit_of(family, arrangement)
            verdict = "equal" if loss <= LOSS_LIMIT and gradients <= limit else "differs"
            check = Check(family, arrangement, len(found), BACKEND, loss, gradients, limit, verdict)
            print(describe(check), flush=True)
            with open(place / "done.jsonl", "a") as file:
                file.write(json.dumps(vars(check)) + "\n")


def describe(check: Check) -> str:
    numbers = (f"{value:9.1e}" if value is not None else "        -" for value in (check.loss, check.gradients))
    return f"{check.family:26} {check.arrangement:24} {' '.join(numbers)}  {check.verdict}"


def correctness(families: list[str], ranks: int, output: Path) -> bool:
    """Prints the table and writes it as a CSV file; whether all are equal."""
    print(f"{'':26} {f'{ranks} processes, {BACKEND}':24} {'loss':>9} gradients", flush=True)
    rest = [(family, arrangement) for family in families for arrangement in arrangements(family, ranks)]
    rows: list[Check] = []
    with tempfile.TemporaryDirectory() as place:
        # what keeps the processes from meeting at all is no verdict on a family
        launch(run_cases, ranks, [], Path(place))
        while rest:
            done, failure = Path(place, "done.jsonl"), None
            done.unlink(missing_ok=True)
            try:
                launch(run_cases, ranks, rest, Path(place))
            except ChildFailedError as error:
                failure = reason_of(error)
            lines = done.read_text().splitlines() if done.exists() else []
            rows += [Check(**json.loads(line)) for line in lines]
            rest = rest[len(lines) :]
            if failure is not None and rest:
                case = rest.pop(0)
                rows.append(Check(*case, ranks, BACKEND, None, None, limit_of(*case), f"failed: {failure}"))
                print(describe(rows[-1]), flush=True)
            write_results(output / "distributed_correctness.csv", rows)
    wrong = [row for row in rows if row.verdict != "equal"]
    print(f"{len(rows) - len(wrong)} of {len(rows)} are equal to one process")
    for row in wrong:
        print(describe(row))
    return not wrong
