# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""TRL's trainers, a few steps each: supervised fine-tuning, packed and padding-free, DPO, GRPO and reward models."""

import copy

import pytest
import torch
from datasets import Dataset
from family_models import AWAKE_FIELDS, TINY, fields_of, ids_of, new_model, wake


trl = pytest.importorskip("trl")
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer  # noqa: E402


# TRL 1.16 asks transformers 5.24 under an old name
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


@pytest.fixture
def settings(tmp_path):
    return {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "max_length": 24,
        "disable_tqdm": True,
    }


@pytest.fixture
def model(pair):
    return wake(new_model(pair, **AWAKE_FIELDS[pair.method]))


def assert_trained(trainer, model):
    """Finite losses, and every parameter that is trained got a gradient and moved."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(torch.tensor(losses).isfinite())
    # the first sub-layer and the first value have nothing to mix
    still = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert len(still) <= 0.1 * len(before), still
    return losses


@pytest.mark.parametrize(
    "options", [{}, {"packing": True}, {"padding_free": True, "max_length": None}], ids=["padded", "packed", "flat"]
)
def test_supervised(model, options, settings, tokenizer, words):
    rows = Dataset.from_list([{"text": words(5 + 3 * i, seed=i)} for i in range(6)])
    trainer = SFTTrainer(model, args=SFTConfig(**settings | options), train_dataset=rows, processing_class=tokenizer)
    assert_trained(trainer, model)


def test_padding_free_is_the_padded_loss(model, settings, tokenizer, words):
    """Texts in one row with positions of their own do not see each other."""
    rows = Dataset.from_list([{"text": words(5 + 3 * i, seed=i)} for i in range(2)])
    losses = []
    for options in ({}, {"padding_free": True, "max_length": None}):
        arguments = SFTConfig(**settings | {"max_steps": 1, "learning_rate": 0.0} | options)
        trainer = SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        losses.append(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_preferences(model, settings, tokenizer, words):
    rows = Dataset.from_list(
        [
            {"prompt": words(4, seed=i), "chosen": words(5, seed=10 + i), "rejected": words(6, seed=20 + i)}
            for i in range(4)
        ]
    )
    trainer = DPOTrainer(
        model, copy.deepcopy(model), args=DPOConfig(**settings), train_dataset=rows, processing_class=tokenizer
    )
    losses = assert_trained(trainer, model)
    # before the first step the model equals its reference
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)


def test_reward_model(pair, settings, tokenizer, words):
    torch.manual_seed(0)
    head = pair.find_class("ForSequenceClassification")
    model = wake(head(pair.find_class("Config")(**fields_of(pair) | AWAKE_FIELDS[pair.method] | {"num_labels": 1})))
    rows = Dataset.from_list([{"chosen": words(5, seed=i), "rejected": words(7, seed=20 + i)} for i in range(4)])
    trainer = RewardTrainer(model, args=RewardConfig(**settings), train_dataset=rows, processing_class=tokenizer)
    assert_trained(trainer, model)
    assert model(ids_of(1, 5)).logits.shape == (1, 1)
    assert model.config.vocab_size == TINY["vocab_size"]


def test_grpo(model, settings, tokenizer, words):
    rows = Dataset.from_list([{"prompt": words(4 + i, seed=i)} for i in range(6)])
    del settings["max_length"]
    own = {"num_generations": 2, "max_completion_length": 6, "temperature": 1.5}

    def reward(completions, **kwargs):
        # of groups whose completions are all alike nothing would be learned
        return [float(len(set(completion.split()))) + 0.1 * i for i, completion in enumerate(completions)]

    trainer = GRPOTrainer(
        model, reward, args=GRPOConfig(**settings | own), train_dataset=rows, processing_class=tokenizer
    )
    assert_trained(trainer, model)
