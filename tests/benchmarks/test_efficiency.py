# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`python -m benchmarks.efficiency`, at a size that runs anywhere."""

import csv
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_tiny(tmp_path):
    command = [sys.executable, "-m", "benchmarks.efficiency", "--size", "tiny", "--output", tmp_path]
    subprocess.run([*command, "--systems", "DenseFormer", "MoDA"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    lines = (tmp_path / "efficiency_tiny.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["system"] for row in rows] == ["vanilla", "DenseFormer", "vanilla OLMo2", "MoDA"]
    vanilla, denseformer, olmo2, moda = rows
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


def test_sizes_that_need_a_gpu_say_so():
    command = [sys.executable, "-m", "benchmarks.efficiency", "--size", "3b"]
    run = subprocess.run(command, cwd=ROOT, env={"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert run.returncode == 2 and "--size 3b needs a GPU" in run.stderr
