# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Pictures, and the command that draws them."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from depthmix.conversion.cli import main
from depthmix.inspection import depth_map, plot


pytestmark = pytest.mark.once

matplotlib = pytest.importorskip("matplotlib")

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_qwen3_python"


@pytest.fixture
def texts_of():
    """`texts_of(path)` gives all that is written in a picture in SVG."""

    def texts_of(path):
        return re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text())

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        yield texts_of


def test_what_is_drawn(small, inputs, tmp_path, texts_of):
    model = small("depth_qwen3", depth_stride=1, depth_gate=True)
    texts = texts_of(plot(model, inputs, tmp_path / "picture.svg", importance=True))
    for text in ("mean weight", "loss without it, less loss", "gates of heads", "root mean square of outputs"):
        assert text in texts
    assert {"layer 0", "layer 1", "layer 2", "own"} <= {*texts}
    weights = depth_map(model, inputs)
    for target, source in (("layer 1", "own"), ("layer 2", "layer 0"), ("layer 2", "layer 1")):
        assert f"{weights[target, source].item():.2f}" in texts


@pytest.mark.parametrize("model", ["attnres-full", "depth_attention-loops", "mhc", "moda"], indirect=True)
def test_other_methods(model, inputs, tmp_path):
    path = plot(model, inputs, str(tmp_path / "picture.PNG"))
    assert path.read_bytes().startswith(b"\x89PNG") and [*tmp_path.iterdir()] == [path]


@pytest.fixture
def saved(small, tmp_path):
    folder = tmp_path / "model"
    small("denseformer", vocab_size=2048).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, folder)
    return folder


def test_command(saved, tmp_path, capsys, texts_of):
    text, picture = tmp_path / "text.py", tmp_path / "picture.svg"
    text.write_text("def read(path):\n    return open(path).read()\n" * 20)
    main(["plot", str(saved), "--text", str(text), "-o", str(picture), "--tokens", "9", "--importance"])
    assert capsys.readouterr().out == f"Drawn: {picture}\n"
    assert {"embeddings", "loss without it, less loss"} <= {*texts_of(picture)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"-o": "picture.docx"}, "picture.docx: a picture must end in one of "),
        ({"-o": "missing/picture.png"}, "missing is not a folder"),
        ({"--text": "missing.txt"}, "No such file or directory: 'missing.txt'"),
        ({"--text": "model/model.safetensors"}, "model/model.safetensors is no text in UTF-8"),
        ({"--text": "empty.txt"}, "empty.txt has fewer than two tokens"),
        ({"--tokens": "1"}, "tokens=1: must be at least 2"),
        ({"model": str(EXAMPLE)}, "is a qwen3: must be a model of depthmix. `depthmix convert` makes one"),
    ],
)
def test_command_refuses(saved, tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("text.txt").write_text("def f(): pass")
    Path("picture.png").write_text("older")
    options = {"model": "model", "--text": "text.txt", "-o": "picture.png"} | change
    arguments = [options.pop("model"), *(each for option in options.items() for each in option)]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit, match=re.escape(message)):
        main(["plot", *arguments])
    assert sorted(tmp_path.rglob("*")) == before and Path("picture.png").read_text() == "older"


def test_without_matplotlib(small, inputs, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="Pictures need matplotlib: `pip install matplotlib`"):
        plot(small("denseformer"), inputs, tmp_path / "picture.png")
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        main(["plot", "model", "--text", "text.txt", "-o", "picture.png"])


def test_models_without_mixing(small, inputs, tmp_path):
    with pytest.raises(ValueError, match="mixes nothing"):
        plot(small("depth_qwen3", depth_stride=0), inputs, tmp_path / "picture.png")
    assert not [*tmp_path.iterdir()] and torch.is_grad_enabled()
