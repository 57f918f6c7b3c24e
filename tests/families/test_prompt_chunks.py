# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Prompts in chunks: the results of the whole prompt, and when a prompt is cut."""

import pytest
import torch
from family_models import AWAKE_FIELDS, CACHE_NAME, TOLERANCE, ids_of, new_model, wake
from transformers import DynamicCache, StaticCache

from depthmix.families import FAMILIES
from depthmix.modeling import prompt_chunks


pytestmark = pytest.mark.once
# each method, and each kind of attention: all before, windows, no rotation, flat norms, experts
PAIRS = [
    *("depth_qwen2", "attnres", "denseformer", "mhc", "moda_olmo2", "moda_llama", "value_residual_llama"),
    *("depth_mistral", "depth_smollm3", "attnres_olmo3", "attnres_llama", "denseformer_olmoe"),
]


def new_awake(name, **fields):
    pair = next(pair for key, pair in FAMILIES.items() if key == name or pair.model_type == name)
    return wake(new_model(pair, **AWAKE_FIELDS[pair.method] | fields)), TOLERANCE.get(pair.backbone.model_type, 5e-5)


def known(names):
    types = {pair.model_type for pair in FAMILIES.values()}
    return [name for name in names if name in types]


@pytest.fixture
def pieces(monkeypatch):
    """How many tokens each forward of a base model has had."""
    seen = []
    real = prompt_chunks._in_chunks

    def spied(model, call, *args):
        def counted(**arguments):
            ids, embedded = arguments["input_ids"], arguments["inputs_embeds"]
            seen.append((ids if embedded is None else embedded).shape[1])
            return call(**arguments)

        return real(model, counted, *args)

    monkeypatch.setattr(prompt_chunks, "_in_chunks", spied)
    return seen


@pytest.mark.parametrize("name", known(PAIRS))
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_chunks_give_what_the_whole_prompt_gives(name, padded, pieces):
    model, tolerance = new_awake(name)
    ids = ids_of(2, 21)
    mask = torch.ones_like(ids)
    # SmolLM3's layers without rotation need the real positions with padding
    positions = {}
    if padded:
        mask[0, :9] = 0
        positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    asked = {"output_hidden_states": True, "output_router_logits": False, **positions}
    asked |= {} if model.model.no_depth_weights else {"output_depth_weights": True}
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    whole = model(ids, attention_mask=mask, **{CACHE_NAME: caches[0]}, **asked)
    assert not pieces
    model.config.prefill_chunk_tokens = 8
    cut = model(ids, attention_mask=mask, **{CACHE_NAME: caches[1]}, **asked)
    assert pieces == [8, 8, 5]
    real = mask.bool()
    torch.testing.assert_close(cut.logits[real], whole.logits[real], atol=tolerance, rtol=0)
    assert len(cut.hidden_states) == len(whole.hidden_states)
    for one, other in zip(cut.hidden_states, whole.hidden_states, strict=True):
        torch.testing.assert_close(one[real], other[real], atol=tolerance, rtol=0)
    for one, other in zip(cut.depth_weights or (), whole.depth_weights or (), strict=True):
        assert one.shape == other.shape
        tokens_first = [each.movedim(-2, 1)[real] for each in (one, other)]
        torch.testing.assert_close(*tokens_first, atol=tolerance, rtol=0)
    # what comes next reads the same cache
    then = {"attention_mask": torch.cat([mask, mask[:, -1:]], dim=1), "output_router_logits": False}
    if padded:
        then["position_ids"] = positions["position_ids"][:, -1:] + 1
    step = ids_of(2, 1, seed=3)
    later = [model(step, **{CACHE_NAME: cache}, **then).logits for cache in caches]
    torch.testing.assert_close(*later, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", ["attnres", "moda_llama"])
@torch.no_grad()
def test_a_prompt_that_goes_on_from_a_cache(name, pieces):
    model, tolerance = new_awake(name)
    ids = ids_of(1, 24)
    whole = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    model.config.prefill_chunk_tokens = 7
    model(ids[:, :5], **{CACHE_NAME: cache})
    later = model(ids[:, 5:], **{CACHE_NAME: cache}).logits
    assert pieces == [7, 7, 5]
    torch.testing.assert_close(later, whole[:, 5:], atol=tolerance, rtol=0)


@torch.no_grad()
def test_text_and_embeddings(pieces):
    model, tolerance = new_awake("denseformer")
    ids = ids_of(2, 20)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    whole = model.generate(ids, **options)
    expected = model(ids).logits
    model.config.prefill_chunk_tokens = 6
    assert torch.equal(model.generate(ids, **options), whole)
    assert pieces[:4] == [6, 6, 6, 2]
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    torch.testing.assert_close(embedded, expected, atol=tolerance, rtol=0)


def test_what_is_not_cut(pieces):
    model, _ = new_awake("attnres", prefill_chunk_tokens=4)
    ids = ids_of(1, 12)
    # with gradients
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        model(ids, use_cache=False)
        model(ids, **{CACHE_NAME: StaticCache(config=model.config, max_cache_len=16)})
        model.set_attn_implementation("eager")
        model(ids, output_attentions=True)
        assert not pieces
        model(ids)
    assert pieces == [4, 4, 4]


def test_a_setting_that_is_not_followed_is_logged(caplog, monkeypatch):
    model, _ = new_awake("mhc", prefill_chunk_tokens=4)
    said = []
    monkeypatch.setattr(prompt_chunks.logger, "warning_once", said.append)
    with torch.no_grad():
        model(ids_of(1, 12), use_cache=False)
    assert len(said) == 1 and "prefill_chunk_tokens=4" in said[0] and "DynamicCache" in said[0]


@torch.no_grad()
@pytest.mark.parametrize(
    "keywords, reason",
    [
        ({"attention_mask": torch.zeros(1, 1, 10, 10)}, "the attention mask is not one of two dimensions"),
        ({"position_ids": torch.arange(10)[None, None]}, "the positions do not have two dimensions"),
        ({"return_dict": False}, "or is to return a tuple"),
    ],
    ids=["mask", "positions", "tuple"],
)
def test_a_call_that_is_not_cut_says_why(keywords, reason):
    model, _ = new_awake("attnres", prefill_chunk_tokens=4)
    given = {"attention_mask": None, "position_ids": None} | keywords
    others = {name: given.pop(name) for name in ("return_dict",) if name in given}
    cache = DynamicCache(config=model.config)
    found = prompt_chunks.prompt_or_obstacle(model.model, 10, ids_of(1, 10), None, *given.values(), cache, others)
    assert reason in found


def test_auto_cuts_where_it_would_take_much(pieces, monkeypatch):
    model, _ = new_awake("denseformer")
    assert model.config.prefill_chunk_tokens == "auto"
    per_token = 2 * model.model.handed_on_per_token() * 4
    assert per_token == 2 * 4 * 64 * 4
    for name, value in {
        "LEAST": 2,
        "MOST": 6,
        "STEP": 2,
        "WHOLE_BYTES": 6 * per_token,
        "CHUNK_BYTES": 5 * per_token,
    }.items():
        monkeypatch.setattr(prompt_chunks, name, value)
    with torch.no_grad():
        model(ids_of(2, 6))
        assert not pieces
        model(ids_of(2, 9))
        assert pieces == [4, 4, 1]
        # a prompt that fits is not cut for a smaller batch
        model(ids_of(1, 12))
        assert len(pieces) == 3


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "all"])
def test_values_that_are_refused(value):
    with pytest.raises(Exception, match="prefill_chunk_tokens"):
        new_awake("attnres", prefill_chunk_tokens=value)
    model, _ = new_awake("attnres")
    with pytest.raises(Exception, match="prefill_chunk_tokens"), torch.no_grad():
        model.config.prefill_chunk_tokens = value
        model(ids_of(1, 9))
