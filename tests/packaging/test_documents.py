# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The code in the documents is that of the tree, and runs."""

import re
import shutil
from pathlib import Path

import pytest


pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
EXCERPTS = [
    (document.name, path, text)
    for document in sorted((ROOT / "docs").glob("add_*.md"))
    for path, text in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", document.read_text(), re.DOTALL)
]


def test_every_block_of_python_names_its_file():
    blocks = sum(document.read_text().count("```python") for document in (ROOT / "docs").glob("add_*.md"))
    assert blocks == len(EXCERPTS) > 8


@pytest.mark.parametrize(("document", "path", "text"), EXCERPTS, ids=lambda value: value.partition("\n")[0])
def test_excerpt_is_in_the_file(document, path, text):
    """A line of dots stands for lines that are left out; the others follow each other in the file as they do here."""
    source, place = (ROOT / path).read_text(), 0
    for part in re.split(r"^ *\.\.\.\n", text, flags=re.MULTILINE):
        found = source.find(part, place)
        assert found >= 0, f"{document} shows what {path} does not have:\n{part}"
        place = found + len(part)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "kernels/README.md", "docs/*.md"])
def test_links_and_paths_lead_somewhere(document):
    for path in ROOT.glob(document):
        text = path.read_text()
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
        for name in re.findall(
            r"`((?:tests|modeling|configuration|conversion|benchmarks|depthmix|examples)/[\w/.]*)`", text
        ):
            assert (ROOT / name).exists(), f"{path.name}: {name}"


@pytest.mark.slow
def test_python_of_the_readme_runs(tmp_path, monkeypatch):
    """From the conversion to the adapter, in one process, with the small checkpoint under the name of a larger one."""
    pytest.importorskip("peft")
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text[: text.index("## Push")], re.DOTALL)
    assert len(blocks) == 6
    shutil.copytree(ROOT / "examples" / "tiny_qwen3_python", tmp_path / "Qwen" / "Qwen3-0.6B")
    (tmp_path / "book.txt").write_text(Path(shutil.__file__).read_text())
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in blocks:
        block = block.replace("bf16=True)", 'bf16=True, use_cpu=True, max_steps=1, report_to="none")')
        exec(compile(block, "README.md", "exec"), namespace)
    assert len(namespace["weights"]) == namespace["model"].config.num_hidden_layers
    assert (tmp_path / "qwen3-depth-tuned" / "modeling_depth_attention.py").is_file()
