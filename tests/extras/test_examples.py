# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the examples do with TRL and lm-eval."""

import importlib
import json
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    yield importlib.import_module
    for name in ("evaluate_models", "finetune", "packed_training", "text_corpus"):
        sys.modules.pop(name, None)


def test_trl_trains_as_the_trainer(example, tmp_path):
    """The same losses, of completions alone, and the same adapters and mixing parameters."""
    finetune = example("finetune")
    rows = [{"prompt": f"def add_{i}(a):\n", "completion": f"    return a + {i}\n"} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    losses, trained = [], []
    for name, more in (("trainer", []), ("trl", ["--trl"])):
        options = ["--output", str(tmp_path / name), "--data", str(tmp_path / "pairs.jsonl"), "--steps", "5"]
        trainer = finetune.main([*options, *more, "--mixing-rate", "1e-2"])
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        trained.append({n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad})
    assert type(trainer).__mro__[2].__name__ == "SFTTrainer"
    assert len(losses[0]) == 5 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert trained[0].keys() == trained[1].keys() and any("depth_gate" in name for name in trained[0])
    for name, tensor in trained[0].items():
        assert (tensor - trained[1][name]).norm() <= 1e-2 * tensor.norm(), name
    assert (tmp_path / "trl" / "model" / "model.safetensors").is_file()


def test_tasks_of_lm_eval(example, choice_task, tmp_path, capsys):
    """Beside the loss, tasks of a folder: the small checkpoint knows how a line of Python goes on."""
    lines = [("import ", "os", ")"), ("def f(self, ", "name", "import"), ("for i in ", "range", "def")]
    rows = [{"question": start, "choices": [right, wrong], "answer": 0} for start, right, wrong in lines]
    tasks = str(choice_task(rows))
    (tmp_path / "text.jsonl").write_text('{"text": "import os\\n"}\n')
    options = ["--data", str(tmp_path / "text.jsonl"), "--tasks", "local_choices"]
    example("evaluate_models").main([*options, "--task-folder", tasks])
    printed = capsys.readouterr().out
    assert "bits per byte" in printed
    (row,) = [line for line in printed.splitlines() if line.startswith("|local_choices")]
    assert float(row.split("|")[7]) == 1
