# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The times with and without a draft, of the models that are shipped, and bad pairs."""

import csv
from pathlib import Path

import pytest

from benchmarks import assisted


PAIR = Path(__file__).parents[2] / "examples/trained_pair"


def test_a_row_for_each_way(tmp_path, monkeypatch):
    text, output = tmp_path / "text.py", tmp_path / "rows.csv"
    text.write_text("import os\n\n\ndef main():\n")
    folders = [str(PAIR / name) for name in ("depth_attention", "vanilla")]
    options = ["--text", str(text), "--new-tokens", "6", "--output", str(output)]
    monkeypatch.setattr("sys.argv", ["assisted", *folders, *options])
    assisted.main()
    lines = [line for line in output.read_text().splitlines() if not line.startswith("#")]
    alone, drafted = csv.DictReader(lines)
    assert float(alone["ratio"]) == 1
    # one prompt: the ratio is that of the two times
    assert float(drafted["ratio"]) == pytest.approx(
        float(drafted["milliseconds"]) / float(alone["milliseconds"]), rel=1e-2
    )


def test_a_target_without_a_draft(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["assisted", "target", "draft", "another"])
    with pytest.raises(SystemExit):
        assisted.main()
    assert "another has no draft" in capsys.readouterr().err
