# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`python -m benchmarks.distributed`, on two CPU processes over gloo, and the arithmetic of its tables."""

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
# both processes see the same rows in one arrangement, and one of the processes fails in another
SPOILT = """
import torch.distributed as dist
from benchmarks.distributed import __main__, correctness

own_part, measured = correctness.checks.own_part, correctness.measured

def spoilt(family, arrangement, place):
    if arrangement == "FSDP2" and dist.get_rank() == 1:
        raise RuntimeError("a rank is lost")
    correctness.checks.own_part = (lambda ids: ids.chunk(2)[0]) if arrangement == "DDP" else own_part
    return measured(family, arrangement, place)

correctness.measured = spoilt
__main__.main()
"""


def rows_of(path):
    return list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))


@pytest.fixture
def distributed():
    """`distributed(name)` imports a module of it; what the first import adds to the path stays, as the modules do."""
    sys.path.insert(0, str(ROOT))
    yield lambda name: importlib.import_module(f"benchmarks.distributed.{name}")
    sys.path.remove(str(ROOT))


@pytest.mark.exhaustive
@pytest.mark.once
def test_correctness(tmp_path):
    """What is equal, what is not, and what failed, each in its row; one that fails ends no other."""
    command = [sys.executable, "-c", SPOILT, "correctness", "--families", "attnres"]
    # kernels under FSDP2 are interpreted in tests/integration
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    result = subprocess.run([*command, "--output", tmp_path], **options)
    assert result.returncode == 1, result.stderr
    rows = rows_of(tmp_path / "distributed_correctness.csv")
    verdicts = {row["arrangement"]: row["verdict"] for row in rows}
    assert verdicts.pop("DDP") == "differs"
    failed = verdicts.pop("FSDP2")
    assert failed.startswith("failed: ") and "rank 1: RuntimeError: a rank is lost" in failed
    others = ("FSDP2, checkpointing", "tensor parallel", "pipeline, 1F1B", "pipeline, interleaved")
    assert verdicts == dict.fromkeys(others, "equal"), rows
    assert {row["backend"] for row in rows} == {"gloo"} and {row["ranks"] for row in rows} == {"2"}
    assert "4 of 6 are equal to one process" in result.stdout


def test_efficiency(distributed):
    """By hand: four GPUs that do 380 where one does 100 are used to 0.95."""
    speed = distributed("speed")

    def row(case, system, ranks, tokens_per_second, yardstick="stock"):
        return speed.Speed(case, "3b", system, ranks, tokens_per_second, 1.0, yardstick)

    train, plane, decode = "train, FSDP2", "train, FSDP2 x TP", "decode 1, TP"
    rows = [
        *(row(train, "stock", n, speed) for n, speed in ((1, 100.0), (4, 380.0))),
        *(row(train, "near", n, speed) for n, speed in ((1, 50.0), (4, 187.0))),
        *(row(train, "far", n, speed) for n, speed in ((1, 50.0), (4, 185.0))),
        row(plane, "stock", 4, 300.0),
        row(plane, "far", 4, 180.0),
        row(train, "alone", 4, 180.0),
        *(row(decode, "stock", n, speed) for n, speed in ((1, 10.0), (2, 12.0))),
        *(row(decode, "near", n, speed) for n, speed in ((1, 10.0), (2, 11.0))),
    ]
    found = {
        (each.case, each.system, each.ranks): (each.efficiency, each.difference, each.goal)
        for each in speed.compared(rows)
    }
    approx = pytest.approx
    assert found[train, "stock", 1] == (1.0, None, "")
    assert found[train, "stock", 4] == (approx(0.95), None, "")
    assert found[train, "near", 4] == (approx(0.935), approx(-0.015), "met")
    assert found[train, "far", 4] == (approx(0.925), approx(-0.025), "missed")
    # of a GPU alone there is the one-dimensional number only
    assert found[plane, "far", 4] == (approx(0.9), approx(0.15), "met")
    assert found[train, "alone", 4] == (None, None, "")
    # the goal is one of training
    assert found[decode, "near", 2] == (approx(0.55), approx(-0.05), "")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_speed(tmp_path):
    command = [sys.executable, "-m", "benchmarks.distributed", "speed", "--steps", "2", "--output", tmp_path]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = rows_of(tmp_path / "distributed_speed.csv")
    assert {(row["case"], row["ranks"]) for row in rows} == {
        (case, ranks) for case in ("train, FSDP2", "decode 1, TP", "decode 32, TP") for ranks in ("1", "2")
    }
    assert all(float(row["tokens_per_second"]) > 0 and row["efficiency"] for row in rows)
    hops = rows_of(tmp_path / "distributed_hops.csv")
    assert {hop["verdict"] for hop in hops} == {"equal"} and any(hop["items"] != "0" for hop in hops)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("correctness", "--families", "attnress"), "attnress"),
        (("correctness", "--ranks", "8"), "invalid choice: 8"),
        (("speed", "--size", "3b"), "--size 3b needs GPUs"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments, message, distributed, capsys):
    with pytest.raises(SystemExit) as end:
        distributed("__main__").main([*arguments])
    assert end.value.code == 2 and message in capsys.readouterr().err
