# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`depthmix verify`: whose code a saved model has."""

import json
import os
import subprocess

import pytest

from depthmix import DepthQwen3Config, __version__, releases
from depthmix.auto import AUTO_MAPS, auto_classes
from depthmix.conversion import ConversionError, convert, verify_code
from depthmix.conversion.cli import main
from depthmix.hub import MANIFEST, collect_remote_code, hash_code
from depthmix.releases import record_release, released_hashes


@pytest.fixture
def saved(tiny, tmp_path):
    """The folder of a saved configuration with its code."""
    DepthQwen3Config(**tiny).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def problems_of(capsys):
    """`problems_of(folder)` gives what the command lists before it exits with 1."""

    def problems_of(folder):
        with pytest.raises(SystemExit) as end:
            main(["verify", str(folder)])
        # text as exit status is what Python prints to stderr before it exits with 1
        assert isinstance(end.value.code, str) and capsys.readouterr().out == ""
        return [line.removeprefix("  - ") for line in end.value.code.split("\n")[1:]]

    return problems_of


@pytest.mark.parametrize("model_type", AUTO_MAPS)
def test_every_family_as_it_is_saved(model_type, tmp_path, capsys):
    auto_classes(model_type)["AutoConfig"]().save_pretrained(tmp_path)
    main(["verify", str(tmp_path)])
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith(f"{tmp_path}: the code is that of ") and __version__ in text
    listed = json.loads((tmp_path / MANIFEST).read_text())["files"]
    assert all(f"{digest}  {name}" in text for name, digest in listed.items())


def test_files_of_another_method(tmp_path, capsys):
    """They are depthmix's too, and saving over its model leaves them there. Edited ones are named."""
    for model_type in ("depth_qwen3", "attnres_olmo2", "attnres"):
        auto_classes(model_type)["AutoConfig"]().save_pretrained(tmp_path)
    check = verify_code(tmp_path)
    assert check.files.keys() == collect_remote_code(AUTO_MAPS["attnres"]).keys()
    assert {"modeling_depth_attention.py", "configuration_depth_attention.py"} <= check.others.keys()
    main(["verify", str(tmp_path)])
    text = capsys.readouterr().out
    assert "of other models of depthmix, and not used by this one" in text and "modeling_depth_attention.py" in text
    with open(tmp_path / "modeling_depth_attention.py", "a") as file:
        file.write("import os\n")
    with pytest.raises(ConversionError, match="modeling_depth_attention.py is not depthmix's"):
        verify_code(tmp_path)


def test_what_would_travel(qwen3_source, tmp_path):
    source = qwen3_source()
    (source / "tokenizer_config.json").write_text('{"extra_special_tokens": {"x": "acme/repo--evil.Evil"}}')
    with pytest.raises(ConversionError) as refusal:
        convert(source, tmp_path / "converted", progress=False)
    title, problem = str(refusal.value).split("\n")
    assert title.startswith(f"What would travel from {source} leads to other code than depthmix's")
    assert "tokenizer_config.json: extra_special_tokens.x names code" in problem
    assert not (tmp_path / "converted").exists()


def test_a_converted_folder(qwen3_source, tmp_path):
    source = qwen3_source()
    (source / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    convert(source, tmp_path / "converted", progress=False)
    assert verify_code(tmp_path / "converted").files.keys() == collect_remote_code(AUTO_MAPS["depth_qwen3"]).keys()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("modeling_depth_attention.py", "import os\n", "modeling_depth_attention.py is edited, or of another version"),
        ("norm_rotary_mix_op.py", None, "norm_rotary_mix_op.py is missing"),
        ("tokenization_evil.py", "", "tokenization_evil.py is not depthmix's"),
        ("custom_generate/generate.py", "", "custom_generate/generate.py is not depthmix's"),
        ("native.so", "", "native.so is not depthmix's"),
        (
            "__pycache__/modeling_depth_attention.cpython-311.pyc",
            "",
            "modeling_depth_attention.cpython-311.pyc is not",
        ),
        ("pytorch_model.bin", "", "pytorch_model.bin can run code when it is opened"),
        ("sub/optimizer.PT", "", "sub/optimizer.PT can run code when it is opened"),
        ("model.pkl", "", "model.pkl can run code"),
        ("adapter_config.json", "{}", "adapter_config.json can name code"),
        ("modules.json", "[]", "modules.json can name code"),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["e.E", null]}}', "tokenizer_config.json: auto_map"),
        ("processor_config.json", '{"a": [{"auto_map": {"x": 1}}]}', "processor_config.json: a.auto_map names code"),
        ("generation_config.json", '{"custom_generate": "acme/evil"}', "custom_generate names code: 'acme/evil'"),
        ("preprocessor_config.json", '{"x": "acme/repo--evil.Evil"}', "preprocessor_config.json: x names code"),
        ("video_preprocessor_config.json", "[" * 5000, "video_preprocessor_config.json cannot be read"),
        ("w.pkl.gz", "", "w.pkl.gz can run code when it is opened"),
        ("pytorch_model.bin.index.json", "{}", "pytorch_model.bin.index.json can run code"),
        ("saved_model.pb", "", "saved_model.pb can run code"),
        ("setup.bat", "", "setup.bat is not depthmix's"),
        ("my_tokenizer.json", '{"auto_map": {"x": 1}}', "my_tokenizer.json: auto_map names code"),
        ("sentence_bert_config.json", '{"model_args": {"trust_remote_code": true}}', "trust_remote_code names code"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "../b.safetensors"}}',
            "names '../b.safetensors'",
        ),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "b.dat"}}',
            "names 'b.dat', which is not a safetensors",
        ),
        ("model.safetensors.index.json", "[]", "model.safetensors.index.json cannot be read"),
        ("tokenizer_config.json", '{"x\\u001b[2J\\n": {"auto_map": 1}}', r"x\x1b[2J\n.auto_map names code: 1"),
    ],
)
def test_what_is_named(name, content, problem, saved, problems_of):
    path = saved / name
    path.parent.mkdir(exist_ok=True)
    path.unlink() if content is None else path.write_text(content)
    (found,) = problems_of(saved)
    assert problem in found


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"auto_map": None}, "auto_map is None"),
        ({"auto_map": {"AutoModel": "evil.Evil"}}, "auto_map of AutoModel names 'evil.Evil'"),
        ({"auto_map": {"AutoProcessor": "evil.Evil"}}, "auto_map of AutoProcessor names"),
        (
            {"auto_map": {"AutoModel": "acme/repo--modeling_depth_attention.DepthQwen3Model"}},
            "auto_map of AutoModel names",
        ),
        ({"custom_pipelines": {"x": {"impl": "evil.Evil"}}}, "custom_pipelines names code"),
        ({"_attn_implementation": "acme/kernel"}, "_attn_implementation names code: 'acme/kernel'"),
        ({"transformers_weights": "../../other.safetensors"}, "transformers_weights is '../../other.safetensors'"),
        ({"text_config": {"auto_map": {"AutoModel": "evil.Evil"}}}, "text_config.auto_map names code"),
    ],
)
def test_keys_of_the_configuration(fields, problem, saved, problems_of, edit_config):
    if isinstance(fields.get("auto_map"), dict):
        fields = {"auto_map": AUTO_MAPS["depth_qwen3"] | fields["auto_map"]}
    edit_config(saved, **fields)
    assert any(f"config.json: {problem}" in found for found in problems_of(saved))


def test_harmless_keys(saved, edit_config):
    (saved / "additional_chat_templates").mkdir()
    (saved / "additional_chat_templates" / "chat.pt.jinja").write_text("{{ messages }}")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_config(saved, _attn_implementation="sdpa", experts_implementation="eager", custom_pipelines={}, note="a--b")
    verify_code(saved)


def test_links(saved, problems_of, tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    (saved / "generation_config.json").symlink_to(tmp_path / "secret.json")
    assert problems_of(saved) == ["generation_config.json is a link that leads out of the folder"]


@pytest.mark.parametrize("name", ["notes.json", "modeling_x.py", "model.safetensors.index.json"])
def test_files_that_are_larger_than_memory(name, saved, problems_of):
    with open(saved / name, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConversionError, match=f"{name} has more than"):
        verify_code(saved)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_are_not_opened(saved, problems_of):
    os.mkfifo(saved / "notes.json")
    assert problems_of(saved) == ["notes.json is not a regular file"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "with penalty_alpha set, transformers generates by other people's code"),
        ({"num_beam_groups": 2}, "with num_beam_groups set"),
        ([1], "must hold an object, not a list"),
    ],
)
def test_generation_by_code_of_the_hub(saved, problems_of, content, problem):
    (saved / "generation_config.json").write_text(json.dumps({"penalty_alpha": None, "num_beam_groups": 1}))
    verify_code(saved)
    (saved / "generation_config.json").write_text(json.dumps(content))
    (found,) = problems_of(saved)
    assert found.startswith("generation_config.json") and problem in found


@pytest.mark.parametrize("config", [None, '{"model_type": "qwen3"}', "{}", "["])
def test_folders_of_other_models(config, tmp_path, problems_of):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConversionError):
        verify_code(tmp_path)
    assert problems_of(tmp_path) == []


class TestRecord:
    def test_a_folder_of_a_release(self, saved, monkeypatch):
        code = {
            name: f"# old {name}\n" for name in ("configuration_depth_attention.py", "modeling_depth_attention.py")
        }
        for path in saved.glob("*.py"):
            path.unlink()
        for name, text in code.items():
            (saved / name).write_text(text)
        release = {
            "auto_map": AUTO_MAPS["depth_qwen3"],
            "files": {name: hash_code(text) for name, text in code.items()},
        }
        record = released_hashes() | {"0.0.9": {"depth_qwen3": release}}
        monkeypatch.setattr("depthmix.conversion.code_check.released_hashes", lambda: record)
        assert verify_code(saved).release == "depthmix 0.0.9"
        (saved / "extra.py").write_text("")
        with pytest.raises(ConversionError, match="code of depthmix 0.0.9 and no other"):
            verify_code(saved)

    def test_the_record_is_whole(self):
        first = released_hashes()["0.1.0"]
        assert first.keys() == {"attnres", "denseformer", "depth_qwen3", "mhc", "moda_olmo2"}
        for family in first.values():
            modules = {f"{reference.split('.')[0]}.py" for reference in family["auto_map"].values()}
            assert modules <= family["files"].keys()
            assert all(len(digest) == 64 for digest in family["files"].values())

    def test_recording(self, tmp_path, monkeypatch):
        path = tmp_path / "record.json"
        path.write_text('{"0.0.9": {}}')
        monkeypatch.setattr(releases, "RECORD", path)
        monkeypatch.setattr("depthmix.version.__version__", "9.9")
        released_hashes.cache_clear()
        try:
            record_release()
            released_hashes.cache_clear()
            assert released_hashes().keys() == {"0.0.9", "9.9"}
            assert released_hashes()["9.9"].keys() == AUTO_MAPS.keys()
            record_release()
            path.write_text('{"9.9": {}}')
            released_hashes.cache_clear()
            with pytest.raises(ValueError, match="9.9 is recorded with other code"):
                record_release()
        finally:
            released_hashes.cache_clear()

    def test_it_is_part_of_the_package(self):
        assert releases.RECORD.is_file()
        assert "released_code.json" in (releases.RECORD.parents[1] / "setup.cfg").read_text()


def test_nothing_is_run(saved, tmp_path, monkeypatch):
    (saved / "modeling_depth_attention.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (saved / "model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConversionError):
        verify_code(saved)
    assert not (tmp_path / "ran").exists()
