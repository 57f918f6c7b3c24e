# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Embeddings and head: resizing, and sharing or not sharing their weights."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def weights(model):
    return {"embedding": model.get_input_embeddings().weight, "head": model.get_output_embeddings().weight}


def is_tied(model) -> bool:
    embedding, head = weights(model).values()
    return embedding is head and embedding.data_ptr() == head.data_ptr()


def save_directly(model, folder):
    model.save_pretrained(folder)


def save_by_trainer(model, folder):
    Trainer(model=model, args=TrainingArguments(folder, report_to="none", use_cpu=True)).save_model(folder)


@TIED
def test_resizing(family, tied, build_awake, token_ids, tmp_path):
    model = build_awake(family, tie_word_embeddings=tied)
    kept = {name: weight.detach().clone() for name, weight in weights(model).items()}

    for step, size in enumerate((100, 90)):
        model.resize_token_embeddings(size)
        model.save_pretrained(tmp_path / str(step))
        for resized in (model, AutoModelForCausalLM.from_pretrained(tmp_path / str(step))):
            assert resized.config.vocab_size == resized.vocab_size == size
            assert is_tied(resized) == tied
            for name, weight in weights(resized).items():
                assert weight.shape[0] == size
                rows = min(size, 97)
                assert torch.equal(weight[:rows], kept[name][:rows])
            assert resized(token_ids(2, 8, vocab_size=size)).logits.shape[-1] == size
            assert torch.equal(
                resized(token_ids(2, 8, vocab_size=90)).logits, model(token_ids(2, 8, vocab_size=90)).logits
            )


@TIED
def test_training_on_a_new_token(family, tied, build_awake, token_ids):
    model = build_awake(family, tie_word_embeddings=tied).train()
    model.resize_token_embeddings(100)
    before = {name: weight.detach().clone() for name, weight in weights(model).items()}
    ids = token_ids(2, 8)
    ids[:, 4] = 99
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    for name, weight in weights(model).items():
        assert not torch.equal(weight[99], before[name][99])
    assert model(ids, labels=ids).loss < loss


# embeddings and head are those of all families
@pytest.mark.long
@pytest.mark.sampled(2)
@TIED
@pytest.mark.parametrize("save", [save_directly, save_by_trainer], ids=lambda save: save.__name__)
def test_tying_survives_saving(family, tied, save, build_awake, token_ids, tmp_path):
    model = build_awake(family, tie_word_embeddings=tied)
    save(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (not tied)  # noqa: SIM118 not a dictionary
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert is_tied(model) == is_tied(loaded) == tied
    before = {name: weight.detach().clone() for name, weight in weights(loaded).items()}
    for name, weight in weights(model).items():
        assert torch.equal(weight, before[name])
    ids = token_ids(2, 8)
    loaded(ids, labels=ids).loss.backward()
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()
    after = weights(loaded)
    assert all(not torch.equal(after[name], before[name]) for name in after)
    assert torch.equal(after["embedding"], after["head"]) == tied
