# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`convert` to moda_olmo2: function, new projections, configuration, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Olmo2Config, Olmo2ForCausalLM

from depthmix import MoDAOlmo2Config, MoDAOlmo2ForCausalLM
from depthmix.conversion import ConversionError, convert, inspect_checkpoint
from depthmix.conversion.cli import main


NO_SLOTS = {"moda_attn_slots": False, "moda_ffn_slots": False}
# every field that changes OLMo2's function
SOURCES = {
    "plain": {},
    "with everything": {
        "attention_bias": True,
        "head_dim": 32,
        "rms_norm_eps": 1e-4,
        "hidden_act": "gelu",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e5,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "tied": {"tie_word_embeddings": True},
}
EACH_SOURCE = pytest.mark.parametrize("kind", SOURCES)
# options, and the projections that they need in a layer
ROWS = {
    "row 3": ({"moda_ffn_slots": False}, ()),
    "row 4": ({}, ("mlp",)),
    "row 5": ({"moda_attn_depth_proj": True, "moda_depth_key_mode": "reader_norm"}, ("attn", "mlp")),
}


@pytest.fixture
def olmo2_source(tmp_path, tiny):
    """`olmo2_source(kind, **fields)` saves an awake stock model of `SOURCES` and returns its folder."""

    def make(kind="plain", **fields):
        torch.manual_seed(0)
        model = Olmo2ForCausalLM(Olmo2Config(**(tiny | SOURCES[kind] | fields)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / "source")
        return tmp_path / "source"

    return make


@torch.no_grad()
def logits_of(folder, ids, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()(ids).logits


@EACH_SOURCE
def test_without_slots_nothing_changes(kind, olmo2_source, tmp_path, token_ids):
    source, dest = olmo2_source(kind), tmp_path / "converted"
    report = convert(source, dest, to="moda_olmo2", progress=False, **NO_SLOTS)
    assert type(AutoModelForCausalLM.from_pretrained(dest)) is MoDAOlmo2ForCausalLM
    ids = token_ids(2, 200)
    assert torch.equal(logits_of(dest, ids), logits_of(source, ids))
    assert "exactly what the vanilla checkpoint does" in report.function_note
    assert report.new == report.warnings == []


@EACH_SOURCE
@pytest.mark.parametrize("row", ROWS)
def test_rows(kind, row, olmo2_source, tmp_path, token_ids):
    source, dest, (options, projections) = olmo2_source(kind), tmp_path / "converted", ROWS[row]
    options = options | {"retrofit": False}
    report = convert(source, dest, to="moda_olmo2", progress=False, **options)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, dest))
    new = {f"model.layers.{i}.{site}_depth_kv_proj.weight" for i in range(3) for site in projections}
    assert set(report.new) == after.keys() - before.keys() == new
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    for name in new:
        assert after[name].std().item() == pytest.approx(0.15, rel=0.1) and after[name].mean().abs() < 0.01
    assert len({after[name][0, 0].item() for name in new}) == len(new)
    for site in projections:
        assert f"new model.layers.*.{site}_depth_kv_proj.weight (3)" in str(report)
    # always the same start
    convert(source, tmp_path / "again", to="moda_olmo2", progress=False, **options)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (dest / "model.safetensors").read_bytes()

    _, info = MoDAOlmo2ForCausalLM.from_pretrained(dest, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = token_ids(2, 20)
    assert (logits_of(dest, ids) - logits_of(source, ids)).abs().max() > 0.05
    assert "another function" in report.function_note and "Fine-tune it before use" in report.function_note
    assert "Mixture-of-Depths Attention" in (dest / "README.md").read_text()


@EACH_SOURCE
def test_fields_are_carried(kind, olmo2_source, tmp_path):
    source = olmo2_source(kind, bos_token_id=5, max_position_embeddings=300)
    options = {"moda_attn_depth_proj": True, "moda_depth_key_mode": "reader_norm", "moda_depth_window": 3}
    convert(source, tmp_path / "converted", to="moda_olmo2", progress=False, **options)
    stock = Olmo2Config.from_pretrained(source).to_dict()
    read = MoDAOlmo2Config.from_pretrained(tmp_path / "converted").to_dict()
    ignored = {"model_type", "architectures", "transformers_version", "_name_or_path"}
    assert {name: read.get(name) for name in stock.keys() - ignored} == {
        name: value for name, value in stock.items() if name not in ignored
    }
    assert {name: read[name] for name in options} == options


def test_layout_of_older_files(olmo2_source, edit_config, tmp_path, token_ids):
    """Where the rotary base stood at the top, and where a base model was saved."""
    source = olmo2_source(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    tensors = {n.removeprefix("model."): tensor for n, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    expected = logits_of(source, token_ids(2, 200))
    edit_config(source, rope_parameters=..., rope_theta=1e6, rope_scaling=None)
    convert(source, tmp_path / "converted", to="moda_olmo2", progress=False, **NO_SLOTS)
    assert torch.equal(logits_of(tmp_path / "converted", token_ids(2, 200)), expected)


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_new_tensors_have_the_dtype_of_the_others(dtype, olmo2_source, tmp_path):
    source = olmo2_source()
    tensors = {n: tensor.bfloat16() for n, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "converted", to="moda_olmo2", dtype=dtype, progress=False)
    written = load_file(tmp_path / "converted" / "model.safetensors")
    expected = torch.float16 if dtype else torch.bfloat16
    assert written["model.layers.0.mlp_depth_kv_proj.weight"].dtype is expected


def test_options_on_the_command_line(olmo2_source, tmp_path, capsys):
    source, dest = olmo2_source(), tmp_path / "converted"
    options = ["--no-moda-ffn-slots", "--moda-attn-slots", "--moda-attn-depth-proj", "--moda-depth-window", "2"]
    main(["convert", str(source), str(dest), "--to", "moda_olmo2", *options, "--moda-depth-key-mode", "reader_norm"])
    config = json.loads((dest / "config.json").read_text())
    moda_fields = {name: value for name, value in config.items() if name.startswith("moda_")}
    assert moda_fields == {
        "moda_attn_slots": True,
        "moda_ffn_slots": False,
        "moda_attn_depth_proj": True,
        "moda_depth_key_mode": "reader_norm",
        "moda_norm_style": "olmo2",
        "moda_depth_window": 2,
        "moda_gate": True,
    }
    assert "new model.layers.*.attn_depth_kv_proj.weight (3)" in capsys.readouterr().out
    main(["inspect", str(dest)])
    text = capsys.readouterr().out
    assert "MoDAOlmo2 (depthmix)" in text
    assert all(f"{name}={value}" in text for name, value in moda_fields.items())


def test_inspect(olmo2_source):
    conversions = inspect_checkpoint(olmo2_source()).conversions
    fields = "moda_attn_slots=True, moda_ffn_slots=True, moda_attn_depth_proj=False, moda_depth_key_mode='sequence'"
    said = f"yes, to moda_olmo2, with {fields}, moda_depth_window=None, moda_gate=True unless asked otherwise."
    assert conversions["moda"].startswith(said)
    assert all(outcome.startswith("yes, to ") and "_olmo2, " in outcome for outcome in conversions.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth_stride": 2}, "moda has no option depth_stride. Its options are: moda_attn_slots, "),
        ({"moda_depth_window": 1}, "^moda_depth_window=1: must be None or at least 2"),
        ({"moda_attn_slots": False, "moda_attn_depth_proj": True}, "^moda_attn_depth_proj=True: must be False"),
        ({"moda_depth_key_mode": "raw"}, "moda_depth_key_mode"),
    ],
)
def test_invalid_options(options, message, olmo2_source, tmp_path):
    with pytest.raises(ConversionError, match=message):
        convert(olmo2_source(), tmp_path / "converted", to="moda_olmo2", progress=False, **options)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_dropout": 0.1}, "^attention_dropout=0.1: must be 0 with depth slots"),
        ({"sliding_window": 8}, "^sliding_window=8"),
        ({"architectures": ["Olmo2ForSequenceClassification"]}, r"\(Olmo2ForCausalLM\) convert"),
        ({"model_type": "gemma"}, r"does not convert to moda. Accepted are: Qwen3; Qwen2; Llama; "),
        ({"model_type": "moda_olmo2", "depth_impl": "auto"}, "already is what it would become"),
        ({"num_hidden_layers": 5}, r"model\.layers\.4\.self_attn\.q_proj\.weight is missing"),
    ],
)
def test_refused_sources(fields, message, olmo2_source, edit_config, tmp_path):
    source = olmo2_source()
    edit_config(source, **fields)
    with pytest.raises(ConversionError, match=message):
        convert(source, tmp_path / "converted", to="moda_olmo2", progress=False)
    assert not (tmp_path / "converted").exists()


def test_options_without_effect_are_reported(olmo2_source, tmp_path):
    options = NO_SLOTS | {"moda_depth_window": 2}
    report = convert(olmo2_source(), tmp_path / "converted", to="moda_olmo2", dry_run=True, **options)
    assert report.warnings == ["moda_depth_window=2 has no effect: there are no depth slots."]


def test_dry_run_makes_the_start_values(olmo2_source, tmp_path, monkeypatch):
    def broken():
        raise RuntimeError("no generator")

    monkeypatch.setattr(torch, "Generator", broken)
    with pytest.raises(RuntimeError, match="no generator"):
        convert(olmo2_source(), tmp_path / "converted", to="moda_olmo2", dry_run=True, retrofit=False)
