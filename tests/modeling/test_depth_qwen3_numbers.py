# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Numbers of DepthQwen3ForCausalLM: fixed numbers of another implementation, and a plain model in float64."""

import math

import pytest
import torch
from float64_checks import exact, inputs
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plain_depth_qwen3 import plain_depth_qwen3_logits
from torch import nn

from depthmix import DepthQwen3Config, DepthQwen3ForCausalLM


SMALL = {"hidden_size": 24, "intermediate_size": 20, "head_dim": 6}


def plain_logits_of(model, ids, **kwargs):
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    return plain_depth_qwen3_logits(weights, model.config.to_dict(), ids, **kwargs)


def sine_weights(model):
    """Every entry a sine of its indices and of the number of its parameter, in the order of the reference numbers."""
    in_layer = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    in_layer += ("self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    in_layer += ("input_layernorm", "post_attention_layernorm")
    names = ["model.embed_tokens"]
    names += [f"model.layers.{layer}.{name}" for layer in range(4) for name in in_layer]
    names += ["model.norm", "lm_head"]
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {f"{name}.weight" for name in names} == set(shapes)

    weights = {}
    for p, name in enumerate(names):
        shape = shapes[f"{name}.weight"]
        i = torch.arange(shape[0], dtype=torch.float64)
        if len(shape) == 1:
            weights[f"{name}.weight"] = 1 + 0.3 * torch.sin(1.1 * i + 0.5 * p)
        else:
            j = torch.arange(shape[1], dtype=torch.float64)
            weights[f"{name}.weight"] = 0.4 * torch.sin(0.7 * i[:, None] + 1.3 * j + 0.9 * p + 0.2)
    return weights


class TestReferenceVector:
    IDS = torch.tensor([[1, 5, 3, 7, 2, 9]])
    # logits at positions 0 and 5
    FIRST = "-1.112908 -0.478976 0.380226 1.060602 1.242160 0.839511 0.042027 -0.775224 -1.227874 -1.103036 -0.459423"
    LAST = "-1.072875 -0.602970 0.150521 0.833220 1.124042 0.886210 0.231580 -0.531966 -1.045320 -1.067044 -0.586920"
    LOSS = 2.535011622529
    # what is changed, first four logits of position 5, largest deviation anywhere
    DEVIATIONS = {
        "stride 1": ({"depth_stride": 1}, 0, "-1.092387 -0.603272 0.169571 0.862662", 0.0444),
        "window 1": ({"depth_window": 1}, 0, "-1.111018 -0.588045 0.211494 0.911564", 0.0783),
        "key norm first": ({"key_norm_position": "before_rope"}, 0, "-1.007141 -0.623637 0.053173 0.704974", 0.1282),
        "mixing off": ({"depth_stride": 0}, 0, "-0.657379 -0.603039 -0.265080 0.197550", 0.6357),
        "later positions": ({}, 3, "-1.070393 -0.603213 0.147668 0.829098", 0.0188),
    }

    def build(self, **fields):
        config = DepthQwen3Config(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            **({"depth_stride": 2, "key_norm_position": "after_rope"} | fields),
        )
        model = DepthQwen3ForCausalLM(config).double().eval()
        model.load_state_dict(sine_weights(model))
        return model

    @staticmethod
    def listed(numbers):
        return torch.tensor([float(number) for number in numbers.split()], dtype=torch.float64)

    def test_weights(self):
        weights = sine_weights(self.build())
        for name, numbers in (
            ("model.embed_tokens", "0.079468 0.398998 0.133995"),
            ("lm_head", "-0.275364 -0.353215 0.086395"),
        ):
            torch.testing.assert_close(weights[f"{name}.weight"][0, :3], self.listed(numbers), atol=6e-7, rtol=0)

    @torch.no_grad()
    def test_float64(self):
        model = exact(self.build())
        outputs = model(self.IDS, labels=self.IDS)
        torch.testing.assert_close(outputs.logits[0, 0], self.listed(self.FIRST), atol=6e-7, rtol=0)
        torch.testing.assert_close(outputs.logits[0, 5], self.listed(self.LAST), atol=6e-7, rtol=0)
        loss = nn.functional.cross_entropy(outputs.logits[0, :-1], self.IDS[0, 1:])
        assert abs(loss.item() - self.LOSS) < 1e-11
        # transformers computes the loss in fp32
        assert abs(outputs.loss.item() - self.LOSS) < 1e-6
        # six decimals of some logits are not all
        torch.testing.assert_close(outputs.logits, plain_logits_of(model, self.IDS), atol=1e-12, rtol=0)

    @torch.no_grad()
    def test_float32(self):
        outputs = self.build().float()(self.IDS, labels=self.IDS)
        torch.testing.assert_close(outputs.logits[0, 0].double(), self.listed(self.FIRST), atol=1e-5, rtol=0)
        torch.testing.assert_close(outputs.logits[0, 5].double(), self.listed(self.LAST), atol=1e-5, rtol=0)
        assert abs(outputs.loss.item() - self.LOSS) < 1e-5

    @torch.no_grad()
    @pytest.mark.parametrize("change", DEVIATIONS)
    def test_what_changes_give(self, change):
        fields, shift, numbers, largest = self.DEVIATIONS[change]
        model = exact(self.build(**fields))
        positions = torch.arange(6)[None] + shift
        logits = model(self.IDS, position_ids=positions).logits
        torch.testing.assert_close(logits[0, 5, :4], self.listed(numbers), atol=6e-7, rtol=0)
        deviation = (logits - exact(self.build())(self.IDS).logits).abs().max().item()
        assert math.isclose(deviation, largest, abs_tol=6e-5)
        plain = plain_logits_of(model, self.IDS, position_ids=positions)
        torch.testing.assert_close(logits, plain, atol=1e-12, rtol=0)


HEADS = ((4, 2), (6, 2), (4, 1), (4, 4))


@st.composite
def architectures(draw):
    layers = draw(st.integers(1, 5))
    heads, kv_heads = draw(st.sampled_from(HEADS))
    fields = SMALL | {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "depth_stride": draw(st.sampled_from([None, 0, 1, 2, 3, 9])),
        "depth_window": draw(st.integers(0, 2)),
        "num_loops": draw(st.sampled_from([1, 1, 2, 3])),
        "key_norm_position": draw(st.sampled_from(["before_rope", "after_rope"])),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if draw(st.booleans()):
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        fields |= {"use_sliding_window": True, "sliding_window": draw(st.integers(1, 4))}
        fields["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    return fields


@settings(
    deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(fields=architectures(), given_inputs=inputs(), attention=st.sampled_from(["eager", "sdpa"]))
@torch.no_grad()
def test_logits_equal_the_plain_model(build, fields, given_inputs, attention):
    ids, ours, plain = given_inputs
    # the eager softmax is an fp32 one, in which the mask of a float64 model is infinite
    assume(attention == "sdpa" or "attention_mask" not in ours)
    model = exact(build(**fields, attn_implementation=attention))
    logits, expected = model(ids, **ours).logits, plain_logits_of(model, ids, **plain)
    real = ours.get("attention_mask", torch.ones_like(ids)).bool()
    tolerance = 1e-10 if attention == "sdpa" else 1e-5
    torch.testing.assert_close(logits[real], expected[real], atol=tolerance, rtol=tolerance)
    assert logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("key_norm_position", ["before_rope", "after_rope"])
def test_logits_in_fp32_with_stock_norms_and_rotation(
    build, token_ids, assert_awake, heads, kv_heads, key_norm_position
):
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "depth_stride": 1}
    assert_awake(build(**fields))
    model = build(**fields, key_norm_position=key_norm_position)
    ids = token_ids(2, 9)
    torch.testing.assert_close(model(ids).logits.double(), plain_logits_of(model, ids), atol=2e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("key_norm_position", ["before_rope", "after_rope"])
def test_logits_with_yarn(build, token_ids, key_norm_position):
    """Cosine and sine are scaled, so the scores of the depth mixing are as well: they use rotated queries and keys."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    fields = {"depth_stride": 1, "key_norm_position": key_norm_position}
    model = build(**fields, rope_parameters=yarn)
    ids = token_ids(2, 9)
    positions = torch.stack([torch.arange(9), torch.arange(9) + 400])
    logits = model(ids, position_ids=positions).logits
    plain = plain_logits_of(model, ids, position_ids=positions)
    # angles of hundreds of radians in fp32
    torch.testing.assert_close(logits.double(), plain, atol=2e-4, rtol=0)
    exact_logits = exact(model)(ids, position_ids=positions).logits
    torch.testing.assert_close(exact_logits, plain, atol=1e-10, rtol=0)
    assert (build(**fields)(ids, position_ids=positions).logits - logits).abs().max() > 0.05


@pytest.mark.parametrize(
    "fields",
    [
        {"depth_stride": 2, "num_hidden_layers": 4},
        {"depth_stride": 1, "key_norm_position": "after_rope", "num_hidden_layers": 3, "tie_word_embeddings": True},
        {"depth_stride": 3, "depth_window": 1, "num_hidden_layers": 4, "num_key_value_heads": 1},
        {"depth_stride": 1, "num_loops": 2, "num_hidden_layers": 2},
    ],
)
def test_gradients_equal_those_of_the_plain_model(build, token_ids, fields):
    model = exact(build(**SMALL, **fields))
    ids = token_ids(2, 5)
    # the plain model shares the parameters
    weights = dict(model.named_parameters())
    losses = [
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        for logits in (model(ids).logits, plain_depth_qwen3_logits(weights, model.config.to_dict(), ids))
    ]
    ours, expected = (torch.autograd.grad(loss, list(weights.values())) for loss in losses)
    for name, ours_, expected_ in zip(weights, ours, expected, strict=True):
        assert expected_.abs().max() > 0, name
        torch.testing.assert_close(
            ours_, expected_, atol=1e-12, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )
