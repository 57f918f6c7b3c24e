# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Runs an example in several processes, as `accelerate launch` and `torchrun` do, without importing everything anew.

Usage: launcher.py. Each line of its input is a JSON object with `processes`, the path of a `config` for accelerate or
null, the name of an `example` and its `arguments`, and an empty `folder`. It prints the exit status, and in the folder
lie the logs and what each process found, `rank<i>.pt`.
"""

import contextlib
import faulthandler
import gc
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env


EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import finetune  # noqa: E402
import pretrain  # noqa: E402


SCRIPTS = {"finetune": finetune, "pretrain": pretrain}


def environment_of(config: str | None) -> dict[str, str]:
    """What `accelerate launch` tells the processes that it starts."""
    if config is None:
        return {}
    parsed = launch_command_parser().parse_args(["--config_file", config, "script.py"])
    before = dict(os.environ)
    environment = prepare_multi_gpu_env(_validate_launch_command(parsed)[0])
    return {name: value for name, value in environment.items() if before.get(name) != value}


def pass_for_gpus() -> None:
    """accelerate shards and splits on GPUs only: each process passes for one with a GPU, and stays on the CPU."""
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


def run(rank: int, job: dict, environment: dict[str, str]) -> None:
    folder, processes = Path(job["folder"]), job["processes"]
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    # one that waits for another that has failed says where
    faulthandler.dump_traceback_later(1200, exit=True)
    os.environ |= environment
    torch.set_num_threads(1)
    if processes > 1 or job["config"] is not None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(processes)}
        meeting = f"file://{folder / 'meeting'}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
        # a copy of the model in each process is all that accelerate does with CPUs
        if job["config"] is None or environment.get("ACCELERATE_USE_FSDP") == "true":
            pass_for_gpus()
    trainer = SCRIPTS[job["example"]].main(job["arguments"])
    held = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.model.parameters()]
    found = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        "held": sum(part.numel() for part in held),
        "modules": [type(module).__name__ for module in trainer.model.modules()],
    }
    torch.save(found, folder / f"rank{rank}.pt")
    # a process leaves without taking the group apart, for which it would wait for the others


def start(rank: int, job: dict, environment: dict[str, str]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(rank, job, environment)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    return child


def main() -> None:
    # what is loaded stays; looking for garbage in it takes long
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        environment = environment_of(job["config"])
        children = [start(rank, job, environment) for rank in range(job["processes"])]
        statuses = []
        for _ in children:
            _, status = os.wait()
            statuses.append(status)
            if status:
                # the others would wait for it
                for other in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, 9)
        print(max(statuses), flush=True)


if __name__ == "__main__":
    main()
