# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""A few hostile bytes take no time and no memory, and end in one line that names the file, the field and the rule."""

import json
import os
import resource
import shutil
import time
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

from depthmix.conversion import ConversionError, convert, inspect_checkpoint
from depthmix.modeling.modeling_mhc import MHCConnection


LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"


# the files of a source are read here, not by the host library
pytestmark = pytest.mark.once


@contextmanager
def little_is_used(seconds=5, nbytes=300 * 2**20):
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - started < seconds
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < nbytes


def sparse(path, nbytes):
    with open(path, "wb") as file:
        file.truncate(nbytes)


@pytest.mark.parametrize("layers", [200, 1000, 4096, 10**9])
def test_layers_that_a_config_claims(layers, qwen3_source, edit_config, tmp_path):
    source = qwen3_source()
    edit_config(source, num_hidden_layers=layers, layer_types=...)
    with little_is_used():
        reasons = inspect_checkpoint(source).conversions
        with pytest.raises(ConversionError, match=f"num_hidden_layers={layers}"):
            convert(source, tmp_path / "converted", progress=False)
    assert all(
        f"num_hidden_layers={layers}" in reasons[to] for to in ("depth_attention", "attnres", "denseformer", "mhc")
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_labels": 10**8}, "num_labels=100000000: must be at most 1048576"),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000: must be at most 2147483647"),
        ({"hidden_size": 2**30}, "has shape"),
        (
            {"rms_norm_eps": float("nan")},
            "rms_norm_eps=nan: must be a finite number, as fp32 has them .in config.json.",
        ),
        ({"rope_theta": 0, "rope_parameters": ...}, "rope_theta=0: must be positive .in config.json."),
        ({"hidden_act": "bogus"}, "hidden_act='bogus': must be an activation"),
        ({"mtp_layer_types": [[[]]] * 9, "architectures": 5}, "architectures is 5, must be a list"),
    ],
)
def test_fields_that_a_config_claims(fields, message, qwen3_source, edit_config, tmp_path):
    source = qwen3_source()
    edit_config(source, **fields)
    for to in ("depth_qwen3", "mhc"):
        with little_is_used(), pytest.raises(ConversionError, match=message):
            convert(source, tmp_path / "converted", to=to, progress=False)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("streams", [65, 1000, 10**6])
def test_streams_that_the_user_asks_for(streams, qwen3_source, tmp_path):
    source = qwen3_source()
    with little_is_used(), pytest.raises(ConversionError, match=f"mhc_num_streams={streams}: must be at most 64"):
        convert(source, tmp_path / "converted", to="mhc", mhc_num_streams=streams, dry_run=True)


def test_start_values_are_not_made_to_look_at_a_source(qwen3_source, monkeypatch):
    devices, original = set(), MHCConnection.__init__

    def init(self, config):
        original(self, config)
        devices.add(self.projection.device.type)

    monkeypatch.setattr(MHCConnection, "__init__", init)
    assert inspect_checkpoint(qwen3_source()).conversions["mhc"].startswith("yes") and not devices


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json", "LICENSE"])
def test_texts_have_a_limit(name, qwen3_source, tmp_path):
    source = qwen3_source()
    if name.endswith("index.json"):
        (source / "model.safetensors").unlink()
    sparse(source / name, 3 * 10**9)
    with little_is_used(), pytest.raises(ConversionError, match=f"{name} has more than"):
        convert(source, tmp_path / "converted", progress=False)


def test_a_card_that_is_too_large_is_not_read(qwen3_source, tmp_path):
    source = qwen3_source()
    sparse(source / "README.md", 3 * 10**9)
    with little_is_used():
        report = convert(source, tmp_path / "converted", progress=False)
    assert "license was not carried over" in " ".join(report.warnings)


def test_space_is_checked_for_every_file(qwen3_source, tmp_path, monkeypatch):
    source = qwen3_source()
    sparse(source / "LICENSE", 100 * 2**20)
    free = sum(path.stat().st_size for path in source.glob("*.safetensors")) + 10 * 2**20
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**39, free))
    with pytest.raises(ConversionError, match="free, and .* are to be written"):
        convert(source, tmp_path / "converted", progress=False)


def test_a_large_sharded_checkpoint_is_inspected_by_its_headers(tmp_path):
    shards, size = 5, 500 * 10**6
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "intermediate_size": 10**5}
    fields = {"model_type": "llama", "vocab_size": 31250, "hidden_size": 4000, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    weight_map = {}
    for shard in range(shards):
        name, file = f"model.embed_tokens.weight.{shard}", f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header = json.dumps({name: {"dtype": "F32", "shape": [31250, 4000], "data_offsets": [0, size]}}).encode()
        with open(tmp_path / file, "wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            out.truncate(8 + len(header) + size)
        weight_map[name] = file
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with little_is_used(seconds=1, nbytes=100 * 2**20):
        description = inspect_checkpoint(tmp_path)
    assert description.nbytes == 2_500_000_000 and len(description.files) == 5


def test_many_names_are_compared_in_time(qwen3_source):
    """As a checkpoint of hundreds of experts has them, each of which may be one of a release or of an old version."""
    source = qwen3_source()
    header = {f"{i}.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(50_000)}
    text = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with little_is_used(seconds=4, nbytes=200 * 2**20):
        description = inspect_checkpoint(source)
    assert description.num_tensors == 50_000


def test_an_index_of_more_files_than_any(qwen3_source, tmp_path):
    source = qwen3_source()
    (source / "model.safetensors").unlink()
    index = {"weight_map": {f"{i}": f"{i}.safetensors" for i in range(100_000)}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with little_is_used(seconds=2), pytest.raises(ConversionError, match="lists 100000 files, and no checkpoint has"):
        convert(source, tmp_path / "converted", progress=False)


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "tokenizer.json", "config.json", "model.safetensors"])
def test_a_loop_of_links(name, qwen3_source, tmp_path):
    source = qwen3_source()
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(name)
    with pytest.raises(ConversionError, match=f"{name} cannot be followed"):
        convert(source, tmp_path / "converted", progress=False)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "tokenizer.model", "config.json"])
def test_pointers_of_git_lfs(name, qwen3_source, tmp_path):
    source = qwen3_source()
    (source / name).write_text(LFS_POINTER)
    with pytest.raises(ConversionError, match=f"{name} is a pointer of git-lfs.*git lfs pull"):
        convert(source, tmp_path / "converted", progress=False)


@pytest.mark.parametrize(
    "block",
    [
        "7: integer key",
        "tags: 5",
        "to_dict: 1",
        "model-index: 3",
        "tags: [{a: [b]}]\n2020-01-01: x",
    ],
)
def test_harmless_cards_do_not_matter(block, qwen3_source, tmp_path):
    source = qwen3_source()
    (source / "README.md").write_text(f"---\nlicense: mit\n{block}\n---\n# Title\n")
    report = convert(source, tmp_path / "converted", progress=False)
    assert "license: mit" in (tmp_path / "converted" / "README.md").read_text()
    assert not [warning for warning in report.warnings if "README" in warning]


@pytest.mark.parametrize("block", ["a: " + "[" * 5000, "a: *nowhere", "- a", "a: !!python/name:os.system x", "\x00"])
def test_damaged_cards_cost_their_license(block, qwen3_source, tmp_path):
    source = qwen3_source()
    (source / "README.md").write_text(f"---\nlicense: mit\n{block}\n---\n# Title\n")
    report = convert(source, tmp_path / "converted", progress=False)
    assert "license was not carried over" in " ".join(report.warnings)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ['{"a":' * 1100 + "1" + "}" * 1100, '{"a": ' + "[" * 200 + "]" * 200 + "}"])
def test_deep_json(name, text, qwen3_source, tmp_path):
    source = qwen3_source()
    if name.endswith("index.json"):
        (source / "model.safetensors").unlink()
    (source / name).write_text(text)
    with pytest.raises(ConversionError, match=f"{name} is nested more than 100 levels deep"):
        convert(source, tmp_path / "converted", progress=False)


def test_a_deep_header(qwen3_source, tmp_path):
    source = qwen3_source()
    text = ("[" * 100_000).encode()
    (source / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ConversionError, match="model.safetensors is not a valid safetensors file"):
        inspect_checkpoint(source)


@pytest.mark.parametrize("path", ["~nosuchuser/model", "a\0b"])
def test_paths_that_are_none(path, qwen3_source, tmp_path):
    source = qwen3_source()
    with pytest.raises(ConversionError, match="^The destination"):
        convert(source, path)
    with pytest.raises(ConversionError, match="^The source"):
        inspect_checkpoint(path)


@pytest.mark.parametrize("to", ["depth_qwen3", "attnres", "denseformer", "mhc"])
@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_another_default_device(to, device, qwen3_source, tmp_path):
    source = qwen3_source()
    convert(source, tmp_path / "expected", to=to, dtype="bfloat16", progress=False)
    torch.set_default_device(device)
    try:
        inspect_checkpoint(source)
        convert(source, tmp_path / "converted", to=to, dtype="bfloat16", progress=False)
    finally:
        torch.set_default_device(None)
    expected, written = (load_file(tmp_path / name / "model.safetensors") for name in ("expected", "converted"))
    assert expected.keys() == written.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "setting",
    [
        {"_attn_implementation": "flash_attention_2"},
        {"attn_implementation": "kernels-community/nothing"},
        {"_attn_implementation_internal": "flash_attention_3"},
        {"experts_implementation": "nothing"},
        {"use_kernels": True, "fusion_config": {"patch_embeddings": True}, "gradient_checkpointing": True},
        {"output_attentions": True},
    ],
)
def test_settings_of_execution_are_not_obeyed(setting, qwen3_source, edit_config, tmp_path):
    source = qwen3_source()
    edit_config(source, **setting)
    for to in ("depth_qwen3", "attnres"):
        report = convert(source, tmp_path / to, to=to, progress=False)
        assert not [warning for warning in report.warnings if "keys that stock" in warning]
        written = json.loads((tmp_path / to / "config.json").read_text())
        assert not setting.keys() & written.keys()
        # and of a model of this package
        edit_config(tmp_path / to, **setting)
        inspect_checkpoint(tmp_path / to)


def test_one_line_and_1(qwen3_source, edit_config, tmp_path, capsys):
    from depthmix.conversion.cli import main

    source = qwen3_source()
    edit_config(source, is_causal=False)
    with pytest.raises(SystemExit) as ended:
        main(["convert", os.fspath(source), os.fspath(tmp_path / "converted")])
    assert str(ended.value).startswith("depthmix: error: is_causal=False in config.json: stands for")
    assert "\n" not in str(ended.value) and os.listdir(tmp_path) == ["source"]
