# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`convert` to depth_qwen3: function, configuration, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from depthmix import DepthQwen3Config, DepthQwen3ForCausalLM
from depthmix.conversion import ConversionError, convert, inspect_checkpoint
from depthmix.modeling.decoder_layers import DepthRotaryEmbedding
from depthmix.modeling.lent_weights import DepthRMSNorm


def logits_of(folder, ids, **kwargs):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()(ids).logits


class TestFunction:
    def test_without_mixing_it_is_vanilla_bit_for_bit(self, qwen3_source, tmp_path, token_ids):
        source = qwen3_source()
        report = convert(source, tmp_path / "converted", depth_stride=0, progress=False)
        converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
        assert type(converted) is DepthQwen3ForCausalLM
        ids = token_ids(2, 20)
        assert torch.equal(converted(ids).logits, logits_of(source, ids))
        assert "exactly what the vanilla checkpoint does" in report.function_note

    @pytest.mark.parametrize("options", [{}, {"depth_stride": 1}, {"depth_stride": 3, "depth_window": 1}])
    def test_with_mixing_it_is_the_same_weights_in_our_class(self, options, qwen3_source, tmp_path, tiny, token_ids):
        source = qwen3_source()
        report = convert(source, tmp_path / "converted", retrofit=False, progress=False, **options)
        ids = token_ids(2, 20)
        logits = logits_of(tmp_path / "converted", ids)
        assert (logits - logits_of(source, ids)).abs().max() > 0.05, "control: the mixing must matter"

        expected = DepthQwen3ForCausalLM(DepthQwen3Config(**tiny, **options)).eval()
        expected.load_state_dict(load_file(source / "model.safetensors"))
        assert expected.config.depth_stride == {"depth_stride": 2, **options}["depth_stride"]
        assert torch.equal(logits, expected(ids).logits)
        assert "Fine-tune it" in report.function_note

    def test_no_new_and_no_uninitialised_parameters(self, qwen3_source, tmp_path):
        source = qwen3_source()
        report = convert(source, tmp_path / "converted", retrofit=False, progress=False)
        assert report.new == report.renamed == report.dropped == []
        vanilla = load_file(source / "model.safetensors")
        assert report.kept == list(Qwen3ForCausalLM.from_pretrained(source).state_dict())
        for kwargs in ({}, {}, {"device_map": "cpu"}):
            model, info = DepthQwen3ForCausalLM.from_pretrained(
                tmp_path / "converted", output_loading_info=True, **kwargs
            )
            assert not info["missing_keys"] and not info["unexpected_keys"]
            assert model.state_dict().keys() == vanilla.keys()
            assert all(torch.equal(tensor, vanilla[name]) for name, tensor in model.state_dict().items())

    def test_dtype_converts_weights_and_config(self, qwen3_source, tmp_path):
        source = qwen3_source()
        convert(source, tmp_path / "converted", dtype=torch.bfloat16, progress=False)
        written = load_file(tmp_path / "converted" / "model.safetensors")
        for name, tensor in load_file(source / "model.safetensors").items():
            assert torch.equal(written[name], tensor.to(torch.bfloat16))
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "converted").dtype is torch.bfloat16

    def test_dtype_refuses_values_that_do_not_fit(self, qwen3_source, tmp_path):
        source = qwen3_source()
        tensors = load_file(source / "model.safetensors")
        tensors["model.norm.weight"][5] = 1e6
        save_file(tensors, source / "model.safetensors")
        with pytest.raises(ConversionError, match=r"model\.norm\.weight has values up to 1e\+06.*bfloat16"):
            convert(source, tmp_path / "converted", dtype="float16", progress=False)
        convert(source, tmp_path / "converted", dtype="bfloat16", progress=False)


def in_4x_layout(config):
    """The same fields as transformers 4 wrote them."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types")
    return config | {"transformers_version": "4.51.0"}


# field values, and whether they matter to the function at all
NON_DEFAULT_FIELDS = {
    "rope_base": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, True),
    "rope_linear": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, True),
    "rope_dynamic": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
                      "max_position_embeddings": 64}, True),
    "rope_yarn": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e5, "factor": 8.0,
                                       "original_max_position_embeddings": 64}}, True),
    "rope_llama3": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e5, "factor": 8.0,
                                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                         "original_max_position_embeddings": 64}}, True),
    "attention_bias": ({"attention_bias": True}, False),
    "head_dim": ({"head_dim": 32}, False),
    "sliding_window": ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, True),
    "norm_eps": ({"rms_norm_eps": 0.05}, True),
    "activation": ({"hidden_act": "gelu"}, True),
    "tied": ({"tie_word_embeddings": True}, False),
    "special_ids": ({"pad_token_id": 5, "bos_token_id": 6, "eos_token_id": [7, 8]}, False),
    "training": ({"attention_dropout": 0.25, "initializer_range": 0.07, "use_cache": False}, False),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["4.x", "5.x"])
@pytest.mark.parametrize("case", NON_DEFAULT_FIELDS)
def test_every_field_is_carried(case, layout, qwen3_source, tmp_path, tiny, token_ids):
    fields, changes_the_function = NON_DEFAULT_FIELDS[case]
    source = qwen3_source(**fields)
    config_path = source / "config.json"
    if layout == "4.x":
        config_path.write_text(json.dumps(in_4x_layout(json.loads(config_path.read_text()))))
        assert "rope_parameters" not in config_path.read_text()
    convert(source, tmp_path / "converted", depth_stride=0, progress=False)

    vanilla = AutoModelForCausalLM.from_pretrained(source).eval()
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    read = converted.config.to_dict()
    for field, value in vanilla.config.to_dict().items():
        if field not in ("model_type", "architectures", "transformers_version", "_name_or_path"):
            assert read[field] == value, field
    for field, value in fields.items():
        assert read[field] == value, field

    ids = token_ids(1, 202)
    with torch.no_grad():
        logits, expected = converted(ids).logits, vanilla(ids).logits
        assert torch.equal(logits[:, 200], expected[:, 200])
        assert torch.equal(logits, expected)
        if changes_the_function:
            plain = Qwen3ForCausalLM(Qwen3Config(**tiny)).eval()
            plain.load_state_dict(vanilla.state_dict())
            assert (plain(ids).logits[:, 200] - expected[:, 200]).abs().max() > 1e-2, "control: the field must matter"


def test_explicit_layer_types_are_carried(qwen3_source, tmp_path, token_ids):
    layer_types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    source = qwen3_source(use_sliding_window=True, sliding_window=8, layer_types=layer_types)
    convert(source, tmp_path / "converted", depth_stride=0, progress=False)
    assert DepthQwen3Config.from_pretrained(tmp_path / "converted").layer_types == layer_types
    ids = token_ids(1, 60)
    assert torch.equal(logits_of(tmp_path / "converted", ids), logits_of(source, ids))


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_generation_config_is_carried(where, qwen3_source, edit_config, tmp_path):
    source = qwen3_source()
    parameters = {"temperature": 0.3, "top_k": 7, "do_sample": True, "max_length": 77, "repetition_penalty": 1.5}
    if where == "generation_config.json":
        (source / where).write_text(json.dumps(parameters | {"eos_token_id": [2, 9]}))
    else:
        # as old checkpoints have it
        (source / "generation_config.json").unlink()
        edit_config(source, **parameters)
    convert(source, tmp_path / "converted", progress=False)
    vanilla, converted = (
        AutoModelForCausalLM.from_pretrained(folder).generation_config for folder in (source, tmp_path / "converted")
    )
    assert all(getattr(vanilla, name) == value for name, value in parameters.items())
    ignored = {"_from_model_config": None, "transformers_version": None}
    assert converted.to_dict() | ignored == vanilla.to_dict() | ignored


class TestOutputHead:
    def test_tied_without_head(self, qwen3_source, tmp_path, token_ids):
        source = qwen3_source(tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(source / "model.safetensors")
        report = convert(source, tmp_path / "converted", depth_stride=0, progress=False)
        assert report.warnings == []
        assert "lm_head.weight" not in load_file(tmp_path / "converted" / "model.safetensors")
        ids = token_ids(2, 12)
        assert torch.equal(logits_of(tmp_path / "converted", ids), logits_of(source, ids))

        model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        before = model.lm_head.weight.detach().clone()
        model(ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert not torch.equal(model.lm_head.weight, before)
        assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)

    def test_untied_with_head(self, qwen3_source, tmp_path, token_ids):
        source = qwen3_source()
        convert(source, tmp_path / "converted", depth_stride=0, progress=False)
        written = load_file(tmp_path / "converted" / "model.safetensors")
        assert not torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
        ids = token_ids(2, 12)
        assert torch.equal(logits_of(tmp_path / "converted", ids), logits_of(source, ids))

    def test_untied_without_head_stops_before_writing(self, qwen3_source, edit_config, tmp_path):
        source = qwen3_source(tie_word_embeddings=True)
        edit_config(source, tie_word_embeddings=False)
        with pytest.raises(ConversionError, match=r"lm_head\.weight is missing.*tie_word_embeddings"):
            convert(source, tmp_path / "out" / "converted", progress=False)
        assert not (tmp_path / "out").exists()

    def test_tied_with_another_head_warns_and_follows_the_config(self, qwen3_source, edit_config, tmp_path):
        source = qwen3_source()
        edit_config(source, tie_word_embeddings=True)
        stock = AutoModelForCausalLM.from_pretrained(source)
        assert not torch.equal(stock.lm_head.weight, stock.model.embed_tokens.weight), "control: stock unties them"
        report = convert(source, tmp_path / "converted", depth_stride=0, progress=False)
        assert report.dropped == ["lm_head.weight"]
        (warning,) = report.warnings
        assert "lm_head.weight differs from model.embed_tokens.weight" in warning
        assert "stock transformers would use it. To keep it, set tie_word_embeddings to false" in warning
        card = (tmp_path / "converted" / "README.md").read_text()
        outcome = inspect_checkpoint(source).conversions["depth_attention"]
        for text in (report.function_note, card, outcome):
            assert "another function than the source in stock transformers" in text
            assert "exactly" not in text
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
        assert torch.equal(model.lm_head.weight, load_file(source / "model.safetensors")["model.embed_tokens.weight"])

    def test_tied_with_the_same_head_drops_it_quietly(self, qwen3_source, tmp_path):
        source = qwen3_source(tie_word_embeddings=True)
        tensors = load_file(source / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, source / "model.safetensors")
        report = convert(source, tmp_path / "converted", progress=False)
        assert (report.dropped, report.warnings) == (["lm_head.weight"], [])

    @pytest.mark.parametrize("route", ["model", "trainer"])
    @pytest.mark.parametrize("tied", [True, False])
    def test_saving_again_keeps_the_tie(self, tied, route, qwen3_source, tmp_path):
        convert(qwen3_source(tie_word_embeddings=tied), tmp_path / "converted", progress=False)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
        if route == "model":
            model.save_pretrained(tmp_path / "saved")
        else:
            arguments = TrainingArguments(output_dir=tmp_path / "saved", report_to="none", use_cpu=True)
            Trainer(model, arguments).save_model()
        saved, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "converted"))
        assert ("lm_head.weight" in saved) != tied
        assert saved.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.items())
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert (again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()) == tied


class TestNamesOfOlderAndBaseModels:
    @pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
    @pytest.mark.parametrize("tied", [True, False])
    def test_base_model(self, tied, architecture, qwen3_source, edit_config, tmp_path, token_ids):
        source = qwen3_source(tie_word_embeddings=tied)
        edit_config(source, architectures=[architecture])
        tensors = load_file(source / "model.safetensors")
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        tensors |= {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        report = convert(source, tmp_path / "converted", depth_stride=0, progress=False)
        assert (len(report.renamed), report.kept) == (46, [] if tied else ["lm_head.weight"])
        assert report.dropped == ["layers.0.self_attn.rotary_emb.inv_freq"]
        ids = token_ids(2, 20)
        assert torch.equal(logits_of(tmp_path / "converted", ids), logits_of(source, ids))

    @pytest.mark.parametrize("layout", ["qwen3", "released"])
    def test_rotary_buffers_are_dropped(self, layout, qwen3_source, released_source, tmp_path):
        source = qwen3_source() if layout == "qwen3" else released_source(without=("head_layernorm",))
        buffers = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(4)]
        buffers.append("model.rotary_emb.inv_freq")
        tensors = load_file(source / "model.safetensors") | {name: torch.ones(8) for name in buffers}
        save_file(tensors, source / "model.safetensors")
        report = convert(source, tmp_path / "converted", progress=False)
        assert sorted(report.dropped) == buffers
        assert not set(buffers) & load_file(tmp_path / "converted" / "model.safetensors").keys()


class TestTokenizerClass:
    WORDS = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4, "e": 5, "Ì": 6, "ģ": 7, "Ã": 8, "©": 9}

    def write_tokenizer(self, folder, form):
        """A byte-level BPE without Qwen's normaliser and special tokens, in one of the forms that sources have."""
        if form == "vocab.json":
            (folder / "vocab.json").write_text(json.dumps(self.WORDS))
            (folder / "merges.txt").write_text("#version: 0.2\na b\n")
            return
        tokenizer = Tokenizer(models.BPE(self.WORDS, [("a", "b")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        if form == "tokenizer_config.json":
            (folder / form).write_text('{"model_max_length": 77}')

    @pytest.mark.parametrize("form", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
    def test_is_the_one_that_stock_takes(self, form, qwen3_source, tmp_path):
        source = qwen3_source()
        self.write_tokenizer(source, form)
        report = convert(source, tmp_path / "converted", progress=False)
        assert "tokenizer_class: 'Qwen2Tokenizer' (new, in tokenizer_config.json)" in report.config_changes
        self.assert_same_tokenizer(source, tmp_path / "converted", "Qwen2Tokenizer")

    def test_is_the_one_that_the_model_config_names(self, released_source, tmp_path):
        source = released_source(tokenizer_class="Qwen2Tokenizer")
        self.write_tokenizer(source, "tokenizer.json")
        convert(source, tmp_path / "converted", progress=False)
        self.assert_same_tokenizer(source, tmp_path / "converted", "Qwen2Tokenizer")

    @pytest.mark.parametrize("form", ["tokenizer.json", "tokenizer_config.json"])
    def test_of_released_sources_is_generic(self, form, released_source, tmp_path):
        source = released_source()
        self.write_tokenizer(source, form)
        report = convert(source, tmp_path / "converted", progress=False)
        assert not any("tokenizer_class" in change for change in report.config_changes)
        self.assert_same_tokenizer(source, tmp_path / "converted", "TokenizersBackend")

    def test_that_is_named_stays(self, qwen3_source, tmp_path):
        source = qwen3_source()
        self.write_tokenizer(source, "tokenizer.json")
        (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        convert(source, tmp_path / "converted", progress=False)
        self.assert_same_tokenizer(source, tmp_path / "converted", "TokenizersBackend")

    def test_without_a_tokenizer_there_is_none(self, qwen3_source, tmp_path):
        source = qwen3_source()
        (source / "chat_template.jinja").write_text("{{ messages }}")
        assert "tokenizer_config.json" not in convert(source, tmp_path / "converted", progress=False).files

    def assert_same_tokenizer(self, source, converted, name):
        expected, loaded = (AutoTokenizer.from_pretrained(folder) for folder in (source, converted))
        assert type(loaded).__name__ == type(expected).__name__ == name
        text = "ab a e\u0301<|endoftext|>b"
        assert loaded(text)["input_ids"] == expected(text)["input_ids"]
        for token in ("bos_token", "eos_token", "pad_token", "unk_token", "model_max_length"):
            assert getattr(loaded, token) == getattr(expected, token), token


class TestReleasedLayout:
    """The whole-model vector, in the layout of every generation of the released configs."""

    IDS = (1, 5, 3, 7, 2, 9)
    # positions 0 and 5; the same weights and formulas, in float64 numpy loops
    LOGITS = (
        (-1.112908184884, -0.478975873521, 0.380226275363, 1.060602065745, 1.242160132242, 0.839510879259,
         0.042026542040, -0.775223534582, -1.227873869689, -1.103035937822, -0.459422968986),
        (-1.072874910731, -0.602970157258, 0.150520882842, 0.833219599788, 1.124042119538, 0.886210066827,
         0.231579572272, -0.531966413652, -1.045320283032, -1.067043689722, -0.586919776118),
    )  # fmt: skip
    LOSS = 2.535011622529
    # first four logits of position 5 and the largest deviation from the above, for other settings
    OTHER_SETTINGS = {
        "stride 1": ({"depth_stride": 1}, (-1.092387, -0.603272, 0.169571, 0.862662), 0.0444),
        "window 1": ({"depth_window": 1}, (-1.111018, -0.588045, 0.211494, 0.911564), 0.0783),
        "key norm first": ({"key_norm_position": "before_rope"}, (-1.007141, -0.623637, 0.053173, 0.704974), 0.1282),
        "mixing off": ({"depth_stride": 0}, (-0.657379, -0.603039, -0.265080, 0.197550), 0.6357),
    }
    LEGACY = {"cross_layer_pattern": "depth_softmax", "cross_layer_mode": "depth_softmax", "recurrent_model": True}
    LEGACY_STRIDE = {"depth_softmax_stride": 2, "depth_recent_window": 0}
    NEW_STRIDE = {"depth_attention_stride": 2, "depth_attention_recent_window": 0}
    GENERATIONS = {
        "legacy names": LEGACY | LEGACY_STRIDE,
        "both names": LEGACY | LEGACY_STRIDE | NEW_STRIDE | {"use_depth_attention": True},
        "new names with gate": NEW_STRIDE | {"use_depth_attention": True, "recurrent_model": True},
        "new names": NEW_STRIDE | {"use_depth_attention": True},
        "new pattern": {"cross_layer_pattern": "depth_attention", "depth_attention_stride": 2},
    }

    @pytest.fixture
    def exact_stock_layers(self, monkeypatch):
        """Stock norms and rotary tables are made in float32; here they are made in the dtype of the model."""

        def norm(self, x):
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

        def rotary(self, x, position_ids, layer_type=None):
            half = torch.arange(0, 4, 2, dtype=x.dtype) / 4
            angles = (position_ids[..., None].to(x.dtype) * 10000.0**-half).repeat(1, 1, 2)
            return angles.cos(), angles.sin()

        monkeypatch.setattr(DepthRMSNorm, "forward", norm)
        monkeypatch.setattr(DepthRotaryEmbedding, "forward", rotary)

    def load(self, folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    @pytest.mark.parametrize("generation", GENERATIONS)
    def test_vector(self, generation, released_source, tmp_path, exact_stock_layers):
        source = released_source(**self.GENERATIONS[generation])
        report = convert(source, tmp_path / "converted", progress=False)
        assert (report.warnings, report.dropped) == ([], ["lm_head_layernorm.weight"])
        ids = torch.tensor([self.IDS])
        with torch.no_grad():
            logits = self.load(tmp_path / "converted")(ids).logits[0]
        assert logits.dtype is torch.float64
        assert (logits[[0, 5]] - torch.tensor(self.LOGITS, dtype=torch.float64)).abs().max() < 1e-8
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
        assert abs(loss.item() - self.LOSS) < 1e-8

    def test_vector_with_stock_precision(self, released_source, tmp_path):
        convert(released_source(**self.GENERATIONS["new names"]), tmp_path / "converted", progress=False)
        logits = self.load(tmp_path / "converted")(torch.tensor([self.IDS])).logits[0]
        assert (logits[[0, 5]] - torch.tensor(self.LOGITS, dtype=torch.float64)).abs().max() < 1e-6

    @pytest.mark.parametrize("setting", OTHER_SETTINGS)
    def test_other_settings_are_possible_and_reported(self, setting, released_source, tmp_path, exact_stock_layers):
        options, start, deviation = self.OTHER_SETTINGS[setting]
        source = released_source(**self.GENERATIONS["new names"])
        report = convert(source, tmp_path / "converted", progress=False, **options)
        (option,) = options
        assert [text.split("=")[0] for text in report.warnings] == [option]
        assert "another function" in report.function_note
        with torch.no_grad():
            logits = self.load(tmp_path / "converted")(torch.tensor([self.IDS])).logits[0]
        assert (logits[5, :4] - torch.tensor(start)).abs().max() < 1e-6
        at_two = (logits[[0, 5]] - torch.tensor(self.LOGITS)).abs().max()
        assert deviation / 3 < at_two < deviation + 1e-4

    @pytest.mark.parametrize("given", [1, 0, -3, ...])
    def test_a_stride_of_one_or_less_is_every_earlier_layer(self, given, released_source, tmp_path):
        source = released_source(use_depth_attention=True, depth_attention_stride=given)
        convert(source, tmp_path / "converted", progress=False)
        config = DepthQwen3Config.from_pretrained(tmp_path / "converted")
        assert (config.depth_stride, config.depth_sources) == (1, ((), (0,), (0, 1), (0, 1, 2)))

    def test_a_stride_beyond_the_layers_leaves_layer_zero(self, released_source, tmp_path):
        source = released_source(use_depth_attention=True, depth_attention_stride=7)
        convert(source, tmp_path / "converted", progress=False)
        assert DepthQwen3Config.from_pretrained(tmp_path / "converted").depth_sources == ((), (0,), (0,), (0,))

    @pytest.mark.parametrize(("given", "window"), [(1, 1), (0, 0), (-2, 0)])
    def test_window(self, given, window, released_source, tmp_path):
        source = released_source(
            use_depth_attention=True, depth_attention_stride=2, depth_attention_recent_window=given
        )
        convert(source, tmp_path / "converted", progress=False)
        assert DepthQwen3Config.from_pretrained(tmp_path / "converted").depth_window == window

    def test_newer_name_wins_with_a_warning(self, released_source, tmp_path):
        source = released_source(use_depth_attention=True, depth_attention_stride=2, depth_softmax_stride=3)
        report = convert(source, tmp_path / "converted", dry_run=True)
        assert "depth_stride: 2 (new)" in report.config_changes
        assert any("depth_softmax_stride is 3" in text for text in report.warnings)

    def test_every_stock_field_is_carried(self, released_source, tmp_path):
        source = released_source(use_depth_attention=True, depth_attention_stride=2, eos_token_id=[0, 3])
        convert(source, tmp_path / "converted", progress=False)
        read = DepthQwen3Config.from_pretrained(tmp_path / "converted").to_dict()
        given = json.loads((source / "config.json").read_text())
        shared = given.keys() & Qwen3Config.__dataclass_fields__.keys() - {
            "model_type",
            "architectures",
            "transformers_version",
        }
        assert len(shared) > 15
        assert {name: read[name] for name in shared} == {name: given[name] for name in shared}
        assert read["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
        assert read["dtype"] == "float64"

    def test_absent_fields_take_the_defaults_of_llama(self, released_source, tmp_path):
        source = released_source(
            use_depth_attention=True, bos_token_id=..., rms_norm_eps=..., max_position_embeddings=...
        )
        convert(source, tmp_path / "converted", progress=False)
        config = DepthQwen3Config.from_pretrained(tmp_path / "converted")
        assert (config.bos_token_id, config.rms_norm_eps, config.max_position_embeddings) == (1, 1e-6, 2048)

    def test_the_unused_norm_may_be_missing(self, released_source, tmp_path):
        source = released_source(use_depth_attention=True, without=("lm_head_layernorm",))
        assert convert(source, tmp_path / "converted", progress=False).dropped == []

    @pytest.mark.parametrize(
        "keys",
        [{"use_depth_attention": False}, {"use_depth_attention": None}, {}, {"use_qk_norm": ...}],
    )
    def test_vanilla_control(self, keys, released_source, tmp_path, exact_stock_layers):
        report = convert(released_source(**keys), tmp_path / "converted", progress=False)
        config = DepthQwen3Config.from_pretrained(tmp_path / "converted")
        assert (config.depth_stride, config.key_norm_position) == (0, "after_rope")
        assert any("only the q/k norms do" in text for text in report.warnings) == ("use_qk_norm" in keys)
        with torch.no_grad():
            logits = self.load(tmp_path / "converted")(torch.tensor([self.IDS])).logits[0]
        expected = torch.tensor(self.OTHER_SETTINGS["mixing off"][1])
        assert (logits[5, :4] - expected).abs().max() < 1e-6

    def test_a_window_without_mixing_has_no_effect(self, released_source, tmp_path):
        no_effect = "depth_window=2 has no effect: depth_stride=0 switches the mixing off."
        control = convert(released_source(), tmp_path / "converted", depth_window=2, dry_run=True)
        assert no_effect in control.warnings
        assert "computes what the source computes" in control.function_note
        source = released_source("mixing", use_depth_attention=True)
        report = convert(source, tmp_path / "converted", depth_stride=0, depth_window=2, dry_run=True)
        assert no_effect in report.warnings
        assert "another function" in report.function_note
        report = convert(source, tmp_path / "converted", depth_window=2, dry_run=True)
        assert not any("no effect" in text for text in report.warnings)

    def test_switched_off_gate_needs_a_decision(self, released_source, tmp_path):
        source = released_source(**(self.GENERATIONS["legacy names"] | {"recurrent_model": False}))
        with pytest.raises(ConversionError, match="recurrent_model is false.*depth_stride"):
            convert(source, tmp_path / "converted", progress=False)
        report = convert(source, tmp_path / "converted", depth_stride=2, progress=False)
        assert any("recurrent_model is false" in text for text in report.warnings)

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"cross_layer_mode": "depth_softmax_head0"}, "cross_layer_mode is 'depth_softmax_head0'"),
            ({"cross_layer_pattern": "dense"}, "cross_layer_pattern is 'dense', an experimental variant"),
            ({"cross_layer_pattern": "all_attention"}, "cross_layer_pattern is 'all_attention', an experimental"),
            ({"depth_attention_stride": None}, "depth_attention_stride is None"),
            ({"depth_attention_stride": "24"}, "depth_attention_stride is '24'"),
            ({"depth_recent_window": None}, "depth_recent_window is None"),
            ({"mlp_bias": True}, "mlp_bias is True"),
            ({"scale_embeds": True}, "scale_embeds is True"),
            ({"no_residual": True}, "no_residual is True"),
            ({"pretraining_tp": 2}, "pretraining_tp is 2"),
            ({"use_qk_norm": False}, "use_qk_norm is false"),
            ({"use_qk_norm": 0}, "use_qk_norm is 0 in config.json, must be true, false, null or absent"),
            ({"use_depth_attention": 1}, "use_depth_attention is 1 in config.json, must be true, false"),
            ({"use_depth_attention": "true"}, "use_depth_attention is 'true' in config.json, must be true, false"),
            ({"recurrent_model": 0}, "recurrent_model is 0 in config.json, must be true, false"),
            ({"tie_word_embeddings": 0}, "'tie_word_embeddings' expected bool, got int \\(value: 0\\)"),
        ],
    )
    def test_what_cannot_be_represented_is_refused(self, keys, message, released_source, tmp_path):
        source = released_source(**({"use_depth_attention": True} | keys))
        with pytest.raises(ConversionError, match=message):
            convert(source, tmp_path / "converted", progress=False)
        assert not (tmp_path / "converted").exists()


class TestRefusals:
    @pytest.mark.parametrize(
        ("keys", "without", "message"),
        [
            ({"cross_layer_pattern": "dense"}, (), "an experiment.*cross_layer_pattern is 'dense'"),
            ({"layer_kv_reuse_map": {"3": [1]}}, (), "an experiment.*layer_kv_reuse_map"),
            ({"baseline_mode": "AttnRes"}, (), "Convert it to attnres"),
            ({"baseline_mode": "densetransformer"}, (), "Convert it to denseformer"),
            ({"residual_baseline": "mhc"}, (), "Convert it to mhc"),
            ({"baseline_mode": "mhc", "residual_baseline": "attnres"}, (), "contradicts itself"),
            ({"model_type": "qwen3_attnres"}, (), "This form of Attention Residuals is not supported"),
            ({"model_type": "gpt2"}, (), "does not know.*Accepted are: Qwen3; .*the released Depth-Attention layout;"),
            ({"model_type": ...}, (), "model_type is None.*Accepted are: Qwen3; "),
        ],
    )
    def test_other_layouts(self, keys, without, message, released_source, tmp_path):
        source = released_source(without=without, **keys)
        with pytest.raises(ConversionError, match=message):
            convert(source, tmp_path / "converted", progress=False)
        assert not (tmp_path / "converted").exists()

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"architectures": ["Qwen3ForSequenceClassification"]}, "Only causal language models"),
            ({"use_p2n": True}, "several times per token"),
            ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
            ({"num_attention_heads": 3, "head_dim": 16}, "^num_key_value_heads=2: must divide"),
        ],
    )
    def test_qwen3_variants(self, fields, message, qwen3_source, edit_config, tmp_path):
        source = qwen3_source()
        edit_config(source, **fields)
        with pytest.raises(ConversionError, match=message):
            convert(source, tmp_path / "converted", progress=False)

    def test_already_converted(self, qwen3_source, tmp_path):
        convert(qwen3_source(), tmp_path / "converted", progress=False)
        with pytest.raises(ConversionError, match=r"already is what .*from_pretrained\(path, ...\)"):
            convert(tmp_path / "converted", tmp_path / "again", progress=False)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"to": "depth"}, "to='depth': must be one of depth_attention, attnres"),
            ({"to": "DenseFromer"}, "a model type of one of these; similar ones are denseformer, denseformer_"),
            ({"to": "depth_llama"}, "to='depth_llama': .* is Qwen3, which becomes depth_qwen3."),
            ({"depth_stride": -1}, "^depth_stride=-1: must be"),
            ({"depth_window": -1}, "^depth_window=-1: must be"),
            ({"key_norm_position": "both"}, "key_norm_position"),
            ({"dtype": "float64"}, "dtype='float64': must be one of float32"),
            ({"revision": "main"}, "revision='main' is for checkpoints on the Hub"),
        ],
    )
    def test_invalid_options(self, options, message, qwen3_source, tmp_path):
        with pytest.raises(ConversionError, match=message):
            convert(qwen3_source(), tmp_path / "converted", progress=False, **options)
        assert not (tmp_path / "converted").exists()


def test_a_window_without_mixing_has_no_effect(qwen3_source, tmp_path):
    source = qwen3_source()
    report = convert(source, tmp_path / "converted", depth_stride=0, depth_window=2, dry_run=True)
    assert report.warnings == ["depth_window=2 has no effect: depth_stride=0 switches the mixing off."]
    for options in ({"depth_stride": 0}, {"depth_window": 2}, {"depth_stride": 0, "depth_window": 0}):
        assert convert(source, tmp_path / "converted", dry_run=True, **options).warnings == []


def test_an_option_of_another_target_names_the_valid_ones(qwen3_source, tmp_path):
    with pytest.raises(ConversionError, match="no option attnres_scale. Its options are: depth_stride, depth_win"):
        convert(qwen3_source(), tmp_path / "converted", attnres_scale="sum")


def test_own_code_of_a_source_is_left_behind(qwen3_source, edit_config, tmp_path):
    source = qwen3_source()
    edit_config(source, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (source / "modeling_evil.py").write_text("raise SystemExit")
    (source / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", null]}}')
    report = convert(source, tmp_path / "converted", progress=False)
    assert "auto_map" in report.warnings[0] and "tokenizer needs code" in report.warnings[1]
    assert not (tmp_path / "converted" / "modeling_evil.py").exists()
    auto_map = json.loads((tmp_path / "converted" / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForCausalLM"] == "modeling_depth_attention.DepthQwen3ForCausalLM"
