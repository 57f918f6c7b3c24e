# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The code in the documents is that of the tree, and runs; `document_blocks` says what is done with which block."""

import re
import shutil
from pathlib import Path

import pytest
import transformers
import yaml
from document_blocks import (
    DOCUMENTS,
    LANGUAGES,
    LOOKS_LIKE_CODE,
    REASONS,
    ROOT,
    Block,
    blocks_of,
    check_command,
    commands_of,
    runs_here,
)

from depthmix.conversion.cli import main


pytestmark = pytest.mark.once

BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
EXCERPTS = [block for block in BLOCKS if block.is_excerpt]
# of a document all or nothing runs, since its blocks go on from each other
RUN = {
    document: blocks
    for document in DOCUMENTS
    if (blocks := [block for block in BLOCKS if block.document == document and not block.is_excerpt])
    and any(
        block.not_run is None
        and (block.language == "python" or (block.language == "bash" and any(map(runs_here, commands_of(block)))))
        for block in blocks
    )
}


def test_every_block_is_run_or_says_why_not():
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block}: a block is one of {', '.join(LANGUAGES)}"
        if block.language == "text":
            assert not LOOKS_LIKE_CODE.search(block.text), f"{block}: this is code"
        if block.not_run is not None:
            assert block.not_run in REASONS, f"{block}: {block.not_run!r} is no reason"
            assert re.search(REASONS[block.not_run], block.text, re.MULTILINE), f"{block}: it does not show why not"
    # what teaches the use of the package is not left out by mistake
    assert {"README.md", "convert.md", "train.md", "serve.md", "retrofit.md"} <= {document.name for document in RUN}


@pytest.mark.parametrize("name", ["add_a_method.md", "add_a_backbone.md"])
def test_every_block_of_python_names_its_file(name):
    blocks = [block for block in BLOCKS if block.document.name == name and block.language == "python"]
    assert blocks and all(block.is_excerpt for block in blocks)


@pytest.mark.parametrize("block", EXCERPTS, ids=str)
def test_excerpt_is_in_the_file(block):
    """A line of dots stands for lines that are left out; the others follow each other in the file as they do here."""
    path, _, text = block.text.partition("\n")
    source, place = (ROOT / path.removeprefix("# ")).read_text(), 0
    for part in re.split(r"^ *\.\.\.\n", text, flags=re.MULTILINE):
        found = source.find(part, place)
        assert found >= 0, f"{block} shows what {path} does not have:\n{part}"
        place = found + len(part)


def slug(heading: str) -> str:
    """The anchor that code hosts and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(document):
    text = document.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in map(slug, re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)), link
    for name in re.findall(
        r"`((?:tests|modeling|configuration|conversion|benchmarks|depthmix|examples)/[\w/.]*)`", text
    ):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language == "bash"], ids=str)
def test_commands_that_are_not_run_exist(block):
    for words in commands_of(block):
        # `depthmix serve` takes the arguments of another program
        if (block.not_run is not None or not runs_here(words)) and words[:2] != ["depthmix", "serve"]:
            check_command(words)


def test_first_page_is_short_and_the_site_has_all_pages():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = re.findall(r"[\w/]+\.md", str(nav))
    # the last one is made of the docstrings
    assert sorted(listed) == sorted([*(path.name for path in (ROOT / "docs").glob("*.md")), "reference.md"])


def test_citation_has_what_readers_of_the_format_need():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0" and all(author.get("name") for author in citation["authors"])
    setup = (ROOT / "setup.cfg").read_text()
    assert f"license = {citation['license']}\n" in setup and f"author = {citation['authors'][0]['name']}\n" in setup


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder in which Hub ids are folders with tiny models, and a process in which training is two steps long."""
    pytest.importorskip("peft")
    shutil.copytree(ROOT / "examples" / "tiny_qwen3_python", tmp_path / "Qwen" / "Qwen3-0.6B")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    text = Path(shutil.__file__).read_text()
    (tmp_path / "book.txt").write_text(text[:12_000])
    (tmp_path / "other_book.txt").write_text(text[12_000:18_000])
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for repository, config_class in (
        ("meta-llama/Llama-3.2-1B", transformers.LlamaConfig),
        ("allenai/OLMo-2-0425-1B", transformers.Olmo2Config),
    ):
        model = transformers.AutoModelForCausalLM.from_config(config_class(**sizes))
        model.save_pretrained(tmp_path / repository)
    monkeypatch.chdir(tmp_path)

    full = transformers.TrainingArguments
    short = {"use_cpu": True, "max_steps": 2, "per_device_train_batch_size": 1, "logging_steps": 1}
    short |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    monkeypatch.setattr(transformers, "TrainingArguments", lambda *args, **kwargs: full(*args, **kwargs | short))
    return tmp_path


def run_python(block: Block, namespace: dict, capsys: pytest.CaptureFixture) -> None:
    exec(compile(block.text, str(block), "exec"), namespace)
    printed = capsys.readouterr().out.splitlines()
    for shown in re.findall(r"^ *print\(.*\n# (\(.*)", block.text, re.MULTILINE):
        assert any(line and shown.startswith(line) for line in printed), f"{block}: {shown} is not what is printed"


@pytest.mark.slow
@pytest.mark.parametrize("document", RUN, ids=lambda path: path.name)
def test_blocks_run(document, workplace, capsys):
    """From the first to the last, as a reader would who types them all."""
    namespace: dict = {}
    for block in RUN[document]:
        if block.not_run is not None:
            continue
        if block.language == "python":
            run_python(block, namespace, capsys)
        elif block.language == "bash":
            for words in filter(runs_here, commands_of(block)):
                main(words[1:])
    check = OUTCOMES.get(document.name)
    if check is not None:
        check(workplace, namespace)


def check_readme(folder: Path, namespace: dict) -> None:
    assert (folder / "tiny-depth" / "model.safetensors").is_file()
    assert "def read_file(path" in namespace["generate"]("def read_file(path", max_new_tokens=2)[0]["generated_text"]
    assert (folder / "qwen3-depth-tuned" / "modeling_depth_attention.py").is_file()
    assert len(namespace["weights"]) == 8
    assert namespace["model"].config.model_type == "attnres_olmo2"


def check_convert(folder: Path, namespace: dict) -> None:
    assert {"qwen3-depth", "llama-attnres", "olmo2-moda"} < {path.name for path in folder.iterdir()}
    assert namespace["report"].retrofit


def check_train(folder: Path, namespace: dict) -> None:
    assert {"from-scratch", "qwen3-depth-tuned", "qwen3-depth-lora"} < {path.name for path in folder.iterdir()}
    assert 0 < namespace["trainer"].evaluate()["eval_loss"] < 10
    # the adapter and the gates of the last run are merged, and both have moved
    tuned, start = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
        for name in ("qwen3-depth-lora", "qwen3-depth")
    )
    for ending in ("q_proj.weight", "depth_gate.weight"):
        assert any(not tuned[name].equal(start[name]) for name in start if name.endswith(ending)), ending


def check_retrofit(folder: Path, namespace: dict) -> None:
    logs = namespace["trainer"].state.log_history
    assert [log["step"] for log in logs if "gate/mean_size" in log] == [1, 2]
    assert all("depth/entropy" in log for log in logs if "gate/mean_size" in log)
    # the last of the models has trained nothing but its gates
    trained = [name for name, parameter in namespace["model"].named_parameters() if parameter.requires_grad]
    assert trained and all("depth_gate" in name for name in trained)
    assert (folder / "qwen3-depth-lora" / "model.safetensors").is_file()


def check_looking_inside(folder: Path, namespace: dict) -> None:
    assert (folder / "depth.png").is_file() and len(namespace["lens"].labels) == 9
    assert namespace["weights"].targets == tuple(f"layer {i}" for i in range(1, 8))


# what has to have come out of a document, besides that nothing failed
OUTCOMES = {
    "README.md": check_readme,
    "convert.md": check_convert,
    "train.md": check_train,
    "retrofit.md": check_retrofit,
    "looking_inside.md": check_looking_inside,
}
