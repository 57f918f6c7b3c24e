# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`examples/evaluate_models.py`: every token once, with what it may see, and bits of bytes."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import depthmix


@pytest.fixture(scope="module")
def evaluate(example):
    return example("evaluate_models")


@pytest.fixture(scope="module")
def converted(evaluate, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "model"
    depthmix.convert(evaluate.SMALL_MODEL, folder, to="depth_attention", retrofit=False, progress=False)
    return folder


@pytest.mark.parametrize("length, stride", [(2, 1), (8, 7), (8, 1), (9, 4), (64, 63)])
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 10, 40])
def test_every_token_is_new_once(tokens, length, stride, evaluate):
    found = evaluate.windows(tokens, length, stride)
    assert [i for _, end, new in found for i in range(new, end)] == list(range(1, tokens))
    for begin, end, new in found:
        assert end - begin <= length and new > begin
        assert begin == 0 or new - begin >= length - stride


def test_losses_are_those_of_single_tokens(evaluate, converted):
    """Each token from the ids before it in its window, by a forward of its own."""
    tokenizer = AutoTokenizer.from_pretrained(converted)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    texts = ["def f(a):\n    return a + 1 # µ\n", "", "x"]
    found = evaluate.measure(model, tokenizer, texts, length=6, stride=3)
    nats = tokens = 0
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
        for begin, end, new in evaluate.windows(len(ids), 6, 3):
            for i in range(new, end):
                with torch.no_grad():
                    logits = model(torch.tensor([ids[begin:i]])).logits[0, -1]
                nats -= logits.log_softmax(-1)[ids[i]].item()
                tokens += 1
    assert found.tokens == tokens and found.bytes == sum(len(text.encode()) for text in texts) == 33
    assert found.nats == pytest.approx(nats, rel=1e-5)


def test_a_model_that_knows_nothing(evaluate, converted, tmp_path, capsys):
    """Equal logits cost the logarithm of the vocabulary for each token."""
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    torch.nn.init.zeros_(model.model.norm.weight)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(converted).save_pretrained(tmp_path / "model")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "def f(a):\n    return a\n"}) + "\n")
    options = [str(tmp_path / "model"), "--data", str(tmp_path / "text.jsonl"), "--length", "16"]
    (found,) = evaluate.main(options).values()
    bits = found.tokens * math.log2(model.config.vocab_size) / 23
    assert found.bits_per_byte == pytest.approx(bits)
    assert f"{bits:.4f} bits per byte" in capsys.readouterr().out


def test_defaults(evaluate, capsys):
    """The small checkpoint is better than its tokenizer alone by far, and its text compresses."""
    (found,) = evaluate.main(["--length", "256"]).values()
    assert 1.0 < found.bits_per_byte < 1.4


@pytest.mark.parametrize("stride", ["0", "8"])
def test_strides_that_cannot_be(stride, evaluate, capsys):
    with pytest.raises(SystemExit):
        evaluate.main(["--length", "8", "--stride", stride])
    assert f"--stride {stride}: must be 1 or more and less than --length 8" in capsys.readouterr().err


def test_lm_eval_is_optional(evaluate, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(SystemExit, match="lm-eval is not installed"):
        evaluate.main(["--data", str(tmp_path / "text.jsonl"), "--tasks", "piqa"])
