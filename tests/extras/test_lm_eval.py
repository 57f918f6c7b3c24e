# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""lm-evaluation-harness with `--model hf`, on a task of a local file."""

import pytest
import torch
from family_models import AWAKE_FIELDS, new_model, wake


lm_eval = pytest.importorskip("lm_eval")
from lm_eval.tasks import TaskManager  # noqa: E402


@pytest.fixture
def evaluate(choice_task, words):
    rows = [
        {
            "question": words(4 + 3 * i, seed=i),
            "choices": [f" {words(1 + (i + j) % 4, seed=50 * i + j)}" for j in range(3)],
            "answer": i % 3,
        }
        for i in range(9)
    ]
    manager = TaskManager(include_path=str(choice_task(rows)), include_defaults=False)

    def evaluate(folder, batch_size):
        arguments = {"pretrained": str(folder), "dtype": "float32"}
        results = lm_eval.simple_evaluate(
            "hf",
            model_args=arguments,
            tasks=["local_choices"],
            task_manager=manager,
            batch_size=batch_size,
            device="cpu",
            log_samples=True,
            bootstrap_iters=0,
        )
        return [
            (sample["arguments"], [float(value[0][0]) for value in sample["resps"]])
            for sample in sorted(results["samples"]["local_choices"], key=lambda each: each["doc_id"])
        ]

    return evaluate


def test_model_hf(pair, evaluate, tokenizer, tmp_path):
    """Log-likelihoods are those of a forward of each text by itself, whatever the batch."""
    model = wake(new_model(pair, **AWAKE_FIELDS[pair.method]))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    single, batched = (evaluate(tmp_path / "model", batch_size) for batch_size in (1, 6))
    assert len(single) == 9
    for (requests, likelihoods), (_, others) in zip(single, batched, strict=True):
        torch.testing.assert_close(torch.tensor(likelihoods), torch.tensor(others), atol=2e-4, rtol=1e-5)
        for i, likelihood in enumerate(likelihoods):
            context, continuation = requests[i]
            ids = tokenizer(context + continuation, return_tensors="pt", add_special_tokens=False)["input_ids"]
            start = len(context.split())
            with torch.no_grad():
                logits = model(ids).logits.log_softmax(-1)[0, :-1]
            expected = logits.gather(-1, ids[0, 1:, None])[start - 1 :].sum().item()
            assert abs(likelihood - expected) < 1e-3
