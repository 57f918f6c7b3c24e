# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What servers expect: their own attention function under the models, and continuous batching."""

import copy

import pytest
import torch
from transformers import AutoModel, GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@pytest.fixture
def server_attention(monkeypatch):
    """An attention function as a server registers it, without a mask function; lists what it was called with."""
    calls = []

    def attend(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
        calls.append((module.layer_idx, attention_mask, attention_instances[module.layer_idx], key.shape))
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=scaling, is_causal=True, enable_gqa=True
        )
        return output.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "server", attend)
    return calls


def test_server_runs_the_base_model_over_its_own_attention(family, pattern, build_awake, token_ids, server_attention):
    model = build_awake(family, **pattern)
    with torch.device("meta"):
        served = AutoModel.from_config(copy.deepcopy(model.config), attn_implementation="server")
    assert type(served) is type(model.model)
    assert served.is_backend_compatible()
    served = served.to_empty(device="cpu").eval()
    served.load_state_dict(model.model.state_dict())
    for name, buffer in model.model.named_buffers():
        served.get_buffer(name).copy_(buffer)

    ids = token_ids(1, 12)
    instances = {i: object() for i in range(model.config.num_hidden_layers)}
    with torch.no_grad():
        hidden_states = served(
            input_ids=ids,
            position_ids=torch.arange(12)[None],
            use_cache=False,
            return_dict=False,
            attention_instances=instances,
        )[0]
        expected = model.model(ids).last_hidden_state
    assert (hidden_states - expected).abs().max() <= 2e-5
    assert [layer for layer, *_ in server_attention] == list(instances)
    assert all(mask is None for _, mask, *_ in server_attention)
    assert [instance for *_, instance, _ in server_attention] == list(instances.values())
    # the cache of a layer holds its own key-value heads, however many layers were mixed into them
    assert {shape for *_, shape in server_attention} == {(1, model.config.num_key_value_heads, 12, 16)}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_continuous_batching(family, attention, build_awake, token_ids):
    model = build_awake(family, depth_stride=1)
    model.set_attn_implementation(attention)
    prompts = [token_ids(1, length, seed=length)[0].tolist() for length in (5, 9, 3)]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=0),
        # by default the cache takes most of the memory there is
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64),
        warmup=False,
        progress_bar=False,
    )
    generated = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    assert [generated.get(tuple(prompt)) for prompt in prompts] == expected
