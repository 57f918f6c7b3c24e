# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`python -m benchmarks.versions`, with this checkout as both versions, at a size that runs anywhere."""

import csv
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


@pytest.fixture
def slower_version(tmp_path):
    """A copy of this checkout whose Depth-Attention has twice the layers, and whose AttnRes is broken."""
    checkout = tmp_path / "slower"
    for folder in ("depthmix", "configuration", "modeling", "kernels", "conversion", "benchmarks"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "setup.cfg", checkout)
    models = checkout / "benchmarks" / "models.py"
    text = models.read_text()
    slower = text.replace("DepthQwen3Config, {}),", 'DepthQwen3Config, {"num_hidden_layers": 16}),')
    slower = slower.replace('{"attnres_variant": "block"}', '{"attnres_variant": "none"}')
    assert slower.count('{"num_hidden_layers": 16}') == slower.count('"none"') == 1
    models.write_text(slower)
    return checkout


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_versions(slower_version, tmp_path):
    cases = ("train_step:tiny:Depth-Attention", "train_step:tiny:AttnRes", "train_step:tiny:mHC")
    options = ("--rounds", 2, "--processes", 1, "--output", tmp_path)
    command = [sys.executable, "-m", "benchmarks.versions", slower_version, *cases, *map(str, options)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    # each version ran its own code: a fault of one is reported, and ends the run, with what was measured kept
    assert result.returncode == 1, result.stderr
    assert "attnres_variant" in result.stdout
    assert result.stderr.endswith("not measured: train_step:tiny:AttnRes (failed), train_step:tiny:mHC (not begun)\n")
    lines = [line for line in (tmp_path / "versions.csv").read_text().splitlines() if not line.startswith("#")]
    (row,) = csv.DictReader(lines)
    assert (row["case"], row["size"], row["model"]) == ("train_step", "tiny", "Depth-Attention")
    # four times the layers; the fastest steps, which other work on the machine disturbs least
    assert float(row["after_low"]) < float(row["before_low"])
    assert float(row["ratio"]) == pytest.approx(float(row["after"]) / float(row["before"]), rel=2e-3)


def test_what_cannot_be_compared_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT)
    versions = importlib.import_module("benchmarks.versions")

    def refused(*arguments):
        with pytest.raises(SystemExit) as end:
            versions.main([str(argument) for argument in arguments])
        assert end.value.code == 2
        return capsys.readouterr().err

    assert f"{tmp_path} is no checkout" in refused(tmp_path, "train_step:tiny:AttnRes")
    assert "--rounds 9" in refused(ROOT, "train_step:tiny:AttnRes", "--rounds", 9)
    for case in ("train:tiny:AttnRes", "train_step:AttnRes", "train_step:huge:AttnRes", "train_step:tiny:Attn"):
        assert f"no such case: {case}" in refused(ROOT, case)
