# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`examples.retrofit` at a size that runs anywhere."""

import csv
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).parents[2]
ARMS = ("vanilla", "LoRA", "Depth-Attention", "Depth-Attention, frozen base", "Attention Residuals, additive")
OPTIONS = (
    *("--shape", "tiny", "--vocab-size", "300", "--base-tokens", "512", "--tokens", "512", "--batch", "4"),
    *("--length", "32", "--device", "cpu", "--seeds", "0", "1"),
)

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def experiment():
    """The modules of the experiment, by name."""
    sys.path.insert(0, str(ROOT))
    try:
        names = ("__main__", "arms", "continuation", "report")
        yield type("Experiment", (), {name: importlib.import_module(f"examples.retrofit.{name}") for name in names})
    finally:
        sys.path.remove(str(ROOT))


class InThisProcess:
    """In place of a pool of processes, each of which would import everything again."""

    def __init__(self, *arguments, **options): ...

    def __enter__(self):
        return self

    def __exit__(self, *exception): ...

    def submit(self, function, *arguments):
        from concurrent.futures import Future

        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture(scope="module")
def finished(experiment, tmp_path_factory):
    """The folder of an experiment that has ended, and its rows."""
    folder = tmp_path_factory.mktemp("retrofit")
    for package in range(6):
        (folder / "source" / f"package{package}").mkdir(parents=True)
        lines = [f"def function_{i}_{package}(a, b): return a * {i} + b" for i in range(150)]
        (folder / "source" / f"package{package}" / "module.py").write_text("\n".join(lines))
    options = [*OPTIONS, "--source", str(folder / "source"), "--cache", str(folder / "cache"), "--arms", *ARMS]
    patch = pytest.MonkeyPatch()
    patch.setattr(experiment.__main__, "ProcessPoolExecutor", InThisProcess)
    try:
        experiment.__main__.main([*options, "--out", str(folder / "out")])
        before = (folder / "out" / "retrofit.csv").read_text()
        # what has finished is not repeated
        experiment.__main__.main([*options, "--out", str(folder / "out")])
        assert (folder / "out" / "retrofit.csv").read_text() == before
    finally:
        patch.undo()
    with open(folder / "out" / "retrofit.csv", newline="") as file:
        return folder / "out", list(csv.DictReader(file))


def test_every_arm_starts_from_the_same_function_and_learns(finished):
    _, rows = finished
    for row in rows:
        vanilla = next(other for other in rows if other["system"] == "vanilla" and other["seed"] == row["seed"])
        assert float(row["loss_at_start"]) == pytest.approx(float(vanilla["loss_at_start"]), abs=1e-6)
        # a hundred times the rate can be too much
        assert float(row["loss"]) < float(row["loss_at_start"]) or row["scale"] == "100.0"
    # all scales with the first seed; with the other the first one, and the best one
    with_first = [(row["system"], float(row["scale"])) for row in rows if row["seed"] == "0"]
    assert len(with_first) == len(set(with_first)) == 1 + 4 * 3
    assert {row["system"] for row in rows if row["seed"] == "1"} == set(ARMS)


def test_what_is_trained(finished):
    _, rows = finished
    by_arm = {row["system"]: row for row in rows}
    assert by_arm["vanilla"]["trained_parameters"] == by_arm["vanilla"]["parameters"]
    for name in ("LoRA", "Depth-Attention, frozen base"):
        assert 0 < int(by_arm[name]["trained_parameters"]) < int(by_arm[name]["parameters"]) / 2
    assert float(by_arm["Depth-Attention, frozen base"]["gate_mean_size"]) > 0
    assert float(by_arm["Attention Residuals, additive"]["mixing_moved"]) > 0


def test_continuations_read_what_the_pretraining_has_not(experiment):
    from benchmarks.study.training import Run, data_order

    pretraining = Run("vanilla", "tiny", experiment.continuation.PRETRAINING, 3)
    windows = pretraining.recipe.steps * pretraining.recipe.batch
    trainer = object.__new__(experiment.continuation.Continuation)
    trainer.pretraining, trainer.run, trainer.recipe = pretraining, pretraining, experiment.continuation.CONTINUATION
    total = windows + trainer.recipe.steps * trainer.recipe.batch
    read = trainer.data_order(total)
    assert sorted([*read.tolist(), *data_order(3, total, total)[:windows].tolist()]) == list(range(total))
    with pytest.raises(ValueError, match="tokens=.*leaves"):
        trainer.data_order(total - 1)


def test_changed_depth_weights(experiment):
    from depthmix.kernels import depth_value_mix_reference as reference

    torch.manual_seed(0)
    query, *keys = torch.randn(3, 2, 2, 5, 8)
    values = list(torch.randn(2, 2, 2, 5, 8))
    plain = reference.depth_value_mix_reference(query, keys, values, scaling=1.0)
    weights = reference.depth_value_weights_reference(query, keys, scaling=1.0)
    with experiment.continuation.changed_depth_weights("mean"):
        mixed = reference.depth_value_mix_reference(query, keys, values, scaling=1.0)
    mean = weights.mean((0, 2), keepdim=True)
    torch.testing.assert_close(mixed, mean[..., :1] * values[0] + mean[..., 1:] * values[1])
    with experiment.continuation.changed_depth_weights("exchanged"):
        exchanged = reference.depth_value_weights_reference(query, keys, scaling=1.0)
    assert not torch.equal(exchanged, weights) and torch.equal(exchanged.sort(2).values, weights.sort(2).values)
    assert torch.equal(reference.depth_value_mix_reference(query, keys, values, scaling=1.0), plain)


def test_table(experiment, finished):
    folder, _ = finished
    details = [json.loads(line) for line in (folder / "retrofit.jsonl").read_text().splitlines()]
    assert any(each["gates"] for each in details) and all(each["curve"] for each in details)
    rows = experiment.__main__.read_rows([folder / "retrofit.csv"], experiment.continuation.Row)
    lines = experiment.report.summary(rows).splitlines()
    assert len({line.count("|") for line in lines}) == 1 and sum("Depth-Attention |" in line for line in lines) == 3
