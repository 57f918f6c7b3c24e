# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`python -m benchmarks.lean`, at a size that runs anywhere."""

import csv
import importlib
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks.lean", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_tiny(tmp_path):
    rows = ("vanilla", "Depth-Attention", "Depth-Attention, lean by torch@cudnn")
    result = run("--sizes", "tiny", "--rows", *rows, "--rounds", 1, "--steps", 2, "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [line for line in (tmp_path / "lean.csv").read_text().splitlines() if not line.startswith("#")]
    found = list(csv.DictReader(lines))
    assert [row["system"] for row in found] == list(rows)
    vanilla, mixing, lean = (float(row["loss"]) for row in found)
    # one loss, whichever way it is computed, and another model
    assert mixing == pytest.approx(lean, rel=1e-3) and vanilla != pytest.approx(mixing, rel=1e-4)
    assert all(float(row["milliseconds"]) > 0 and row["processes"] == "1" for row in found)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_profile():
    result = run("--sizes", "tiny", "--profile", "vanilla", "--lines", 3)
    assert result.returncode == 0, result.stderr
    first, *kernels = result.stdout.splitlines()
    assert first.startswith("tiny vanilla: ") and len(kernels) == 3 and "aten::mm" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "vanila"), "there is no row 'vanila'"),
        (("--profile", "vanilla@math"), "there is no row 'vanilla@math'"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments, message, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT))
    lean = importlib.import_module("benchmarks.lean")
    with pytest.raises(SystemExit) as end:
        lean.main(["--sizes", "tiny", *arguments])
    assert end.value.code == 2 and message in capsys.readouterr().err
