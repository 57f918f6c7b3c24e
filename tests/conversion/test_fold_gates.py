# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Models without the gates that are all open."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from depthmix.conversion import ConversionError, convert, fold_gates, verify_code
from depthmix.conversion.cli import main


@pytest.fixture(params=["depth_attention", "moda"])
def opened(request, qwen3_source, tmp_path):
    """`opened(**values)` saves a converted model whose gates are one, but for these by name."""

    def opened(**values):
        convert(qwen3_source(), tmp_path / "gated", to=request.param, progress=False)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "gated")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("depth_gate.weight"):
                    parameter.fill_(1)
            for name, (i, value) in values.items():
                model.get_parameter(f"model.layers.{name[1:]}.self_attn.depth_gate.weight")[i] = value
        model.config.note = "what is no field"
        model.save_pretrained(tmp_path / "gated")
        return tmp_path / "gated"

    return opened


@torch.no_grad()
def test_the_same_function_without_gates(opened, tmp_path, token_ids, capsys):
    source, dest = opened(), tmp_path / "folded"
    main(["fold-gates", str(source), str(dest)])
    text = capsys.readouterr().out
    before, after = load_file(source / "model.safetensors"), load_file(dest / "model.safetensors")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, dest)]
    assert configs[1] == configs[0] | {name: False for name in ("depth_gate", "moda_gate") if name in configs[0]}
    gates = before.keys() - after.keys()
    assert len(gates) == 3 and all(f"{name}\n" in text + "\n" for name in gates)
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    verify_code(dest)
    assert "have been left out since" in (dest / "README.md").read_text()
    loaded, loading = AutoModelForCausalLM.from_pretrained(dest, output_loading_info=True)
    assert not any(loading.values())
    gated, ids = AutoModelForCausalLM.from_pretrained(source), token_ids(2, 30)
    assert torch.equal(loaded(ids).logits, gated(ids).logits)
    assert not [name for name, _ in loaded.named_parameters() if "gate.weight" in name and "depth" in name]
    # now there is nothing left to fold
    with pytest.raises(ConversionError, match=r"must be of a model with gates \(depth_gate or moda_gate: true\)"):
        fold_gates(dest, tmp_path / "again")


def test_what_is_refused(opened, qwen3_source, tmp_path):
    almost = 1 - 2**-24
    source = opened(l2=(1, almost))
    message = rf"model\.layers\.2\.self_attn\.depth_gate\.weight\[1\] is {almost!r}: must be 1\. A gate"
    with pytest.raises(ConversionError, match=message):
        fold_gates(source, tmp_path / "folded")
    assert not (tmp_path / "folded").exists()
    with pytest.raises(ConversionError, match="must be separate folders"):
        fold_gates(source, source)
    with pytest.raises(ConversionError, match="must be of a model with gates"):
        fold_gates(qwen3_source(), tmp_path / "folded")
    (tmp_path / "folded").mkdir()
    (tmp_path / "folded" / "notes.txt").write_text("mine")
    with pytest.raises(ConversionError):
        fold_gates(source, tmp_path / "folded", overwrite=True)
    assert (tmp_path / "folded" / "notes.txt").read_text() == "mine"


def test_the_users_folder_is_named(opened, tmp_path, monkeypatch, caplog):
    """And not the one that is written to, which is gone when the message is read."""
    source = opened()
    left = tmp_path / ".folded.0123abcd.incomplete"
    left.mkdir()
    path = source / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"auto_map": content["auto_map"] | {"AutoModelForCausalLM": "mine.Model"}}))
    with pytest.raises(ConversionError) as refusal:
        fold_gates(source, tmp_path / "folded")
    assert str(refusal.value).startswith(f"What would travel from {source} leads to other code")
    assert "config.json: auto_map of AutoModelForCausalLM names 'mine.Model'" in str(refusal.value)
    assert ".incomplete" not in str(refusal.value) and not (tmp_path / "folded").exists()
    # what a run that was killed has left
    assert "left over from an earlier run, was removed" in caplog.text and not left.exists()
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10, 10))
    with pytest.raises(ConversionError, match="has 10 bytes free"):
        fold_gates(source, tmp_path / "folded")


def test_folders_that_are_no_gated_models(opened, tmp_path):
    source = opened()
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConversionError, match="file is not a folder"):
        fold_gates(tmp_path / "file", tmp_path / "folded")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConversionError, match=r"empty has no config\.json"):
        fold_gates(tmp_path / "empty", tmp_path / "folded")
    tensors = load_file(source / "model.safetensors")
    whole = {name: tensor.long() if "depth_gate" in name else tensor for name, tensor in tensors.items()}
    save_file(whole, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"depth_gate\.weight has the dtype I64: must be a floating dtype"):
        fold_gates(source, tmp_path / "folded")
    gateless = {name: tensor for name, tensor in tensors.items() if "depth_gate" not in name}
    save_file(gateless, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match="has no tensor that ends in .*, though its config.json has"):
        fold_gates(source, tmp_path / "folded")
    assert not (tmp_path / "folded").exists()
