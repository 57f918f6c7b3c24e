# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Value residual learning: what attention reads, beside equation 5 of ResFormer (arXiv 2410.17897) written out."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthmix.families import FAMILIES


FIELDS = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}


@pytest.fixture(params=["value_residual_qwen3", "value_residual_olmo2"])
def build(request):
    def build(**fields):
        pair = FAMILIES[request.param]
        torch.manual_seed(0)
        return pair.find_class("ForCausalLM")(pair.find_class("Config")(**FIELDS | fields)).eval()

    return build


@torch.no_grad()
def test_values_are_weighted_sums_with_the_first(build, token_ids, monkeypatch):
    read, projected = [], []

    def attention(module, query, key, value, attention_mask, **kwargs):
        read.append(value)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "recording", attention)
    model = build(attn_implementation="recording")
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.v_proj.register_forward_hook(lambda _, __, value: projected.append(value))
        if i > 0:
            layer.self_attn.value_mix.weight.copy_(torch.tensor([0.3 * i, 1.0 - 0.1 * i]))
    model(token_ids(2, 7))
    by_heads = [value.view(2, 7, 2, -1).transpose(1, 2) for value in projected]
    assert len(read) == len(by_heads) == 4 and torch.equal(read[0], by_heads[0])
    for i in range(1, 4):
        expected = 0.3 * i * by_heads[0] + (1.0 - 0.1 * i) * by_heads[i]
        torch.testing.assert_close(read[i], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("start", "weights"), [("equal", [0.5, 0.5]), ("identity", [0.0, 1.0])])
def test_starts_have_gradients_and_move(build, token_ids, start, weights):
    model, ids = build(value_residual_init=start).train(), token_ids(2, 9)
    mixes = [layer.self_attn.value_mix.weight for layer in model.model.layers[1:]]
    assert all(mix.tolist() == weights for mix in mixes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids, labels=ids).loss.backward()
    # OLMo2's norm after the attention takes the scale of the values away, so only the ratio of the weights counts
    has_scale = model.config.depth_backbone.norms[1] is None
    counted = slice(None) if has_scale or start == "equal" else slice(1)
    assert all((mix.grad[counted].abs() > 1e-7).all() for mix in mixes)
    optimizer.step()
    assert all((mix.detach() != torch.tensor(weights))[counted].all() for mix in mixes)


def test_fixed_weights_are_not_trained(build, token_ids, tmp_path):
    model, ids = build(value_residual_learnable=False), token_ids(2, 9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    for each in (model, loaded, loaded.bfloat16()):
        assert not any("value_mix" in name for name, _ in each.named_parameters())
        mix = each.model.layers[1].self_attn.value_mix.weight
        assert mix.tolist() == [0.5, 0.5] and mix.dtype is torch.float32
