# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The notebook: its code cells run from the first to the last, and print what stands below them."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest


NOTEBOOK = Path(__file__).parents[2] / "examples" / "look_inside.ipynb"
NUMBER = re.compile(r"-?\+?\d+\.\d+")


def test_cells(monkeypatch):
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    monkeypatch.chdir(NOTEBOOK.parents[1])
    namespace: dict = {}
    for cell in cells:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {cell['execution_count']}", "exec"), namespace)
        # text only: pictures make repositories large, and nobody can compare them
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert NUMBER.sub("#", printed.getvalue()) == NUMBER.sub("#", shown)
        numbers, expected = (list(map(float, NUMBER.findall(text))) for text in (printed.getvalue(), shown))
        # they are rounded to two digits
        assert numbers == pytest.approx(expected, abs=0.011)
    assert len(namespace["weights"].targets) == 7
