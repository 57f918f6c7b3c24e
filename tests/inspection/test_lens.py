# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The logit lens over layers, loops and sources."""

import pytest
import torch

from depthmix.inspection import ablate, depth_weights, logit_lens


pytestmark = pytest.mark.once


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)


def test_the_last_layer_is_the_model(model, inputs):
    found = logit_lens(model, inputs)
    loops = getattr(model.config, "num_loops", 1)
    assert len(found.labels) == 1 + loops * model.config.num_hidden_layers == len(found.logits)
    assert found.labels[0] == "embeddings"
    counts = inputs["attention_mask"].bool()
    assert_equal(found.logits[-1][counts], model(**inputs).logits[counts])
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    assert_equal(found["embeddings"], model.lm_head(model.model.norm(embeddings)))


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("attnres", {"attnres_block_size": 2}),
        ("attnres", {"attnres_block_size": 3, "attnres_scale": "sum"}),
        ("attnres", {"attnres_variant": "cumulative", "attnres_block_size": 2}),
        ("attnres", {"attnres_block_size": 2, "attnres_routing": "additive"}),
        ("denseformer", {}),
        ("mhc", {"mhc_num_streams": 3}),
        ("depth_qwen3", {"depth_stride": 1}),
        ("moda_qwen3", {}),
        ("value_residual_qwen3", {}),
    ],
)
def test_a_layer_is_the_model_that_ends_there(small, inputs, model_type, fields):
    """A model with fewer layers and the same weights."""
    model, shorter = small(model_type, **fields), small(model_type, num_hidden_layers=2, **fields)
    weights = model.state_dict()
    shorter.load_state_dict({name: weights[name] for name in shorter.state_dict()})
    counts = inputs["attention_mask"].bool()
    assert_equal(logit_lens(model, inputs)["layer 1"][counts], shorter(**inputs).logits[counts])


def test_loops(small, inputs):
    model = small("depth_llama", depth_stride=2, num_loops=2)
    loops, layers = logit_lens(model, inputs, over="loops"), logit_lens(model, inputs)
    assert loops.labels == ("loop 0", "loop 1")
    assert torch.equal(loops["loop 0"], layers["loop 0, layer 2"])
    assert_equal(loops["loop 1"], model(**inputs).logits)
    # the first pass is the model that has no second one
    once = small("depth_llama", depth_stride=2, num_loops=1)
    once.load_state_dict(model.state_dict())
    assert_equal(loops["loop 0"], once(**inputs).logits)


def test_sources_add_up(model, inputs):
    """What the sources of a site add to the hidden states, together, is what its mix adds."""
    parts, head, norm = {}, model.lm_head, model.model.norm
    rows = depth_weights(model, inputs)
    # the states themselves, seen where the final norm gets them
    states = []
    hook = norm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    found = logit_lens(model, inputs, over="sources")
    hook.remove()
    labels = [f"{source} in {row.site.target}" for row in rows for source in row.site.sources]
    assert [*found.labels] == labels and found.logits.shape == (len(labels), 2, 7, 61)
    parts = dict(zip(labels, states[-len(labels) :], strict=True))
    assert_equal(found.logits[1], head(norm(parts[labels[1]])))

    # by what is missing without the source: the next hidden states of a last site without a norm after its attention
    site, source = rows[-1].site, rows[-1].site.sources[0]
    family = model.config.model_type
    if not family.startswith(("depth_qwen3", "depth_llama", "moda_qwen3", "value_residual_qwen2")):
        return
    outputs = []
    layer = model.model.layers[site.number % model.config.num_hidden_layers]
    hook = layer.self_attn.register_forward_hook(lambda _, __, out: outputs.append(out[0]))
    with torch.no_grad():
        ablate(model, inputs, source, site.target)
        without = outputs[-1]
        ablate(model, inputs, site.sources, site.target)
        nothing = outputs[-1]
        with_all = ablate(model, inputs, site.sources[1:], site.target) and outputs[-1]
    hook.remove()
    counts = inputs["attention_mask"].bool()
    assert_equal(parts[f"{source} in {site.target}"][counts], (with_all - nothing)[counts])
    others = sum(parts[f"{each} in {site.target}"] for each in site.sources[1:])
    assert_equal(others[counts], (without - nothing)[counts])


def test_positions(small, inputs):
    model = small("attnres")
    whole = logit_lens(model, inputs).logits
    assert_equal(logit_lens(model, inputs, positions=[0, -1]).logits, whole[:, :, [0, -1]])
    with pytest.raises(ValueError, match=r"positions=\[7\]: must be places of 7 tokens"):
        logit_lens(model, inputs, positions=[7])


def test_refuses(small, inputs):
    with pytest.raises(ValueError, match="over='heads': must be one of layers, loops, sources"):
        logit_lens(small("attnres"), inputs, over="heads")
    with pytest.raises(ValueError, match="the layers of this model run once"):
        logit_lens(small("attnres"), inputs, over="loops")
    with pytest.raises(ValueError, match="the model mixes nothing"):
        logit_lens(small("depth_qwen3", depth_stride=0), inputs, over="sources")
    with pytest.raises(ValueError, match="must have a language-model head"):
        logit_lens(small("attnres", ending="Model"), inputs)
