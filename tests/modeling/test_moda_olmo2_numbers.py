# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Numbers of MoDAOlmo2: a plain model in float64, and the parameter counts of the paper."""

import functools

import pytest
import torch
from float64_checks import exact, inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_moda_olmo2 import plain_moda_olmo2_logits, plain_moda_olmo2_row
from transformers import Olmo2Config, Olmo2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthmix import MoDAOlmo2Config, MoDAOlmo2ForCausalLM
from depthmix.modeling import modeling_moda


SMALL = {"hidden_size": 24, "intermediate_size": 20, "head_dim": 6}
ROWS = {
    "row 3": {"moda_ffn_slots": False},
    "row 4": {},
    "row 5": {"moda_attn_depth_proj": True},
    "FFN slots only": {"moda_attn_slots": False},
    "no slots": {"moda_attn_slots": False, "moda_ffn_slots": False},
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture
def build(build):
    return functools.partial(build, model_class=MoDAOlmo2ForCausalLM)


@st.composite
def architectures(draw):
    heads, kv_heads = draw(st.sampled_from([(4, 2), (6, 2), (4, 1), (4, 4)]))
    fields = ROWS[draw(st.sampled_from(list(ROWS)))] | {
        "hidden_size": 6 * heads,
        "intermediate_size": 20,
        "head_dim": 6,
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "moda_depth_key_mode": draw(st.sampled_from(["sequence", "reader_norm"])),
        "moda_norm_style": draw(st.sampled_from(["olmo2", "pre", "post"])),
        "moda_depth_window": draw(st.sampled_from([None, 2, 3, 5])),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if draw(st.booleans()):
        fields["rope_parameters"] = YARN
    return fields


def plain_logits_of(model, ids, **kwargs):
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    return plain_moda_olmo2_logits(weights, model.config.to_dict(), ids, **kwargs)


@settings(
    deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(fields=architectures(), given_inputs=inputs())
@torch.no_grad()
def test_logits_equal_the_plain_model(build, fields, given_inputs):
    ids, ours, plain = given_inputs
    model = exact(build(**fields))
    logits = model(ids, **ours).logits
    real = ours.get("attention_mask", torch.ones_like(ids)).bool()
    torch.testing.assert_close(logits[real], plain_logits_of(model, ids, **plain)[real], atol=1e-10, rtol=1e-10)
    assert logits.isfinite().all()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"moda_attn_depth_proj": True, "moda_depth_key_mode": "reader_norm", "moda_norm_style": "pre"},
        {"moda_depth_window": 3, "moda_norm_style": "post", "rope_parameters": YARN},
    ],
)
def test_gradients_equal_those_of_the_plain_model(build, token_ids, fields, attention):
    model = exact(build(**SMALL, **fields, num_hidden_layers=3, attn_implementation=attention))
    ids = token_ids(2, 5)
    # the plain model shares the parameters
    weights = dict(model.named_parameters())
    expected = plain_moda_olmo2_logits(weights, model.config.to_dict(), ids)
    coefficients = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    expected = torch.autograd.grad((expected * coefficients).sum(), list(weights.values()))
    found = torch.autograd.grad((model(ids).logits * coefficients).sum(), list(weights.values()))
    for name, one, other in zip(weights, found, expected, strict=True):
        # the eager softmax is in fp32, as in transformers, whatever the dtype
        assert (one - other).norm() <= (1e-4 if attention == "eager" else 1e-9) * other.norm(), name


@torch.no_grad()
def test_attention_weights_are_those_of_the_plain_model(build, token_ids):
    """Columns of tokens, then of slots, oldest first."""
    model = exact(build(**SMALL, num_hidden_layers=4, moda_depth_window=3, attn_implementation="eager"))
    ids, shares = token_ids(1, 5), []
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    plain_moda_olmo2_row(weights, model.config.to_dict(), ids[0].tolist(), range(5), lambda t, s: True, shares)
    attentions, shares = model(ids, output_attentions=True).attentions, iter(shares)
    assert [attention.shape for attention in attentions] == [(1, 4, 5, 5 + n) for n in (0, 2, 3, 3)]
    for attention in attentions:
        for t in range(5):
            for head in range(4):
                found = torch.cat([attention[0, head, t, : t + 1], attention[0, head, t, 5:]])
                torch.testing.assert_close(found, next(shares), atol=1e-6, rtol=0)
    assert next(shares, None) is None


class TestPaper:
    """The 700M model of the paper: its table counts the embeddings once."""

    FIELDS = {
        "vocab_size": 100278,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }
    NUMBERS = {"row 3": 669_045_760, "row 4": 705_745_920, "row 5": 742_446_080, "no slots": 669_045_760}

    @staticmethod
    def count(model_class, config):
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in model_class(config).parameters())

    @pytest.mark.parametrize("row", NUMBERS)
    def test_parameters(self, row):
        config = MoDAOlmo2Config(**self.FIELDS, **ROWS[row])
        assert self.count(MoDAOlmo2ForCausalLM, config) == self.NUMBERS[row]

    def test_parameters_of_the_baselines(self):
        for layers, number in ((36, 669_045_760), (38, 700_510_208)):
            config = Olmo2Config(**self.FIELDS | {"num_hidden_layers": layers})
            assert self.count(Olmo2ForCausalLM, config) == number

    def test_slots(self):
        """What all layers together read."""
        for row, number in {"row 3": 630, "row 4": 1260, "row 5": 1260}.items():
            config = MoDAOlmo2Config(**self.FIELDS, **ROWS[row])
            assert sum(stop - start for start, stop in config.depth_slots) == number


def attention_with_sinks(module, query, key, value, attention_mask, scaling, **kwargs):
    """What the attention of a server does with queries that come twice, the second time beside a sink."""
    batch, _, tokens, _ = query.shape
    group = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    scores = (query @ keys.mT * scaling).masked_fill(hidden, float("-inf"))
    if module.first_slot < module.last_slot:
        sinks = module.sinks(key.shape[1]).to(scores).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values).transpose(1, 2).reshape(batch * tokens, -1), None


@torch.no_grad()
@pytest.mark.parametrize(
    "fields", [{}, {"moda_gate": True}, {"moda_depth_key_mode": "reader_norm"}, {"num_key_value_heads": 1}], ids=str
)
def test_a_server_merges_slots_by_a_sink(build, token_ids, fields, monkeypatch):
    model = exact(build(**SMALL, **fields, num_hidden_layers=4))
    for name, parameter in model.named_parameters():
        if "depth_gate" in name:
            parameter.copy_(torch.linspace(-0.2, 1, len(parameter)))
    ids = token_ids(1, 9)
    expected = model(ids).logits
    monkeypatch.setattr(modeling_moda, "SERVER_IMPLEMENTATIONS", {"with_sinks"})
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "with_sinks", attention_with_sinks)
    model.config._attn_implementation = "with_sinks"
    found = model(ids, attention_mask=torch.zeros(1, 1, 9, 9), use_cache=False).logits
    # the sink, e^30, leaves ten digits of what tells the outputs apart
    assert (found - expected).norm() < 1e-5 * expected.norm()
