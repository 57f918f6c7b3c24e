# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`convert` to attnres: function, configuration, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from vanilla_models import VANILLA

from depthmix import AttnResConfig, AttnResForCausalLM
from depthmix.conversion import ConversionError, convert, inspect_checkpoint
from depthmix.families import METHODS


EACH_VANILLA = pytest.mark.parametrize("kind", VANILLA)
SUM_OPTIONS = [
    {},
    {"attnres_variant": "full"},
    {"attnres_block_size": 3, "attnres_recency_bias": True},
    {"attnres_block_size": 4},
]


@torch.no_grad()
def logits_of(folder, ids, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()(ids).logits


class TestVanilla:
    @pytest.mark.parametrize("options", SUM_OPTIONS)
    @EACH_VANILLA
    def test_sum_keeps_the_function(self, kind, options, vanilla_source, tmp_path, token_ids):
        source = vanilla_source(kind)
        report = convert(source, tmp_path / "converted", to="attnres", progress=False, **options)
        converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
        assert type(converted) is AttnResForCausalLM
        ids = token_ids(2, 60)
        with torch.no_grad():
            assert (converted(ids).logits - logits_of(source, ids)).abs().max() < 1e-5
        assert "computes what the vanilla checkpoint does, up to rounding" in report.function_note
        assert report.warnings == []
        assert converted.config.attnres_scale == "sum"
        assert {name: getattr(converted.config, name) for name in options} == options

    @EACH_VANILLA
    def test_new_tensors_and_no_others(self, kind, vanilla_source, tmp_path):
        source = vanilla_source(kind)
        report = convert(source, tmp_path / "converted", to="attnres", attnres_recency_bias=True, progress=False)
        before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "converted"))
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        mixers = [f"model.layers.{i}.{site}_mixer" for i in range(4) for site in ("attn", "mlp")]
        new = {
            f"{mixer}.{name}": value
            for mixer in [*mixers, "model.output_mixer"]
            for name, value in {
                "pseudo_query": torch.zeros(64),
                "recency_bias": torch.zeros(1),
                "norm.weight": torch.ones(64),
            }.items()
        }
        assert set(report.new) == set(new) == after.keys() - before.keys()
        assert all(torch.equal(after[name], value) for name, value in new.items())
        _, info = AttnResForCausalLM.from_pretrained(tmp_path / "converted", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]

    @pytest.mark.parametrize("dtype", [None, "float16"])
    def test_mixing_parameters_are_fp32(self, dtype, vanilla_source, tmp_path):
        source = vanilla_source("qwen3")
        tensors = {n: tensor.bfloat16() for n, tensor in load_file(source / "model.safetensors").items()}
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
        save_file(tensors, source / "model.safetensors")
        convert(source, tmp_path / "converted", to="attnres", dtype=dtype, progress=False)
        written = load_file(tmp_path / "converted" / "model.safetensors")
        assert written["model.output_mixer.pseudo_query"].dtype is torch.float32

    @EACH_VANILLA
    def test_fields_are_carried(self, kind, vanilla_source, tmp_path):
        source = vanilla_source(kind)
        convert(source, tmp_path / "converted", to="attnres", progress=False)
        stock = VANILLA[kind][0].from_pretrained(source).to_dict()
        read = AttnResConfig.from_pretrained(tmp_path / "converted").to_dict()
        ignored = {"model_type", "architectures", "transformers_version", "_name_or_path", "pretraining_tp"}
        assert {name: read.get(name) for name in stock.keys() - ignored} == {
            name: value for name, value in stock.items() if name not in ignored
        }

    @pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
    def test_names_of_a_base_model(self, kind, vanilla_source, tmp_path, token_ids):
        source = vanilla_source(kind)
        tensors = load_file(source / "model.safetensors")
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        convert(source, tmp_path / "converted", to="attnres", progress=False)
        ids = token_ids(2, 20)
        assert (logits_of(tmp_path / "converted", ids) - logits_of(source, ids)).abs().max() < 1e-5

    def test_mean_differs_by_the_epsilon_of_the_norms(self, vanilla_source, tmp_path, token_ids):
        """The average is smaller than the sum by the number of sources, and the norms' epsilon is not."""
        source = vanilla_source("qwen3", num_hidden_layers=24, hidden_size=32, initializer_range=0.02)
        ids = token_ids(2, 20)
        differences = {}
        for scale in ("sum", "mean"):
            options = {"attnres_scale": scale, "attnres_variant": "full"}
            report = convert(source, tmp_path / scale, to="attnres", progress=False, **options)
            differences[scale] = (logits_of(tmp_path / scale, ids) - logits_of(source, ids)).abs().max()
            assert ("nearly what the vanilla checkpoint does" in report.function_note) == (scale == "mean")
        assert differences["sum"] < 1e-5
        assert 1e-3 < differences["mean"] < 0.5

    def test_cumulative_is_another_function(self, vanilla_source, tmp_path, token_ids):
        source = vanilla_source("llama")
        report = convert(
            source,
            tmp_path / "converted",
            to="attnres",
            attnres_variant="cumulative",
            attnres_recency_bias=True,
            retrofit=False,
            progress=False,
        )
        config = AttnResConfig.from_pretrained(tmp_path / "converted")
        assert (config.attnres_scale, config.attnres_block_size, config.recency_bias_start) == ("mean", 2, 3.0)
        assert "another function" in report.function_note and "Fine-tune it" in report.function_note
        ids = token_ids(2, 20)
        assert (logits_of(tmp_path / "converted", ids) - logits_of(source, ids)).abs().max() > 0.05

    def test_key_norm_position(self, vanilla_source, tmp_path):
        source = vanilla_source("qwen3")
        report = convert(source, tmp_path / "a", to="attnres", key_norm_position="after_rope", dry_run=True)
        assert "key_norm_position='after_rope' as asked; the source was trained with 'before_rope'." in report.warnings
        assert "another function" in report.function_note
        source = vanilla_source("llama")
        report = convert(source, tmp_path / "a", to="attnres", key_norm_position="after_rope", dry_run=True)
        assert report.warnings == [
            "key_norm_position='after_rope' has no effect: the source has no norms of key heads."
        ]
        assert "up to rounding" in report.function_note


class TestReleased:
    """The released layout, with the whole-model weights of the Depth-Attention vector and mixers of their own."""

    AGGREGATORS = (
        *(f"model.layers.{i}.attnres_{site}_aggregator" for i in range(4) for site in ("attn", "mlp")),
        "model.attnres_final_aggregator",
    )
    GENERATIONS = (
        {"baseline_mode": "attnres", "attnres_block_size": 4},
        {"baseline_mode": "block-attnres", "attnres_block_size": 3, "recurrent_model": True, "no_residual": False},
        {"residual_baseline": "attention_residual", "attnres_block_size": 4, "attnres_recency_bias_init": 3.0},
        {
            "baseline_mode": "attention-residual",
            "residual_baseline": None,
            "attnres_block_size": 4,
            "depth_attention_stride": 24,
            "densetransformer_dwa_period": 1,
            "use_depth_attention": False,
            "classifier_dropout": 0.0,
        },
        {"attnres_block_size": 4, "use_qk_norm": ...},
    )

    @pytest.fixture
    def attnres_source(self, released_source):
        """`attnres_source(bias=…, **keys)` writes the release's tensors, with awake mixers, and a config."""

        def make(*, bias=True, without=(), **keys):
            folder = released_source(**keys)
            tensors = load_file(folder / "model.safetensors")
            torch.manual_seed(1)
            for name in self.AGGREGATORS:
                tensors[f"{name}.pseudo_query"] = torch.randn(8, dtype=torch.float64)
                tensors[f"{name}.norm.weight"] = 1 + 0.3 * torch.randn(8, dtype=torch.float64)
                if bias:
                    tensors[f"{name}.recency_bias"] = 3 + torch.randn((), dtype=torch.float32)
            kept = {name: tensor for name, tensor in tensors.items() if name not in without}
            save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
            return folder

        return make

    def expected(self, source, **fields):
        """The same weights, by hand, in our class."""
        keys = json.loads((source / "config.json").read_text())
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "head_dim", "rms_norm_eps")
        model = AttnResForCausalLM(AttnResConfig(**{name: keys[name] for name in names}, **fields)).double().eval()
        state = load_file(source / "model.safetensors")
        del state["lm_head_layernorm.weight"]
        for old, new in (("attnres_attn_aggregator", "attn_mixer"), ("attnres_mlp_aggregator", "mlp_mixer")):
            state = {name.replace(old, new): tensor for name, tensor in state.items()}
        state = {name.replace("attnres_final_aggregator", "output_mixer"): tensor for name, tensor in state.items()}
        model.load_state_dict({n: t.view(1) if n.endswith("recency_bias") else t for n, t in state.items()})
        return model

    @pytest.mark.parametrize("keys", GENERATIONS)
    def test_cumulative(self, keys, attnres_source, tmp_path):
        source = attnres_source(**keys)
        report = convert(source, tmp_path / "converted", to="attnres", progress=False)
        config = AttnResConfig.from_pretrained(tmp_path / "converted")
        assert (config.attnres_variant, config.attnres_block_size, config.attnres_scale) == ("cumulative", 4, "mean")
        assert (config.attnres_recency_bias, config.attnres_recency_bias_init) == (True, 3.0)
        assert (config.use_qk_norm, config.key_norm_position) == (True, "after_rope")
        assert (report.dropped, report.new) == (["lm_head_layernorm.weight"], [])
        (warning,) = report.warnings
        assert "Compare the perplexity with that of key_norm_position='before_rope'" in warning
        assert "what the released code computes" in report.function_note

        model = self.expected(
            source,
            attnres_variant="cumulative",
            attnres_block_size=4,
            attnres_recency_bias=True,
            key_norm_position="after_rope",
        )
        ids = torch.tensor([[1, 5, 3, 7, 2, 9]])
        difference = logits_of(tmp_path / "converted", ids, dtype=torch.float64) - model(ids).logits
        # one of the models has rotated in fp32
        assert difference.abs().max() < 1e-6

    def test_without_recency_bias(self, attnres_source, tmp_path):
        """Then the release's code runs blocks as in the paper, whose ends may lie inside a layer."""
        source = attnres_source(bias=False, baseline_mode="attnres", attnres_block_size=3)
        convert(source, tmp_path / "converted", to="attnres", key_norm_position="before_rope", progress=False)
        config = AttnResConfig.from_pretrained(tmp_path / "converted")
        assert (config.attnres_variant, config.attnres_block_size, config.attnres_recency_bias) == ("block", 3, False)
        model = self.expected(source, attnres_block_size=3)
        ids = torch.tensor([[1, 5, 3, 7, 2, 9]])
        difference = logits_of(tmp_path / "converted", ids, dtype=torch.float64) - model(ids).logits
        # one of the models has rotated in fp32
        assert difference.abs().max() < 1e-6

    @pytest.mark.parametrize(("given", "size"), [(..., 12), (1, 2), (2, 2), (5, 6)])
    def test_block_size(self, given, size, attnres_source, tmp_path):
        source = attnres_source(attnres_block_size=given)
        convert(source, tmp_path / "converted", to="attnres", progress=False)
        assert AttnResConfig.from_pretrained(tmp_path / "converted").attnres_block_size == size

    def test_other_settings_are_possible_and_reported(self, attnres_source, tmp_path):
        source = attnres_source(attnres_block_size=4)
        options = {"attnres_block_size": 2, "key_norm_position": "before_rope"}
        report = convert(source, tmp_path / "converted", to="attnres", dry_run=True, **options)
        assert {text.split("=")[0] for text in report.warnings} == set(options)
        assert "another function" in report.function_note
        same = {"attnres_block_size": 4, "key_norm_position": "after_rope", "attnres_variant": "cumulative"}
        report = convert(source, tmp_path / "converted", to="attnres", dry_run=True, **same)
        assert report.warnings == [] and "what the released code computes" in report.function_note

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"attnres_block_size": 0}, "attnres_block_size is 0, must be a positive integer"),
            ({"attnres_block_size": "12"}, "attnres_block_size is '12', must be a positive integer"),
            ({"attnres_recency_bias_init": "3"}, "attnres_recency_bias_init"),
            ({"scale_embeds": True}, "scale_embeds is True: AttnRes does not scale its embeddings"),
            ({"pretraining_tp": 2}, "pretraining_tp is 2"),
            ({"baseline_mode": "mhc"}, "baseline_mode 'mhc', but the tensors are those of the released AttnRes"),
            ({"mlp_bias": True}, r"mlp\.gate_proj\.bias is missing"),
        ],
    )
    def test_refused_configs(self, keys, message, attnres_source, tmp_path):
        with pytest.raises(ConversionError, match=message):
            convert(attnres_source(**keys), tmp_path / "converted", to="attnres", progress=False)
        assert not (tmp_path / "converted").exists()

    def test_a_missing_mixer_is_no_new_one(self, attnres_source, tmp_path):
        source = attnres_source(without=("model.layers.2.attnres_mlp_aggregator.pseudo_query",))
        with pytest.raises(ConversionError, match=r"layers\.2\.attnres_mlp_aggregator\.pseudo_query is missing"):
            convert(source, tmp_path / "converted", to="attnres", progress=False)

    def test_vanilla_control(self, released_source, tmp_path):
        source = released_source()
        report = convert(source, tmp_path / "converted", to="attnres", progress=False)
        assert len(report.new) == 18 and "Compare the perplexity" in report.warnings[0]
        convert(source, tmp_path / "expected", to="depth_qwen3", progress=False)
        ids = torch.tensor([[1, 5, 3, 7, 2, 9]])
        converted, expected = (
            logits_of(tmp_path / name, ids, dtype=torch.float32) for name in ("converted", "expected")
        )
        assert (converted - expected).abs().max() < 1e-5


class TestRefusals:
    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"model_type": "gpt2"}, r"Accepted are: Qwen3; .*Qwen2; .*Llama; .*AttnRes"),
            ({"model_type": "attnres", "depth_impl": "auto"}, "already is what it would become"),
            ({"model_type": "mhc", "depth_impl": "auto"}, "but what mhc does: load it as it is"),
            ({"use_depth_attention": True}, "Convert it to depth_attention"),
            ({"model_type": "qwen3", "attnres_num_blocks": 4}, "This form of Attention Residuals is not supported"),
            ({"model_type": "qwen3", "use_p2n": True}, "several times per token"),
            ({"baseline_mode": "denseformer"}, "Convert it to denseformer"),
            ({"baseline_mode": "mhc"}, "Convert it to mhc"),
            ({"no_residual": True}, "Use the released AttnRes weights"),
        ],
    )
    def test_other_layouts(self, keys, message, released_source, tmp_path):
        with pytest.raises(ConversionError, match=message):
            convert(released_source(**keys), tmp_path / "converted", to="attnres", progress=False)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"depth_stride": 2}, "attnres has no option depth_stride. Its options are: attnres_variant, "),
            ({"attnres_variant": "both"}, "attnres_variant"),
            ({"attnres_block_size": 0}, "^attnres_block_size=0: must be a positive number of sub-layers"),
            ({"attnres_variant": "full", "attnres_block_size": 2}, "^attnres_block_size=2: must be 1 or None"),
            ({"attnres_variant": "cumulative", "attnres_block_size": 3}, "^attnres_block_size=3: must be even"),
            ({"attnres_variant": "cumulative", "attnres_scale": "sum"}, "^attnres_scale='sum': must be 'mean'"),
        ],
    )
    def test_invalid_options(self, options, message, vanilla_source, tmp_path):
        with pytest.raises(ConversionError, match=message):
            convert(vanilla_source("qwen3"), tmp_path / "converted", to="attnres", progress=False, **options)
        assert not (tmp_path / "converted").exists()

    def test_other_architectures(self, vanilla_source, edit_config, tmp_path):
        source = vanilla_source("qwen2")
        edit_config(source, architectures=["Qwen2ForTokenClassification"])
        with pytest.raises(ConversionError, match=r"Only causal language models \(Qwen2ForCausalLM\) convert"):
            convert(source, tmp_path / "converted", to="attnres", progress=False)


def test_inspect_names_all_targets(vanilla_source):
    conversions = inspect_checkpoint(vanilla_source("qwen3")).conversions
    assert list(conversions) == [*METHODS]
    assert all(outcome.startswith("yes, to ") for outcome in conversions.values())
    fields = "attnres_variant='block', attnres_block_size=1, attnres_recency_bias=False, attnres_scale='sum'"
    fields += ", attnres_routing='replace', key_norm_position='before_rope'"
    assert conversions["attnres"].startswith(f"yes, to attnres, with {fields}")
