# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Train steps and decoding on several GPUs beside one, and the bytes that stages of a pipeline send."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import schedules
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from depthmix.pipeline import next_token_loss, pipeline_stages

from .. import lean, models
from ..harness import DEVICE, measure, write_results
from .processes import launch, reason_of, save_once


from two_process_worker import shard  # isort: skip


# rows of `lean.SYSTEMS`, all with the shape of Qwen3; on a CPU liger-kernel's kernels do not run, and the lean models
# of this package compute the same loss in PyTorch
LIGER = "stock + Liger"
TRAINED = ("stock", *((LIGER,) if DEVICE == "cuda" else ()))
TRAINED += ("Depth-Attention, lean", "AttnRes Block, lean", "MoDA on Qwen3, lean")
# of `models.MODELS`
DECODED = ("stock Qwen3", "Depth-Attention", "AttnRes", "MoDA on Qwen3")
PIPELINED = ("Depth-Attention", "AttnRes", "AttnRes Full")
# by how much less of several GPUs may be used than with the stock model
GOAL, GOALS = 0.02, ("train, FSDP2", "train, FSDP2 x TP")


@dataclass
class Speed:
    """
    Tokens per second of all GPUs together, by the median step of the slowest, and the peak memory of a step of one in
    GiB besides what is held between steps. The efficiency is that speed against so many times the speed of one GPU;
    the difference is to the efficiency of the yardstick. None where there is nothing to compare with.
    """

    case: str
    size: str
    system: str
    ranks: int
    tokens_per_second: float
    gib: float
    yardstick: str
    efficiency: float | None = None
    difference: float | None = None
    goal: str = ""


@dataclass
class Hop:
    """
    Bytes that a stage hands over for the next in one train step, and the next one, as gradients, for it, beside what
    the design says of either.
    """

    size: str
    system: str
    schedule: str
    ranks: int
    hop: int
    items: int
    forward: int
    backward: int
    design: int
    verdict: str


def compared(rows: list[Speed]) -> list[Speed]:
    """The rows with their efficiency, beside that of the yardstick in the same case."""
    one = {(row.case, row.size, row.system): row.tokens_per_second for row in rows if row.ranks == 1}

    def efficiency(row: Speed) -> float | None:
        # in two dimensions as in one, a GPU alone has the whole model
        single = one.get((row.case.removesuffix(" x TP"), row.size, row.system))
        return row.tokens_per_second / (row.ranks * single) if single else None

    found = {(row.case, row.size, row.system, row.ranks): efficiency(row) for row in rows}
    result = []
    for row in rows:
        own = found[row.case, row.size, row.system, row.ranks]
        other = found.get((row.case, row.size, row.yardstick, row.ranks))
        has_other = own is not None and other is not None and row.ranks > 1 and row.yardstick != row.system
        difference = own - other if has_other else None
        goal = "" if difference is None or row.case not in GOALS else "met" if difference >= -GOAL else "missed"
        result.append(replace(row, efficiency=own, difference=difference, goal=goal))
    return result


def timed(step: Callable, rows: int, tokens: int, **options) -> tuple[float, float]:
    """Tokens per second of so many rows, which processes work on together, and GiB."""
    timing = measure([step], **options)[0]
    slowest = torch.tensor([timing.median, timing.peak_gib], device=DEVICE)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    milliseconds, gib = slowest.tolist()
    return 1000 * rows * tokens / milliseconds, gib


def load(name: str, size: str, folder: Path, dtype: torch.dtype, **split):
    """The model, which is saved before, since only what is loaded is split."""
    logging.disable_progress_bar()
    save_once(lambda: models.build(name, size), folder)
    options = {"distributed_config": DistributedConfig(**split)} if split else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).to(DEVICE)


def train(name: str, size: str, folder: Path, steps: int, tensor_parallel: int = 1) -> tuple[float, float]:
    """Weights in fp32 and arithmetic in bf16, by a policy of FSDP2, which a GPU alone has as well."""
    shape, groups = models.SIZES[size], dist.get_world_size() // tensor_parallel
    if tensor_parallel == 1:
        model = models.build(lean.SYSTEMS[name].model, size).float()
        lean.choose_loss(model, name)
        model = shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    else:
        split = {"tp_size": tensor_parallel, "fsdp_size": groups, "fsdp_mixed_precision": True}
        model = load(lean.SYSTEMS[name].model, size, folder, torch.float32, **split)
        lean.choose_loss(model, name)
    # rows of its own for each group that has the whole model
    torch.manual_seed(1 + dist.get_rank() // tensor_parallel)
    step = models.train_step(model, shape.batch, shape.tokens)
    return timed(step, groups * shape.batch, shape.tokens, warmup=2, repeats=steps)


def decode(name: str, size: str, folder: Path, batch: int) -> tuple[float, float]:
    """One token for each row, eager; with several processes each has a part of the heads."""
    ranks = dist.get_world_size()
    model = load(name, size, folder, torch.bfloat16, **({"tp_size": ranks} if ranks > 1 else {}))
    # the same rows on all
    torch.manual_seed(1)
    return timed(models.decode(model, batch, 2048 if size != "tiny" else 32), batch, 1, warmup=8, repeats=31)


def counted(ops: Callable, counts: dict[int, int], stage: int, chunk: int) -> list[dist.P2POp]:
    """What a stage hands to NCCL or gloo for a microbatch, whose bytes are added to its count."""
    found = ops(chunk)
    counts[stage] += sum(op.tensor.nbytes for op in found)
    return found


def count_sent(name: str, size: str, schedule_name: str, per_rank: int) -> list[Hop]:
    """The hops from the stages of this process, in one train step of a row for each microbatch."""
    ranks = dist.get_world_size()
    model = models.build(name, size).train()
    config, tokens, rows = model.config, models.SIZES[size].tokens, 2 * ranks
    stages = pipeline_stages(model, per_rank * ranks, DEVICE)
    plan, sent = stages[0].part.plan, {"fwd": {}, "bwd": {}}
    for stage in stages:
        for direction, counts in sent.items():
            counts[stage.stage_index] = 0
            name_of_ops = f"get_{direction}_send_ops"
            setattr(stage, name_of_ops, partial(counted, getattr(stage, name_of_ops), counts, stage.stage_index))
    schedule_class = getattr(schedules, schedule_name)
    is_single = issubclass(schedule_class, schedules.PipelineScheduleSingle)
    schedule = schedule_class(stages[0] if is_single else stages, n_microbatches=rows, loss_fn=next_token_loss)
    torch.manual_seed(1)
    ids = models.token_ids(model, rows, tokens)
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    schedule.step(*([ids] if is_first else []), **({"target": ids} if is_last else {}))

    # numbers per token, as docs/pipeline.md has them
    item = 2 * config.num_key_value_heads * config.head_dim if name == "Depth-Attention" else config.hidden_size
    everyone: list = [None] * ranks
    dist.all_gather_object(everyone, sent)
    forward, backward = ({k: v for each in everyone for k, v in each[way].items()} for way in ("fwd", "bwd"))
    hops = []
    for hop in range(plan.num_stages - 1):
        items = len(plan.sent(hop))
        design = rows * tokens * (config.hidden_size + items * item) * torch.bfloat16.itemsize
        # gradients come back from the stage after
        both = forward[hop], backward[hop + 1]
        verdict = "equal" if both == (design, design) else "differs"
        hops.append(Hop(size, name, schedule_name, ranks, hop, items, *both, design, verdict))
    return hops


def cases(ranks: int, steps: int) -> list[tuple[str, str, str, int, Callable]]:
    """Case, system, its yardstick, processes, and what each of them does with a size and a folder."""
    found = []
    for name in TRAINED:
        yardstick = LIGER if LIGER in TRAINED and name != "stock" else "stock"
        for n in (1, ranks):
            found.append(("train, FSDP2", name, yardstick, n, partial(train, name, steps=steps)))
        # of the stock model's heads with liger-kernel none can be in parts
        if ranks >= 4 and name != LIGER:
            work = partial(train, name, steps=steps, tensor_parallel=2)
            found.append(("train, FSDP2 x TP", name, "stock", ranks, work))
    for name in DECODED:
        for batch in (1, 32):
            for n in (1, 2):
                found.append((f"decode {batch}, TP", name, DECODED[0], n, partial(decode, name, batch=batch)))
    return found


def describe(row: Speed) -> str:
    efficiency = "" if row.efficiency is None or row.ranks == 1 else f"  efficiency {row.efficiency:.3f}"
    difference = "" if row.difference is None else f"  {row.difference:+.3f} to {row.yardstick} {row.goal}"
    return (
        f"{row.case:18} {row.size:5} {row.system:24} {row.ranks} ranks {row.tokens_per_second:10.1f} tokens/s"
        f" {row.gib:7.2f} GiB{efficiency}{difference}"
    )


def run(size: str, folder: Path, work: Callable) -> tuple[float, float]:
    return work(size=size, folder=folder)


def speed(size: str, ranks: int, steps: int, output: Path) -> bool:
    """Prints both tables and writes them as CSV files; whether everything was measured and hops are as designed."""
    rows: list[Speed] = []
    hops: list[Hop] = []
    wrong = []

    def attempt(what: str, processes: int, function: Callable, *arguments):
        try:
            return launch(function, processes, *arguments)[0]
        except ChildFailedError as error:
            wrong.append(f"{what} on {processes}")
            print(f"{wrong[-1]}: {reason_of(error)}", flush=True)
            return None

    with tempfile.TemporaryDirectory() as place:
        previous = None
        for case, name, yardstick, n, work in cases(ranks, steps):
            if previous not in (None, name):
                # a 3B model takes 7 GB of the disk
                shutil.rmtree(Path(place, previous), ignore_errors=True)
            previous = name
            # each in processes of its own, since liger-kernel changes a process
            measured = attempt(f"{case} {name}", n, run, size, Path(place, name), work)
            if measured is not None:
                rows = compared([*rows, Speed(case, size, name, n, *measured, yardstick)])
                print(describe(rows[-1]), flush=True)
                # written after every number: a later case may not finish
                write_results(output / "distributed_speed.csv", rows)
    for name in PIPELINED:
        for schedule, per_rank in (("Schedule1F1B", 1), ("ScheduleInterleaved1F1B", 2)):
            if per_rank * ranks > models.SIZES[size].fields["num_hidden_layers"]:
                continue
            found = attempt(f"{schedule} {name}", ranks, count_sent, name, size, schedule, per_rank)
            for hop in found or []:
                hops.append(hop)
                print(
                    f"{schedule:24} {name:16} hop {hop.hop}: {hop.items} items, {hop.forward} bytes forward,"
                    f" {hop.backward} back, of the design {hop.design}: {hop.verdict}",
                    flush=True,
                )
                write_results(output / "distributed_hops.csv", hops)
    wrong += [f"{hop.schedule} {hop.system} hop {hop.hop}" for hop in hops if hop.verdict != "equal"]
    if wrong:
        print(f"not measured, or not as designed: {', '.join(wrong)}")
    return not wrong
