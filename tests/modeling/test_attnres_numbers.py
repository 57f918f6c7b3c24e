# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Numbers of AttnRes: fixed numbers of another implementation, and a plain model in float64."""

import pytest
import torch
from float64_checks import SMALL, backbones, check_gradients, check_logits, exact, inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_attnres import plain_attnres_logits
from torch import nn

from depthmix import AttnResConfig, AttnResForCausalLM, AttnResModel
from depthmix.modeling.decoder_layers import DecoderAttention


FUSED_NORMS = ("input_layernorm", "post_attention_layernorm", "norm")


def listed(numbers):
    return torch.tensor([float(number) for number in numbers.split()], dtype=torch.float64)


class ToySubLayer(nn.Module):
    """A rolled, scaled and shifted form of what a sub-layer reads; `number` counts from one."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.read = None

    def forward(self, hidden_states, **kwargs):
        self.read = hidden_states
        output = (0.5 + 0.1 * self.number) * hidden_states.roll(self.number, -1) + 0.05 * self.number
        return (output, None) if kwargs else output


class Recorder(nn.Module):
    """A norm that is called, and so sees the mix."""

    def __init__(self):
        super().__init__()
        self.read = None

    def forward(self, mixed):
        self.read = mixed
        return mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + 1e-5)


class TestToyNetwork:
    """Three layers of toy sub-layers on one token; what each of them and the final norm read."""

    EMBEDDING = "1 -.5 .25 2"
    # the network of the vectors has five sub-layers, whose final mix is what a sixth sub-layer reads
    VECTORS = {
        "full": (
            {"attnres_variant": "full"},
            [
                "1 -.5 .25 2",
                "1.04730593 .05496312 .01139479 1.05668229",
                ".76605223 .37080619 .33254421 .77850878",
                ".76039471 .40233995 .51846898 .89643869",
                ".87766704 .45546132 .57211684 1.01549876",
                "1.01562816 .60624811 .59887283 1.02073680",
            ],
            {
                1: ".48164863 .51835137",
                4: ".21254818 .24233509 .13783420 .19236184 .21492068",
                5: ".18193523 .21146121 .10006939 .15328524 .17836688 .17488205",
            },
        ),
        "block": (
            {"attnres_block_size": 2},
            [
                "1 -.5 .25 2",
                "1.04730593 .05496312 .01139479 1.05668229",
                "1.10244088 .59769497 .56674180 1.15392621",
                ".95994774 .58946361 .76257092 1.16771415",
                "1.34746454 .82885017 1.08125118 1.64988374",
                "1.39779116 .93377327 1.02461573 1.51860894",
            ],
            {
                2: ".49280970 .50719030",
                3: ".34119888 .32556162 .33323950",
                4: ".35221341 .31157702 .33620957",
                5: ".27065596 .22197857 .24503201 .26233346",
            },
        ),
        "cumulative": (
            {"attnres_variant": "cumulative", "attnres_block_size": 4, "attnres_recency_bias": True},
            [
                "1 -.5 .25 2",
                "2.01168674 .02902035 .05502078 2.16702056",
                "2.10965713 1.04641981 1.01750643 2.26790513",
                "2.64429566 1.55674660 2.06740713 3.26642449",
                "3.63322603 2.19336914 2.87018155 4.45914479",
                "4.61901370 3.00955892 3.39684883 5.12864841",
                "5.12986946 3.81980055 4.15688287 5.61720893",
            ],
            {
                0: ".06008665 .93991335",
                3: ".11419650 .88580350",
                4: ".12826025 .12905863 .74268112",
                6: ".19860953 .18386158 .61752888",
            },
        ),
    }

    def build(self, fields):
        config = AttnResConfig(
            **{"hidden_size": 4, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 5},
            **{"intermediate_size": 4, "num_hidden_layers": 3, "rms_norm_eps": 1e-5, "use_qk_norm": False},
            **fields,
        )
        model = AttnResModel(config).double().eval()
        mixers = [mixer for layer in model.layers for mixer in (layer.attn_mixer, layer.mlp_mixer)]
        with torch.no_grad():
            for site, mixer in enumerate([*mixers, model.output_mixer], start=1):
                mixer.pseudo_query.copy_(torch.tensor([0.1 * site, -0.05 * site, 0.2, -0.1]))
                if mixer.recency_bias is not None:
                    mixer.norm.weight.copy_(torch.tensor([1, 1.1, 1.2, 1.3]))
                    mixer.recency_bias.fill_(3 - 0.25 * site)
        for i, layer in enumerate(model.layers):
            layer.self_attn, layer.mlp = ToySubLayer(2 * i + 1), ToySubLayer(2 * i + 2)
        return model

    # with gradients the model mixes for a whole block, without them each layer does so for itself
    @pytest.mark.parametrize("with_gradients", [True, False])
    @pytest.mark.parametrize("variant", VECTORS)
    def test_vectors(self, variant, with_gradients):
        fields, mixes, weights = self.VECTORS[variant]
        model = self.build(fields)
        norms = [Recorder() for _ in range(7)]
        for i, layer in enumerate(model.layers):
            layer.input_layernorm, layer.post_attention_layernorm = norms[2 * i], norms[2 * i + 1]
        model.norm = norms[6]
        embeds = listed(self.EMBEDDING).view(1, 1, 4).expand(1, 2, 4)
        with torch.set_grad_enabled(with_gradients):
            outputs = model(inputs_embeds=embeds, output_depth_weights=True)
        for norm, expected in zip(norms, mixes, strict=False):
            torch.testing.assert_close(norm.read[0, 1], listed(expected), atol=2e-8, rtol=0)
        for site, expected in weights.items():
            found = outputs.depth_weights[site][0, 1].double()
            torch.testing.assert_close(found, listed(expected), atol=2e-8, rtol=0)

    @pytest.mark.parametrize("variant", VECTORS)
    def test_fused_norms(self, variant):
        fields, mixes, _ = self.VECTORS[variant]
        model = self.build(fields)
        outputs = model(inputs_embeds=listed(self.EMBEDDING).view(1, 1, 4))
        read = [sub_layer.read for layer in model.layers for sub_layer in (layer.self_attn, layer.mlp)]
        for found, expected in zip([*read, outputs.last_hidden_state], mixes, strict=False):
            expected = listed(expected)
            expected = expected / (expected.square().mean() + 1e-5).sqrt()
            torch.testing.assert_close(found[0, 0], expected, atol=2e-8, rtol=0)

    def test_blocks_of_one_are_full(self):
        embeds = listed(self.EMBEDDING).view(1, 1, 4)
        states = [
            self.build(fields)(inputs_embeds=embeds).last_hidden_state
            for fields in ({"attnres_block_size": 1}, {"attnres_variant": "full"})
        ]
        assert torch.equal(*states)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("before_rope", "-.56620017 .78164023 1.69687857 .62372442"),
        ("after_rope", "-.67909582 .79363839 1.80977422 .67171707"),
    ],
)
def test_key_norm_position(place, expected):
    config = AttnResConfig(
        **{
            "hidden_size": 4,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 4,
            "num_hidden_layers": 1,
        },
        **{"rms_norm_eps": 1e-5, "key_norm_position": place},
    )
    attention = DecoderAttention(config, 0)
    with torch.no_grad():
        attention.k_proj.weight.copy_(torch.eye(4))
        attention.k_norm.weight.copy_(torch.tensor([1, 0.5, 2, 1.5]))
    angles = 3 * torch.tensor([1.0, 0.01]).repeat(2)[None, None]
    flat = attention.project(torch.tensor([[[1, 2, -1, 0.5]]]))
    _, key, _ = attention.finish(*flat, (angles.cos(), angles.sin()))
    assert key.shape == (1, 1, 1, 4)
    torch.testing.assert_close(key[0, 0, 0].double(), listed(expected), atol=1e-6, rtol=0)


def left_to_the_operation(fields, fused):
    """The norms that stay as they are since an operation takes their weights; with additive routing none does."""
    return () if fields.get("attnres_routing") == "additive" else fused


@st.composite
def architectures(draw):
    variant = draw(st.sampled_from(["block", "block", "full", "cumulative"]))
    sizes = {"block": [None, 1, 2, 3, 4, 5, 20], "full": [None, 1], "cumulative": [None, 2, 4, 20]}
    return draw(backbones()) | {
        "attnres_variant": variant,
        "attnres_block_size": draw(st.sampled_from(sizes[variant])),
        "attnres_routing": draw(st.sampled_from(["replace", "replace", "additive"])),
        "attnres_recency_bias": draw(st.booleans()),
        "attnres_scale": "mean" if variant == "cumulative" else draw(st.sampled_from(["mean", "sum"])),
    }


@settings(
    deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    fields=architectures(),
    given_inputs=inputs(),
    with_gradients=st.booleans(),
    kept=st.sampled_from([FUSED_NORMS, ()]),
)
def test_logits_equal_the_plain_model(build, fields, given_inputs, with_gradients, kept):
    model = exact(build(model_class=AttnResForCausalLM, **fields), left_to_the_operation(fields, kept))
    with torch.set_grad_enabled(with_gradients):
        check_logits(model, plain_attnres_logits, given_inputs)


@pytest.mark.parametrize(
    "fields",
    [
        {"attnres_block_size": 3, "num_hidden_layers": 4, "attnres_recency_bias": True},
        {"attnres_block_size": 3, "num_hidden_layers": 3, "attnres_recency_bias": True, "attnres_routing": "additive"},
        {"attnres_block_size": 4, "num_hidden_layers": 3, "attnres_scale": "sum", "tie_word_embeddings": True},
        {"attnres_variant": "full", "num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True},
        {"attnres_variant": "cumulative", "attnres_block_size": 4, "num_hidden_layers": 4, "use_qk_norm": False},
    ],
)
def test_gradients_equal_those_of_the_plain_model(build, token_ids, fields):
    model = exact(build(model_class=AttnResForCausalLM, **SMALL, **fields), left_to_the_operation(fields, FUSED_NORMS))
    check_gradients(model, plain_attnres_logits, token_ids(2, 5), lambda name: "layers.0.attn_mixer." in name)
