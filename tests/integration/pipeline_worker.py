# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
One of the processes of test_pipeline.py: trains the stages of its rank and writes what it measured.

Usage: pipeline_worker.py RANK RANKS RENDEZVOUS_FILE FOLDER. The folder has saved models, and cases.json, which says
with which schedule and how many stages each is run; it gets `result_RANK.json`.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.pipelining import schedules
from transformers.utils import logging
from two_process_worker import device, load

from depthmix.pipeline import next_token_loss, pipeline_stages


MICROBATCHES = 4


def batch(vocab_size: int, padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, vocab_size, (2 * MICROBATCHES, 12), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device())
    if not padded:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1::2, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def reference(folder: Path, inputs: dict[str, torch.Tensor], steps: int):
    """Loss of each step, gradients after the last, and logits, of one process with the whole model."""
    model = load(folder, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = next_token_loss(model(**inputs).logits, inputs["input_ids"])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        return losses, grads, model(**inputs).logits, model


def run(folder: Path, schedule_name: str, num_stages: int, padded: bool, checkpoint: Path, steps: int = 2) -> dict:
    model = load(folder, dtype=torch.float64)
    inputs = batch(model.config.vocab_size, padded)
    stages = pipeline_stages(model, num_stages, device())
    del model
    schedule_class = getattr(schedules, schedule_name)
    is_single = issubclass(schedule_class, schedules.PipelineScheduleSingle)
    options = {"loss_fn": next_token_loss, "n_microbatches": MICROBATCHES}
    schedule = schedule_class(stages[0] if is_single else stages, **options)
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.part.parameters()], lr=0.1)
    is_first, is_last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    ids = inputs.pop("input_ids")

    def step(call, **for_last):
        losses: list = []
        last = {"target": ids, "losses": losses} if is_last else {}
        output = call(*([ids] if is_first else []), **inputs, **last)
        return output, losses

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        _, found = step(schedule.step)
        losses.append(sum(loss.item() for loss in found) / MICROBATCHES)
        assert stages[0].part.store.is_empty()
        optimizer.step()
    # a schedule divides gradients by the number of microbatches whenever it has run
    grads = {name: p.grad.clone() for stage in stages for name, p in stage.part.named_parameters()}
    with torch.no_grad():
        logits, _ = step(schedule.eval)
    assert stages[0].part.store.is_empty()

    expected_losses, expected, expected_logits, whole = reference(folder, inputs | {"input_ids": ids}, steps)
    worst = max(
        ((grads[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-9)).item()
        for name in grads
    )
    result = {"gradients": worst, "names": sorted(grads)}
    if is_last:
        result["loss"] = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
        counted = inputs["attention_mask"].bool() if padded else ...
        result["logits"] = (logits - expected_logits)[counted].abs().max().item()
    # the parts of all ranks make the checkpoint of the whole model
    dcp.save(
        {name: p.detach() for stage in stages for name, p in stage.part.named_parameters()}, checkpoint_id=checkpoint
    )
    loaded = {name: torch.zeros_like(p) for name, p in whole.named_parameters()}
    dcp.load(loaded, checkpoint_id=checkpoint)
    result["saved"] = max((loaded[name] - p.detach()).abs().max().item() for name, p in whole.named_parameters())
    return result


def main() -> None:
    rank, ranks, rendezvous, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    results = {}
    for name, (model, schedule, stages, padded) in json.loads((place / "cases.json").read_text()).items():
        try:
            results[name] = run(place / model, schedule, stages, padded, place / f"checkpoint_{name}")
        except Exception:
            # the other ranks wait for this one, until the test ends them
            traceback.print_exc()
            os._exit(1)
    (place / f"result_{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
