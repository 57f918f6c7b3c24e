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


@pytest.fixture
def run_blocks(tmp_path, monkeypatch):
    """`run_blocks(name, text, old, new)` runs the Python of a text, in which `old` becomes `new`, in one process."""
    pytest.importorskip("peft")
    shutil.copytree(ROOT / "examples" / "tiny_qwen3_python", tmp_path / "Qwen" / "Qwen3-0.6B")
    (tmp_path / "book.txt").write_text(Path(shutil.__file__).read_text())
    monkeypatch.chdir(tmp_path)

    def run_blocks(name: str, text: str, old: str, new: str) -> tuple[int, dict]:
        namespace: dict = {}
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        for block in blocks:
            assert old in text
            exec(compile(block.replace(old, new), name, "exec"), namespace)
        return len(blocks), namespace

    return run_blocks


@pytest.mark.slow
def test_python_of_the_readme_runs(tmp_path, run_blocks):
    """From the conversion to the adapter, with the small checkpoint under the name of a larger one."""
    text = (ROOT / "README.md").read_text()
    count, namespace = run_blocks(
        "README.md",
        text[: text.index("## Push")],
        "bf16=True)",
        'bf16=True, use_cpu=True, max_steps=1, report_to="none")',
    )
    assert count == 6
    assert len(namespace["weights"]) == namespace["model"].config.num_hidden_layers
    assert (tmp_path / "qwen3-depth-tuned" / "modeling_depth_attention.py").is_file()


@pytest.mark.slow
def test_recipes_of_retrofits_run(tmp_path, run_blocks):
    count, namespace = run_blocks(
        "docs/retrofit.md",
        (ROOT / "docs" / "retrofit.md").read_text(),
        "logging_steps=10)",
        'logging_steps=1, max_steps=2, use_cpu=True, report_to="none", save_strategy="no")',
    )
    assert count == 3
    first = namespace["trainer"].state.log_history
    assert [log["step"] for log in first if "gate/mean_size" in log] == [1, 2]
    assert all("depth/entropy" in log for log in first if "gate/mean_size" in log)
    # the last of the models has trained nothing but its gates
    trained = [name for name, parameter in namespace["model"].named_parameters() if parameter.requires_grad]
    assert trained and all("depth_gate" in name for name in trained)
    assert (tmp_path / "qwen3-depth-lora" / "model.safetensors").is_file()


def test_looking_inside_runs(tmp_path, run_blocks, capsys):
    pytest.importorskip("matplotlib")
    text = (ROOT / "docs" / "looking_inside.md").read_text()
    # it is not among what tests install, and reads a block from the file in which it stands
    text, found = re.subn(r"```python\nimport nnsight.*?```", "", text, flags=re.DOTALL)
    assert found == 1
    count, namespace = run_blocks("docs/looking_inside.md", text, "examples/tiny_qwen3_python", "Qwen/Qwen3-0.6B")
    assert count == 6
    assert (tmp_path / "depth.png").is_file() and len(namespace["lens"].labels) == 9
    assert "('layer 1', 'layer 2', 'layer 3'" in capsys.readouterr().out
