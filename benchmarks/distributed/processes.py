# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The processes that run together: over NCCL with a GPU each, or over gloo on a CPU, which tries everything out."""

import datetime
import os
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..harness import DEVICE


# what the tests check on two CPU processes is what runs here on several GPUs
TESTS = Path(__file__).parents[2] / "tests"
sys.path += [str(TESTS), str(TESTS / "integration")]

BACKEND = "nccl" if DEVICE == "cuda" else "gloo"
# NVLink multicast takes a resource of the whole host, which a host shared with others may not allow, and a program
# that ends badly can leave it taken
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def missing_gpus(ranks: int) -> str | None:
    """What to say where there is not a GPU for each process."""
    found = torch.cuda.device_count()
    if DEVICE == "cpu" or found >= ranks:
        return None
    return f"--ranks {ranks}: must be at most the GPUs of this machine, of which there are {found}"


def launch(function: Callable, ranks: int, *arguments) -> list:
    """
    What `function(*arguments)` returns in each of so many new processes, which make up the default group. A failure of
    one ends all, and raises `ChildFailedError`.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        # CUDA does not outlive a fork; without it a fork saves the imports
        start_method="spawn" if DEVICE == "cuda" else "fork",
    )
    results = elastic_launch(config, in_group)(function, arguments)
    return [results[rank] for rank in range(ranks)]


def in_group(function: Callable, arguments: tuple):
    options = {}
    if DEVICE == "cuda":
        options["device_id"] = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(options["device_id"])
    else:
        torch.set_num_threads(1)
    # a process that waits for one that has gone another way fails as well
    dist.init_process_group(BACKEND, timeout=datetime.timedelta(minutes=5), **options)
    result = function(*arguments)
    # one that leaves while another is still joining makes that fail
    dist.barrier()
    dist.destroy_process_group()
    return result


def save_once(build: Callable, folder: Path) -> None:
    """The first process saves what `build` makes; the folder is there only when the model is whole."""
    if dist.get_rank() == 0 and not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        build().save_pretrained(part)
        part.rename(folder)
    dist.barrier()


def reason_of(error: ChildFailedError) -> str:
    """What each process said that failed, in a line; those that were ended for it say nothing."""
    reasons = []
    for rank, failure in error.failures.items():
        if failure.exitcode != -signal.SIGTERM:
            # an exception, or how the process ended
            said = failure.message["message"] if isinstance(failure.message, dict) else failure.message
            reasons.append(f"rank {rank}: {said.strip().splitlines()[0]}")
    return "; ".join(reasons)
