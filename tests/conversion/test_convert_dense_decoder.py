# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`convert` to denseformer and mhc: vanilla sources keep their function, the released layouts get their own."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from vanilla_models import VANILLA

from depthmix import (
    DenseFormerConfig,
    DenseFormerForCausalLM,
    DepthQwen3Config,
    MHCConfig,
    MHCForCausalLM,
)
from depthmix.conversion import ConversionError, convert, inspect_checkpoint


IDS = torch.tensor([[1, 5, 3, 7, 2, 9]])


@torch.no_grad()
def logits_of(folder, ids=IDS, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()(ids).logits


def written_tensors(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", VANILLA)
class TestVanilla:
    @pytest.mark.parametrize("options", [{}, {"dwa_dilation": 2, "dwa_period": 3}])
    def test_denseformer_is_bit_equal(self, kind, options, vanilla_source, tmp_path, token_ids):
        source = vanilla_source(kind)
        report = convert(source, tmp_path / "converted", to="denseformer", progress=False, **options)
        ids = token_ids(2, 30)
        assert torch.equal(logits_of(tmp_path / "converted", ids), logits_of(source, ids))
        assert "computes exactly what the vanilla checkpoint does" in report.function_note and not report.warnings
        config = DenseFormerConfig.from_pretrained(tmp_path / "converted")
        assert (config.dwa_dilation, config.dwa_period) == tuple(options.values() or (1, 1))
        assert len(report.new) == sum(map(bool, config.average_sources))

    def test_mhc_is_equal_up_to_rounding(self, kind, vanilla_source, tmp_path, token_ids):
        source = vanilla_source(kind)
        options = {"mhc_num_streams": 3, "mhc_sinkhorn_iters": 5}
        report = convert(source, tmp_path / "converted", to="mhc", progress=False, **options)
        ids = token_ids(2, 30)
        assert (logits_of(tmp_path / "converted", ids) - logits_of(source, ids)).abs().max() < 1e-5
        assert "up to rounding" in report.function_note and not report.warnings
        before, after = written_tensors(source), written_tensors(tmp_path / "converted")
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert set(report.new) == after.keys() - before.keys()
        # 8 connections of 8 parameters, and the readout
        assert len(report.new) == 65 and not after["model.layers.1.mlp_connection.projection"].any()
        config = MHCConfig.from_pretrained(tmp_path / "converted")
        assert (config.mhc_num_streams, config.mhc_sinkhorn_iters) == (3, 5)
        assert config.mhc_sinkhorn_order == "rows_first"


@pytest.fixture
def awake_released(released_source):
    """`awake_released(new_tensors, **keys)` writes the released layout with a method's tensors, awake."""

    def make(tensors, **keys):
        folder = released_source(**keys)
        kept = load_file(folder / "model.safetensors")
        torch.manual_seed(1)
        awake = {name: value + 0.3 * torch.randn_like(value) for name, value in tensors.items()}
        save_file(kept | awake, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def by_hand(source, model_class, renames, **fields):
    """The source's weights in our class, read without any code of the conversion."""
    keys = json.loads((source / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "rms_norm_eps")
    model = model_class(model_class.config_class(**{name: keys[name] for name in names}, **fields)).double().eval()
    state = {name: tensor for name, tensor in written_tensors(source).items() if name != "lm_head_layernorm.weight"}
    for old, new in renames.items():
        state = {name.replace(old, new): tensor for name, tensor in state.items()}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor.view(shapes[name]) for name, tensor in state.items() if tensor.numel()})
    return model


@torch.no_grad()
def assert_same_function(converted, model):
    difference = logits_of(converted, dtype=torch.float64) - model(IDS).logits
    # one of the models has rotated in fp32
    assert difference.abs().max() < 1e-6


def released_averages(dilation=1, period=1, dtype=torch.float64):
    """The release's tensors: with an empty one where there is no average."""
    lengths = [0 if i % period else i // dilation + 1 for i in range(1, 5)]
    return {
        f"model.densetransformer_dwa.alphas.{i}": torch.arange(length, dtype=dtype) / 4
        for i, length in enumerate(lengths)
    }


class TestReleasedDenseFormer:
    GENERATIONS = (
        {"baseline_mode": "denseformer", "denseformer_dwa_dilation": 1, "denseformer_dwa_period": 1},
        {"baseline_mode": "DenseTransformer", "recurrent_model": True, "no_residual": False},
        {
            "residual_baseline": "denseformer",
            "densetransformer_dwa_dilation": 1,
            "densetransformer_dwa_period": None,
            "use_depth_attention": False,
            "depth_attention_stride": 24,
            "classifier_dropout": 0.0,
        },
        {"use_qk_norm": ...},
    )
    RENAMES = {f"densetransformer_dwa.alphas.{i}": f"layers.{i}.depth_average.weight" for i in range(4)}

    @pytest.mark.parametrize("keys", GENERATIONS)
    def test_generations(self, keys, awake_released, tmp_path):
        source = awake_released(released_averages(), **keys)
        report = convert(source, tmp_path / "converted", to="denseformer", progress=False)
        config = DenseFormerConfig.from_pretrained(tmp_path / "converted")
        assert (config.dwa_dilation, config.dwa_period, config.key_norm_position) == (1, 1, "after_rope")
        assert (report.dropped, report.new, len(report.renamed)) == (["lm_head_layernorm.weight"], [], 4)
        (warning,) = report.warnings
        assert "Compare the perplexity with that of key_norm_position='before_rope'" in warning
        assert "computes what the released code computes" in report.function_note
        model = by_hand(source, DenseFormerForCausalLM, self.RENAMES, key_norm_position="after_rope")
        assert_same_function(tmp_path / "converted", model)

    @pytest.mark.parametrize(("dilation", "period"), [(2, 1), (1, 2), (2, 3)])
    def test_spacing(self, dilation, period, awake_released, tmp_path):
        keys = {"denseformer_dwa_dilation": dilation, "densetransformer_dwa_period": period}
        source = awake_released(released_averages(dilation, period), **keys)
        convert(source, tmp_path / "converted", to="denseformer", key_norm_position="before_rope", progress=False)
        fields = {"dwa_dilation": dilation, "dwa_period": period}
        assert_same_function(tmp_path / "converted", by_hand(source, DenseFormerForCausalLM, self.RENAMES, **fields))

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"denseformer_dwa_period": 2}, r"densetransformer_dwa\.alphas\.0 in .* is not part of this model"),
            ({"denseformer_dwa_dilation": 2}, r"alphas\.1 in .* has shape \[3\], not \[2\]"),
            ({"denseformer_dwa_dilation": 1.0}, "denseformer_dwa_dilation is 1.0, must be an integer"),
            ({"no_residual": True}, "no_residual is True: DenseFormer always adds the residual"),
            ({"scale_embeds": True}, "scale_embeds is True: DenseFormer does not scale its embeddings"),
            ({"pretraining_tp": 2}, "pretraining_tp is 2: only 1 computes what DenseFormer computes"),
        ],
    )
    def test_refused(self, keys, message, awake_released, tmp_path):
        with pytest.raises(ConversionError, match=message):
            convert(awake_released(released_averages(), **keys), tmp_path / "x", to="denseformer", progress=False)
        assert not (tmp_path / "x").exists()


class TestModuleOfThePaper:
    """Linear layers to one feature, in a stock model."""

    @pytest.mark.parametrize("prefix", ["model.", ""])
    @pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama with everything"])
    def test_function(self, kind, prefix, vanilla_source, tmp_path, token_ids):
        source = vanilla_source(kind)
        plain = logits_of(source, token_ids(2, 9))
        averages = {
            f"{prefix}dwa_modules.alphas.{i}.weight": (torch.ones(1, (i + 1) // 2 + 1) + torch.randn(1, 1)) / 3
            for i in (1, 3)
        }
        save_file(written_tensors(source) | averages, source / "model.safetensors", metadata={"format": "pt"})
        description = inspect_checkpoint(source)
        assert "tensors named `dwa_modules.alphas`" in description.evidence
        assert "Convert it to denseformer" in description.conversions["mhc"]
        options = {"dwa_dilation": 2, "dwa_period": 2}
        report = convert(source, tmp_path / "converted", to="denseformer", progress=False, **options)
        assert len(report.renamed) == 2 and "computes what the source computes" in report.function_note
        model = DenseFormerForCausalLM.from_pretrained(tmp_path / "converted")
        vanilla = written_tensors(source)
        assert all(
            torch.equal(tensor, vanilla[name]) for name, tensor in model.state_dict().items() if name in vanilla
        )
        for i in (1, 3):
            average = averages[f"{prefix}dwa_modules.alphas.{i}.weight"][0]
            assert torch.equal(model.model.layers[i].depth_average.weight, average)
        assert (model(token_ids(2, 9)).logits - plain).abs().max() > 0.05

    def test_spacing_must_fit(self, vanilla_source, tmp_path):
        source = vanilla_source("llama")
        averages = {f"model.dwa_modules.alphas.{i}.weight": torch.ones(1, (i + 1) // 2 + 1) for i in range(4)}
        save_file(written_tensors(source) | averages, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConversionError, match=r"alphas\.1\.weight in .* has shape \[1, 2\], not \[3\]"):
            convert(source, tmp_path / "converted", to="denseformer", progress=False)


def released_connections(streams, size=8):
    entries = streams * (streams + 2)
    connection = {
        "pre_logits": torch.zeros(streams),
        "post_logits": torch.zeros(streams),
        # far from where the iterations have converged
        "residual_logits": 6 * torch.eye(streams),
        "mhc_input_norm.weight": torch.ones(streams * size),
        "mhc_dynamic_projection.weight": torch.zeros(entries, streams * size),
        # created in fp32 whatever the model's dtype
        "alpha_pre": torch.tensor(0.5),
        "alpha_post": torch.tensor(0.5),
        "alpha_res": torch.tensor(0.5),
    }
    tensors = {
        f"model.layers.{i}.{site}_residual_connector.{name}": tensor
        for i in range(4)
        for site in ("attn", "mlp")
        for name, tensor in connection.items()
    }
    return tensors | {"model.residual_stream_projector.reduce_logits": torch.zeros(streams)}


class TestReleasedMHC:
    GENERATIONS = (
        {"baseline_mode": "mhc", "residual_baseline_num_streams": 3, "mhc_num_streams": 3, "mhc_sinkhorn_iters": 20},
        {"baseline_mode": "mhc", "mhc_num_streams": 3, "mhc_alpha_init": 0.01, "recurrent_model": True},
        {"residual_baseline": "mhc", "residual_baseline_num_streams": 3, "mhc_num_streams": 4, "use_qk_norm": ...},
        {"residual_baseline_num_streams": 3, "use_depth_attention": False, "mhc_sinkhorn_iters": None},
    )
    RENAMES = {
        "_residual_connector.mhc_input_norm.weight": "_connection.norm_weight",
        "_residual_connector.mhc_dynamic_projection.weight": "_connection.projection",
        "_residual_connector.alpha_res": "_connection.alpha_residual",
        "_residual_connector.": "_connection.",
        "residual_stream_projector.reduce_logits": "stream_readout.logits",
    }

    @pytest.mark.parametrize("keys", GENERATIONS)
    def test_generations(self, keys, awake_released, tmp_path):
        source = awake_released(released_connections(3), **keys)
        report = convert(source, tmp_path / "converted", to="mhc", progress=False)
        config = MHCConfig.from_pretrained(tmp_path / "converted")
        found = (config.mhc_num_streams, config.mhc_sinkhorn_iters, config.mhc_sinkhorn_order, config.mhc_alpha_init)
        assert found == (3, 20, "rows_first", 0.01)
        assert (report.dropped, report.new, len(report.renamed)) == (["lm_head_layernorm.weight"], [], 65)
        assert ["Compare the perplexity" in warning for warning in report.warnings] == [True]
        fields = {"mhc_num_streams": 3, "mhc_sinkhorn_order": "rows_first", "key_norm_position": "after_rope"}
        model = by_hand(source, MHCForCausalLM, self.RENAMES, **fields)
        assert_same_function(tmp_path / "converted", model)
        # the order of the iterations makes a difference that this test would see
        options = {"mhc_sinkhorn_order": "columns_first"}
        report = convert(source, tmp_path / "other", to="mhc", progress=False, **options)
        assert "another function than the released code: mhc_sinkhorn_order" in report.function_note
        difference = logits_of(tmp_path / "other") - logits_of(tmp_path / "converted")
        assert difference.abs().max() > 1e-5

    def test_default_number_of_streams(self, awake_released, tmp_path):
        convert(awake_released(released_connections(4)), tmp_path / "converted", to="mhc", progress=False)
        assert MHCConfig.from_pretrained(tmp_path / "converted").mhc_num_streams == 4

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"mhc_num_streams": 3}, r"pre_logits in .* has shape \[4\], not \[3\]"),
            ({"mhc_num_streams": "4"}, "mhc_num_streams is '4', must be an integer"),
            ({"baseline_mode": "denseformer"}, "but the tensors are those of the released mHC baseline"),
            ({"no_residual": True}, "no_residual is True: mHC always adds the residual"),
        ],
    )
    def test_refused(self, keys, message, awake_released, tmp_path):
        with pytest.raises(ConversionError, match=message):
            convert(awake_released(released_connections(4), **keys), tmp_path / "x", to="mhc", progress=False)


def test_vanilla_control(released_source, tmp_path):
    """The release's model without mixing becomes every family, as what it is."""
    source = released_source()
    convert(source, tmp_path / "depth_qwen3", to="depth_qwen3", progress=False)
    assert not any(DepthQwen3Config.from_pretrained(tmp_path / "depth_qwen3").depth_sources)
    expected = logits_of(tmp_path / "depth_qwen3", dtype=torch.float32)
    for target in ("attnres", "denseformer", "mhc"):
        convert(source, tmp_path / target, to=target, progress=False)
        assert (logits_of(tmp_path / target, dtype=torch.float32) - expected).abs().max() < 1e-5


# what the seven released configurations say of their method
RELEASED = {
    "Depth-Attention": (
        {"use_depth_attention": True, "depth_attention_stride": 2, "depth_attention_recent_window": 0},
        {},
        "depth_attention",
        ["use_depth_attention is true"],
    ),
    "vanilla": ({"use_depth_attention": False}, {}, "depth_attention", ["use_qk_norm is true", "tensors named"]),
    "AttnRes": (
        {"baseline_mode": "attnres", "attnres_block_size": 4},
        {
            f"model.{site}.{name}": torch.zeros(shape)
            for site in (
                *(f"layers.{i}.attnres_{kind}_aggregator" for i in range(4) for kind in ("attn", "mlp")),
                "attnres_final_aggregator",
            )
            for name, shape in (("pseudo_query", (8,)), ("norm.weight", (8,)), ("recency_bias", ()))
        },
        "attnres",
        ["baseline_mode is 'attnres'", "tensors named `attnres_attn_aggregator.`"],
    ),
    "DenseFormer": (
        {"baseline_mode": "denseformer", "denseformer_dwa_dilation": 1, "denseformer_dwa_period": 1},
        released_averages(),
        "denseformer",
        ["baseline_mode is 'denseformer'", "tensors named `densetransformer_dwa.`"],
    ),
    "mHC": (
        {"baseline_mode": "mhc", "residual_baseline_num_streams": 4, "mhc_num_streams": 4},
        released_connections(4),
        "mhc",
        ["baseline_mode is 'mhc'", "tensors named `attn_residual_connector.`"],
    ),
}


@pytest.mark.parametrize("release", RELEASED)
@pytest.mark.parametrize("by", ["config and tensors", "tensors"])
def test_inspect_recognises_every_release(release, by, awake_released):
    keys, tensors, home, evidence = RELEASED[release]
    if by == "tensors":
        if release == "Depth-Attention":
            pytest.skip("its tensors are those of the vanilla control")
        keys, evidence = {"use_qk_norm": ...}, evidence[1:]
    description = inspect_checkpoint(awake_released(tensors, **keys))
    assert [found.startswith(said) for found, said in zip(description.evidence, evidence, strict=True)] == [
        True
    ] * len(evidence)
    assert description.conversions[home].startswith("yes, to ")
    assert "key_norm_position='after_rope'" in description.conversions[home]
    if release != "vanilla":
        others = {name: text for name, text in description.conversions.items() if name != home}
        assert all(f"Convert it to {home}" in text for text in others.values())
