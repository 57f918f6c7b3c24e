# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""examples/check_release.py: the loss of every alternative that the release leaves open."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from depthmix.conversion import ConversionError, convert


pytestmark = pytest.mark.once
WORDS = [f"w{i}" for i in range(11)]
TEXT = " ".join(WORDS[i] for i in (1, 5, 3, 7, 2, 9, 4, 4, 8, 6))
IDS = torch.tensor([[1, 5, 3, 7, 2, 9, 4, 4, 8, 6]])


@pytest.fixture(scope="module")
def check_release():
    path = Path(__file__).parents[2] / "examples" / "check_release.py"
    spec = importlib.util.spec_from_file_location("check_release", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(released_source):
    """`source(**keys)` writes released weights with a tokenizer of words."""

    def make(tensors=None, **keys):
        folder = released_source(torch_dtype="float32", max_position_embeddings=6, **keys)
        kept = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(kept | (tensors or {}), folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        return folder

    return make


@torch.no_grad()
def loss_of(folder, **fields):
    """In two windows, whose losses are weighted by their predictions."""
    model = AutoModelForCausalLM.from_pretrained(folder, **fields).eval()
    losses = [
        nn.functional.cross_entropy(model(window).logits[0, :-1], window[0, 1:], reduction="sum")
        for window in IDS.split(6, dim=1)
    ]
    return (sum(losses) / 8).item()


def test_depth_attention(check_release, source, tmp_path, capsys):
    folder = source(use_depth_attention=True, depth_attention_stride=1)
    (tmp_path / "text").write_text(TEXT)
    check_release.main([str(folder), "--text", str(tmp_path / "text"), "--device", "cpu"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert "the released Depth-Attention layout (use_depth_attention is true)" in head
    found = {line[10:]: float(line[:8]) for line in lines}
    assert len(found) == 3 and list(found.values()) == sorted(found.values())
    convert(folder, tmp_path / "converted", progress=False)
    for word, place in (("after", "after_rope"), ("before", "before_rope")):
        (loss,) = [value for name, value in found.items() if name.startswith(f"key norm {word} the rotation (")]
        assert loss == pytest.approx(loss_of(tmp_path / "converted", key_norm_position=place), abs=6e-5)

    # a norm that passes the key on, in layer 0, and that key normalised for its own attention
    (raw,) = [value for name, value in found.items() if "layer 0 hands on its key without it" in name]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    attention, norm, keys = model.model.layers[0].self_attn, model.model.layers[0].self_attn.k_norm, []
    attention.k_norm = nn.Identity()
    attention.k_norm.register_forward_hook(lambda _, __, key: keys.append(key))
    original = attention.finish

    def finish(*args, **kwargs):
        query, key, value = original(*args, **kwargs)
        return query, norm(key), value

    attention.finish = finish
    attention.register_forward_hook(lambda _, __, output: (*output[:3], keys.pop(), *output[4:]))
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(model(window).logits[0, :-1], window[0, 1:], reduction="sum")
            for window in IDS.split(6, dim=1)
        ]
    assert raw == pytest.approx((sum(losses) / 8).item(), abs=6e-5)
    assert len({round(value, 4) for value in found.values()}) == 3


def test_attnres_without_recency_bias(check_release, source, tmp_path):
    torch.manual_seed(0)
    sites = [f"layers.{i}.attnres_{kind}_aggregator" for i in range(4) for kind in ("attn", "mlp")]
    tensors = {
        f"model.{site}.{name}": torch.randn(8)
        for site in (*sites, "attnres_final_aggregator")
        for name in ("pseudo_query", "norm.weight")
    }
    folder = source(tensors, attnres_block_size=4)
    losses = dict(check_release.compare(str(folder), TEXT, folder=tmp_path))
    assert len(losses) == 4
    for name, loss in losses.items():
        fields = {"key_norm_position": "after_rope" if "norm after" in name else "before_rope"}
        if name.startswith("snapshots"):
            fields |= {"attnres_variant": "cumulative", "attnres_recency_bias": False}
        assert loss == pytest.approx(loss_of(tmp_path / "converted", **fields), abs=1e-5)


def test_what_is_not_of_the_release_is_refused(check_release, qwen3_source, source, tmp_path):
    with pytest.raises(ConversionError, match="is Qwen3: nothing is open about it"):
        check_release.compare(str(qwen3_source()), TEXT, folder=tmp_path)
    with pytest.raises(ConversionError, match="The text has 1 tokens"):
        check_release.compare(str(source()), "w1", folder=tmp_path)
