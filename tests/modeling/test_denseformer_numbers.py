# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Numbers of DenseFormer: fixed numbers of another implementation, and a plain model in float64."""

import pytest
import torch
from float64_checks import SMALL, backbones, check_gradients, check_logits, exact, inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_denseformer import plain_denseformer_logits
from torch import nn

from depthmix import DenseFormerConfig, DenseFormerForCausalLM, DenseFormerModel
from depthmix.kernels import depth_average


class ToyAttention(nn.Module):
    """The update of the toy blocks: `number` counts from one."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, hidden_states, **kwargs):
        return 0.1 * self.number * hidden_states.roll(1, -1) + 0.01 * self.number, None


class Nothing(nn.Module):
    def forward(self, hidden_states):
        return torch.zeros_like(hidden_states)


class TestToyNetwork:
    # dilation, period, number of blocks; what follows which block
    VECTORS = [
        (
            *(1, 1, 3),
            {
                1: "1.31 -.44 .235 2.235",
                2: "1.635 -.13 .15 2.095",
                3: "2.6846 .3711 .1741 2.6536",
            },
        ),
        (
            *(2, 1, 4),
            {
                1: "1.21 -.39 .21 2.035",
                2: "1.737 -.178 .177 2.297",
                3: "2.5771 .3341 .1746 2.5836",
                4: "3.42314 1.38054 .34284 2.47404",
            },
        ),
        (
            *(2, 3, 6),
            {
                3: "2.4171 .3541 .1646 2.3761",
                4: "3.40754 1.36094 .34624 2.48194",
                5: "4.69851 3.11471 1.07671 2.70506",
                6: "7.176408 6.377698 3.104008 3.936268",
            },
        ),
    ]

    @pytest.mark.parametrize(("dilation", "period", "depth", "expected"), VECTORS)
    def test_vectors(self, dilation, period, depth, expected):
        config = DenseFormerConfig(
            **{"hidden_size": 4, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 5},
            **{"intermediate_size": 4, "num_hidden_layers": depth, "dwa_dilation": dilation, "dwa_period": period},
        )
        model = DenseFormerModel(config).double().eval()
        model.norm = nn.Identity()
        for i, layer in enumerate(model.layers, start=1):
            layer.input_layernorm, layer.self_attn, layer.mlp = nn.Identity(), ToyAttention(i), Nothing()
            if layer.depth_average is not None:
                with torch.no_grad():
                    weight = layer.depth_average.weight
                    shares = [(-1) ** k * 0.1 * (k + 1) for k in range(len(weight))]
                    weight.copy_(torch.tensor(shares, dtype=torch.float64))
                    weight[-1] = 1
        embeds = torch.tensor([[[1, -0.5, 0.25, 2]]], dtype=torch.float64)
        states = model(inputs_embeds=embeds, output_hidden_states=True).hidden_states
        for block, numbers in expected.items():
            listed = torch.tensor([float(number) for number in numbers.split()], dtype=torch.float64)
            torch.testing.assert_close(states[block][0, 0], listed, atol=2e-8, rtol=0)


@st.composite
def architectures(draw):
    spacing = st.sampled_from([1, 1, 2, 3])
    return draw(backbones()) | {"dwa_dilation": draw(spacing), "dwa_period": draw(spacing)}


@settings(
    deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(fields=architectures(), given_inputs=inputs())
@torch.no_grad()
def test_logits_equal_the_plain_model(build, fields, given_inputs):
    check_logits(exact(build(model_class=DenseFormerForCausalLM, **fields)), plain_denseformer_logits, given_inputs)


@pytest.mark.parametrize("fields", [{"num_hidden_layers": 3}, {"dwa_dilation": 2, "dwa_period": 2}])
def test_gradients_equal_those_of_the_plain_model(build, token_ids, fields):
    model = exact(build(model_class=DenseFormerForCausalLM, **SMALL, **fields))
    check_gradients(model, plain_denseformer_logits, token_ids(2, 5))


class TestOperation:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_rounds_once(self, dtype):
        sources, weight = [torch.randn(3, 5, 8).to(dtype) for _ in range(7)], torch.randn(7).to(dtype)
        expected = sum(w.double() * x.double() for w, x in zip(weight, sources, strict=True))
        with torch.autocast("cpu", torch.bfloat16):
            average = depth_average(sources, weight)
        assert average.dtype is dtype
        # the fp32 sum in between loses next to nothing
        assert (average - expected.to(dtype)).abs().max() <= 1.01 * torch.finfo(dtype).eps * expected.abs().max()

    @pytest.mark.parametrize(
        ("shapes", "weights", "message"),
        [
            ([(2, 3), (2, 3)], 3, r"2 sources, weight of shape \[3\]"),
            ([], 0, r"0 sources"),
            ([(2, 4), (2, 3)], 2, r"sources\[0\] has shape \[2, 4\]: all must have that of the last one, \[2, 3\]"),
        ],
    )
    def test_shapes_that_do_not_fit(self, shapes, weights, message):
        with pytest.raises(ValueError, match=message):
            depth_average([torch.ones(shape) for shape in shapes], torch.ones(weights))
