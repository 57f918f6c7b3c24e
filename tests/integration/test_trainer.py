# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The Trainer: loss under gradient accumulation, checkpoints, resuming, evaluation."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments

from depthmix.modeling.mixing_modules import MixingModule


# the first from transformers 5.23 on
WORDS = ("activation", "gradient")
CHECKPOINTING = next(f"{word}_checkpointing" for word in WORDS if hasattr(TrainingArguments, f"{word}_checkpointing"))


@pytest.fixture
def rows(token_ids):
    """`rows(number, labelled)`: a data set whose row `i` has labels on its last `labelled[i]` tokens."""

    def rows(number, labelled=None):
        ids = token_ids(number, 10)
        labels = ids.clone()
        for i, count in enumerate(labelled or []):
            labels[i, : 10 - count] = -100
        return [{"input_ids": ids[i], "labels": labels[i]} for i in range(number)]

    return rows


@pytest.fixture
def train(tmp_path):
    """`train(model, rows, **arguments)` trains with plain SGD and gives the Trainer."""

    def train(model, rows, *, resume_from_checkpoint=None, **arguments):
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "optim": "sgd",
            "learning_rate": 0.01,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 1e9,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "dataloader_pin_memory": False,
        }
        trainer = Trainer(model=model, args=TrainingArguments(**defaults | arguments), train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume_from_checkpoint)
        return trainer

    return train


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("labelled", [None, (9, 2, 5, 1)], ids=["equal", "unequal"])
def test_accumulated_batches_have_the_loss_of_one(family, labelled, build_awake, rows, train):
    logs, models = [], []
    for size, steps in ((1, 4), (4, 1)):
        model = build_awake(family, **family.densest)
        trainer = train(
            model,
            rows(4, labelled),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=1,
        )
        logs.append(trainer.state.log_history[0])
        models.append(model)
    accumulated, at_once = logs
    assert accumulated["loss"] == pytest.approx(at_once["loss"], rel=1e-3)
    assert accumulated["grad_norm"] == pytest.approx(at_once["grad_norm"], rel=1e-3)
    for parameter, expected in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(parameter, expected, atol=1e-5)


def smoothed_loss(logits, labels, factor):
    """Cross entropy with the next token, of which each target gives a part to all tokens alike."""
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, label_smoothing=factor)


def as_it_is(model):
    return model


def subclassed(model):
    class NamedOtherwise(type(model)):
        pass

    renamed = NamedOtherwise(model.config)
    renamed.load_state_dict(model.state_dict())
    return renamed


def with_lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["v_proj"], task_type="CAUSAL_LM"))


@pytest.mark.long
@pytest.mark.parametrize(
    "wrap", [as_it_is, *(pytest.param(wrap, marks=pytest.mark.sampled(2)) for wrap in (subclassed, with_lora))]
)
def test_label_smoothing_is_of_the_next_token(family, wrap, build_awake, rows, train):
    model = build_awake(family)
    # the first token is no target, and must not be counted as one
    data = rows(2, (10, 4))
    ids, labels = (torch.stack([row[name] for row in data]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        expected = smoothed_loss(model(ids).logits, labels, 0.1)
    trainer = train(
        wrap(model), data, max_steps=1, label_smoothing_factor=0.1, per_device_train_batch_size=2, learning_rate=0.0
    )
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "adapter", [False, pytest.param(True, marks=pytest.mark.sampled(2))], ids=["all weights", "beside LoRA"]
)
def test_mixing_parameters_move_in_a_low_precision_model(family, adapter, tiny, rows, train, tmp_path):
    """As many entries of them as in an fp32 model, at the Trainer's own rate, also after saving and loading."""
    peft = pytest.importorskip("peft")
    fields = family.densest | family.defaults | {"num_hidden_layers": 3, "initializer_range": 0.02}
    fresh = family.head(family.head.config_class(**tiny | fields))
    if not any(isinstance(module, MixingModule) for module in fresh.modules()):
        pytest.skip("this family has no mixing parameters")
    fresh.save_pretrained(tmp_path / "fresh")
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "fresh", dtype=dtype)
        parts = {name for name, module in model.named_modules() if isinstance(module, MixingModule)}
        before = {n: p.detach().clone() for n, p in model.named_parameters() if n.rpartition(".")[0] in parts}
        trained = model
        if adapter:
            names = [name for name in family.own_modules if any(part.endswith(name) for part in parts)]
            lora = peft.LoraConfig(target_modules=["v_proj"], modules_to_save=names, task_type="CAUSAL_LM")
            trained = peft.get_peft_model(model, lora)
        train(trained, rows(4), max_steps=8, learning_rate=5e-5, optim="adamw_torch", lr_scheduler_type="linear")
        if adapter:
            trained.save_pretrained(tmp_path / "adapter")
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "fresh", dtype=dtype)
            model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
        model.save_pretrained(tmp_path / "tuned")
        after = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype="auto").state_dict()
        moved[dtype] = {name: int((after[name] != tensor).sum()) for name, tensor in before.items()}
    assert sum(moved[torch.float32].values()) > 0
    # gradients of zero and of rounding size are not the same in both
    settled = {n for n, count in moved[torch.float32].items() if count == before[n].numel() and not family.is_idle(n)}
    assert len(settled) > len(before) / 2
    assert {n: moved[torch.bfloat16][n] for n in settled if moved[torch.bfloat16][n] < 0.99 * before[n].numel()} == {}


@pytest.mark.long
@pytest.mark.parametrize(
    "initializer_range", [0.02, pytest.param(0.15, marks=pytest.mark.sampled(2))], ids=["fresh", "awake"]
)
def test_every_parameter_learns(family, initializer_range, build, rows, train):
    model = build(model_class=family.head, **family.densest, initializer_range=initializer_range)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, rows(4), max_steps=1, learning_rate=1.0)
    unchanged = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert [name for name in unchanged if not family.is_idle(name)] == []


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["plain", "non_reentrant", "reentrant"])
def test_resuming_is_bit_equal(family, use_reentrant, build_awake, rows, train, tmp_path):
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    if use_reentrant is not None:
        arguments |= {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": use_reentrant}}
    straight = build_awake(family, **family.densest)
    train(straight, rows(16), **arguments)

    middle = tmp_path / "run" / "checkpoint-2"
    resumed = AutoModelForCausalLM.from_pretrained(middle)
    assert type(resumed) is family.head
    assert not torch.equal(resumed.lm_head.weight, straight.lm_head.weight)
    train(resumed, rows(16), resume_from_checkpoint=str(middle), **arguments, output_dir=str(tmp_path / "resumed"))
    for parameter, expected in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(parameter, expected)


# the gradients of each family are those of test_checkpointing.py
@pytest.mark.long
@pytest.mark.sampled(2)
def test_checkpointing_trains_as_without(family, build_awake, rows, train):
    models = []
    for use_reentrant in (None, False, True):
        arguments = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": use_reentrant}}
        model = build_awake(family, **family.densest)
        train(model, rows(16), max_steps=3, **({} if use_reentrant is None else arguments))
        models.append(model)
    for expected, *others in zip(*(model.parameters() for model in models), strict=True):
        for parameter in others:
            assert torch.allclose(parameter, expected, atol=1e-5)


@pytest.mark.parametrize("output_depth_weights", [False, True])
def test_evaluate_and_predict(family, output_depth_weights, build_awake, rows, tmp_path):
    if output_depth_weights and not family.has_depth_weights:
        pytest.skip("this family returns none")
    model = build_awake(family, **(family.weights_fields if output_depth_weights else {}))
    assert model.config.use_cache
    data = rows(6)
    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=4, report_to="none", disable_tqdm=True, use_cpu=True
    )
    trainer = Trainer(model=model, args=arguments, eval_dataset=data)
    ids = torch.stack([row["input_ids"] for row in data])
    with torch.no_grad():
        # the mean over batches, weighted by their rows
        expected = model(ids, labels=ids)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    predictions = trainer.predict(data).predictions
    if output_depth_weights:
        predictions, depth_weights = predictions
        for weights, own in zip(depth_weights, expected[family.weights_name], strict=True):
            assert np.abs(weights - own.numpy()).max() <= 2e-5
    assert isinstance(predictions, np.ndarray)
    assert np.abs(predictions - expected.logits.numpy()).max() <= 2e-5


# one head for all
@pytest.mark.long
@pytest.mark.sampled(2)
def test_sequence_classification(family, build_awake, rows, train, tmp_path):
    build_awake(family).save_pretrained(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=3)
    data = [row | {"labels": torch.tensor(i % 3)} for i, row in enumerate(rows(6))]
    trainer = train(model, data, max_steps=20, learning_rate=0.05, per_device_train_batch_size=6)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]
    assert trainer.predict(data).predictions.shape == (6, 3)
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    with torch.no_grad():
        assert torch.equal(subclassed(model)(**batch).loss, model.train()(**batch).loss)
