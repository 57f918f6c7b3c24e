# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What of a source's files and keys reaches the converted folder."""

import json

import pytest
from transformers import AutoModelForCausalLM

from depthmix.conversion import ConversionError, convert
from depthmix.conversion.source_keys import EXECUTION_KEYS, HARMLESS_KEYS


# every file that the host reads, with a key by which code can be named, and what may stay beside it
POINTERS = {
    "config.json": {
        "auto_map": {"AutoProcessor": "acme/repo--processing_evil.Evil", "AutoTokenizer": ["evil.Slow", "evil.Fast"]},
        "custom_pipelines": {"text-generation": {"impl": "pipeline_evil.Evil", "pt": ["AutoModelForCausalLM"]}},
        "kernel_config": {"RMSNorm": "acme/evil:RMSNorm"},
        "task_specific_params": {"text-generation": {"custom_generate": "acme/evil"}},
        "processor_class": "Evil",
        "a_key_of_tomorrow": "acme/repo--evil.Evil",
        "list_of_tomorrow": ["evil.Evil"],
    },
    "tokenizer_config.json": {
        "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None], "AutoProcessor": "processing_evil.Evil"},
        "init_inputs": ["evil"],
        "tokenizer_file": "/etc/evil.json",
        "gguf_file": "evil.gguf",
        "processor_class": "Evil",
        "name_or_path": "acme/evil",
        "a_key_of_tomorrow": "evil.Evil",
    },
    "special_tokens_map.json": {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_object": {"a": 1}},
    "generation_config.json": {
        "auto_map": {"AutoModel": "evil.Evil"},
        "custom_generate": "acme/evil",
        "penalty_alpha": 0.6,
        "num_beam_groups": 2,
        "dola_layers": "high",
        "compile_config": {"backend": "evil"},
        "a_key_of_tomorrow": "evil.Evil",
    },
    "chat_template.json": {"auto_map": {"AutoProcessor": "evil.Evil"}, "processor_class": "Evil"},
}
MAY_STAY = {
    "config.json": {"is_causal": True},
    "tokenizer_config.json": {
        "model_max_length": 512,
        "fim_token": "<fim>",
        "added_tokens_decoder": {"3": {"content": "<x>", "special": True}},
        "add_prefix_space": False,
        "chat_template": "{{ messages }}",
        "tokenizer_class": "TokenizersBackend",
    },
    "special_tokens_map.json": {"eos_token": {"content": "<e>", "lstrip": False}, "extra_special_tokens": ["<y>"]},
    "generation_config.json": {"temperature": 0.5, "do_sample": True, "num_beam_groups": 1, "penalty_alpha": None},
    "chat_template.json": {"chat_template": "{{ messages }}"},
}


@pytest.fixture
def put(qwen3_source):
    """`put(content)` gives a source with these keys in its files."""

    def put(content):
        source = qwen3_source()
        for name, fields in content.items():
            path = source / name
            before = json.loads(path.read_text()) if path.exists() and name == "config.json" else {}
            path.write_text(json.dumps(before | fields))
        return source

    return put


@pytest.mark.parametrize("to", ["depth_qwen3", "mhc"])
def test_pointers_to_code_stay_behind_and_are_named(to, put, tmp_path):
    content = {name: MAY_STAY[name] | POINTERS[name] for name in POINTERS}
    report = convert(put(content), tmp_path / "converted", to=to, progress=False)
    for name, pointers in POINTERS.items():
        text = (tmp_path / "converted" / name).read_text()
        assert "evil" not in text.lower(), name
        written = json.loads(text)
        if name == "config.json":
            assert set(written["auto_map"]) == {
                "AutoConfig",
                "AutoModel",
                "AutoModelForCausalLM",
                "AutoModelForSequenceClassification",
            }
        else:
            assert pointers.keys().isdisjoint(written.keys() - MAY_STAY[name].keys()), name
            kept = {key: value for key, value in MAY_STAY[name].items() if key not in pointers}
            assert {key: written[key] for key in kept} == kept
            said = {f"{key}: dropped from {name}" for key in pointers}
            assert said <= set(report.config_changes)
    for key in POINTERS["config.json"].keys() - {"auto_map"}:
        assert key not in json.loads((tmp_path / "converted" / "config.json").read_text())
    assert any("auto_map in tokenizer_config.json" in warning for warning in report.warnings)


def test_keys_that_no_stock_code_reads_are_named(put, tmp_path):
    report = convert(put({"config.json": POINTERS["config.json"]}), tmp_path / "converted", progress=False)
    said = " ".join([*report.warnings, *report.config_changes])
    # those that say how a model runs, or change nothing in any, are left out without a word
    for key in POINTERS["config.json"].keys() - EXECUTION_KEYS - HARMLESS_KEYS:
        assert key in said, key


def test_files_without_pointers_are_copied_byte_by_byte(put, tmp_path):
    source = put(MAY_STAY)
    report = convert(source, tmp_path / "converted", progress=False)
    for name in MAY_STAY.keys() - {"config.json"}:
        assert (tmp_path / "converted" / name).read_bytes() == (source / name).read_bytes()
    assert not any("dropped from" in change for change in report.config_changes)


def test_generation_parameters_of_an_old_config_are_sifted_too(qwen3_source, edit_config, tmp_path):
    source = qwen3_source()
    (source / "generation_config.json").unlink()
    edit_config(source, temperature=0.5, do_sample=True, penalty_alpha=0.6, num_beam_groups=2)
    convert(source, tmp_path / "converted", progress=False)
    written = json.loads((tmp_path / "converted" / "generation_config.json").read_text())
    assert written["temperature"] == 0.5
    assert not {"penalty_alpha", "num_beam_groups"} & written.keys()
    AutoModelForCausalLM.from_pretrained(tmp_path / "converted")


@pytest.mark.parametrize("name", ["special_tokens_map.json", "chat_template.json", "generation_config.json"])
def test_files_that_are_no_json_object(name, qwen3_source, tmp_path):
    source = qwen3_source()
    (source / name).write_text("[1]")
    with pytest.raises(ConversionError, match=f"{name} must hold a JSON object"):
        convert(source, tmp_path / "converted", progress=False)
    assert not (tmp_path / "converted").exists()
