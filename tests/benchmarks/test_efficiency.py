# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`python -m benchmarks.efficiency`, at a size that runs anywhere."""

import csv
import importlib
import subprocess
import sys
import weakref
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).parents[2]


@pytest.fixture
def efficiency(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.efficiency")


TWO_RUNS = """
import runpy, shutil, sys

folder, first = sys.argv[1:]
for systems in (["DenseFormer", "MoDA", "looped Depth-Attention"], ["mHC", "--cases", "decode"]):
    sys.argv = ["efficiency", "--size", "tiny", "--output", folder, "--systems", *systems]
    runpy.run_module("benchmarks.efficiency", run_name="__main__")
    shutil.copy(f"{folder}/efficiency_tiny.csv", first) if systems[0] != "mHC" else None
"""


def read_rows(path):
    lines = path.read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_tiny(tmp_path):
    # a process of its own, since the command changes tables of its modules
    command = [sys.executable, "-c", TWO_RUNS, tmp_path, tmp_path / "first.csv"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    rows = read_rows(tmp_path / "first.csv")
    names = ["vanilla", "DenseFormer", "looped vanilla", "looped Depth-Attention", "vanilla OLMo2", "MoDA"]
    assert [row["system"] for row in rows] == names
    vanilla, denseformer, looped, looped_mixing, olmo2, moda = rows
    # half of the weights, all of the work and of the state; its own control is the yardstick
    in_layers = int(vanilla["parameters"]) - (2 * 256 + 1) * 64
    assert int(looped["parameters"]) == int(looped_mixing["parameters"]) == int(vanilla["parameters"]) - in_layers // 2
    assert looped["forward_flops"] == vanilla["forward_flops"]
    assert looped["state_bytes_per_token"] == vanilla["state_bytes_per_token"]
    flops = (int(looped_mixing["forward_flops"]), int(looped["forward_flops"]))
    assert float(looped_mixing["extra_flops_percent"]) == pytest.approx(100 * (flops[0] / flops[1] - 1), rel=1e-3)
    assert flops[0] > flops[1] and float(looped["decode_ratio"]) == 1
    # a projection in all layers but the last; each system has a yardstick of its own backbone
    assert int(moda["added_parameters"]) == int(moda["parameters"]) - int(olmo2["parameters"]) == 3 * 2 * 64 * 32
    assert abs(float(moda["train_ratio"]) / (float(moda["train_ms"]) / float(olmo2["train_ms"])) - 1) < 0.01
    # four averages, of 2 to 5 states of 64 channels
    assert int(denseformer["added_parameters"]) == int(denseformer["parameters"]) - int(vanilla["parameters"]) == 14
    assert int(denseformer["forward_flops"]) - int(vanilla["forward_flops"]) == 64 * (3 + 5 + 7 + 9)
    assert denseformer["state_bytes_per_token"] == vanilla["state_bytes_per_token"] == "512"
    for case in ("train", "prefill_32k", "prefill_128k", "decode"):
        assert float(vanilla[f"{case}_ratio"]) == 1
        ratio = float(denseformer[f"{case}_ms"]) / float(vanilla[f"{case}_ms"])
        assert abs(float(denseformer[f"{case}_ratio"]) / ratio - 1) < 0.01
    assert float(denseformer["paper_prefill_128k_extra_gib"]) == 24 and not denseformer["paper_train_ratio"]
    picture = ET.parse(tmp_path / "efficiency_tiny.svg").getroot()
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("DenseFormer") == 2 and any("(paper 24)" in text for text in texts)

    # a part is measured anew: all else stays, with the ratios of its own run
    again = {row["system"]: row for row in read_rows(tmp_path / "efficiency_tiny.csv")}
    assert list(again) == ["vanilla", "DenseFormer", "mHC", *names[2:]]
    assert again["mHC"]["decode_ms"] and not again["mHC"]["train_ms"]
    assert again["DenseFormer"] == denseformer and again["MoDA"] == moda
    assert again["vanilla"]["train_ms"] == vanilla["train_ms"]


def test_what_does_not_fit_leaves_no_memory_behind(efficiency, capsys):
    model, made = torch.nn.Linear(4, 4), []

    def prepare():
        optimizer = torch.optim.AdamW(model.parameters())
        made.append(weakref.ref(optimizer))

        def step():
            output = model(torch.ones(2, 4))
            made.append(weakref.ref(output))
            output.sum().backward()
            optimizer.step()
            raise torch.OutOfMemoryError("CUDA out of memory.")

        return step

    assert efficiency.time_if_it_fits("mHC, train", model, prepare) is None
    assert capsys.readouterr().out == "mHC, train: out of memory\n"
    assert [reference() for reference in made] == [None, None]
    assert model.weight.grad is None


def test_sizes_that_need_a_gpu_say_so(efficiency, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        efficiency.main(["--size", "3b"])
    assert end.value.code == 2 and "--size 3b needs a GPU" in capsys.readouterr().err
