# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The code that is saved, the hook that saves it, and `depthmix bundle`."""

import difflib
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_import_files

import depthmix.hub
from depthmix import DepthQwen3Config, __version__
from depthmix.auto import AUTO_MAPS, auto_classes
from depthmix.conversion import verify_code
from depthmix.conversion.cli import main
from depthmix.hub import MANIFEST, collect_remote_code, ship_remote_code, write_remote_code


@pytest.fixture(params=AUTO_MAPS)
def auto_map(request):
    return AUTO_MAPS[request.param]


def test_files_written_are_those_that_transformers_looks_for(auto_map, tmp_path):
    written = write_remote_code(tmp_path, auto_map)

    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*written, MANIFEST])
    assert json.loads((tmp_path / MANIFEST).read_text()) == {
        "depthmix": __version__,
        "files": {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in written},
    }
    # the model's file reaches all others, since transformers copies what it reaches when it saves a model
    entry = f"{auto_map['AutoModelForCausalLM'].split('.')[0]}.py"
    reached = {Path(file).name for file in get_relative_import_files(tmp_path / entry)}
    assert reached | {entry} == set(written)
    assert "__init__.py" not in written


def test_only_import_statements_differ_from_the_package(auto_map):
    for name, code in collect_remote_code(auto_map).items():
        source = depthmix.hub._module_path(name.removesuffix(".py")).read_text(encoding="utf-8")
        assert code.startswith("# Copyright")
        if name == f"{auto_map['AutoConfig'].split('.')[0]}.py":
            # what transformers reads and Python does not run
            code, _, addition = code.partition("\n\ndef _models_of_this_configuration")
            assert re.fullmatch(r"\(\):\n    \"\"\".*\"\"\"\n(    from \.\w+ import .*\n)+", addition)
        assert len(code.splitlines()) == len(source.splitlines())
        changes = [line for line in difflib.ndiff(source.splitlines(), code.splitlines()) if line[0] in "+-"]
        assert all(line[2:].strip().startswith(("from depthmix.", "from .")) for line in changes), changes


@pytest.fixture
def collect_source(monkeypatch, tmp_path):
    """`collect_source(text, **others)` collects a module of that text that stands for one of the package."""

    def collect_source(text, **others):
        for name, code in {"entry": text, **others}.items():
            (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.setattr(depthmix.hub, "_module_path", lambda name: tmp_path / f"{name}.py")
        return collect_remote_code({"AutoModel": "entry.Model"})

    return collect_source


@pytest.mark.parametrize(
    "statement",
    [
        "import depthmix",
        "import depthmix.kernels.operation as operation",
        "from depthmix import DepthQwen3Config",
        "from depthmix.kernels import operation",
        "from depthmix.hub import write_remote_code",
        "from depthmix.conversion.convert import convert",
        "from ..kernels.operation import operation",
        "from . import operation",
        "from .. import kernels",
        "from .folder.operation import operation",
        "try:\n    import depthmix\nexcept ImportError:\n    pass",
        "def late():\n    from depthmix.auto import AUTO_MAPS",
    ],
)
def test_imports_that_cannot_be_flat_are_refused(collect_source, tmp_path, statement):
    offending = next(line for line in statement.splitlines() if "import " in line and "def" not in line).strip()
    with pytest.raises(ImportError) as refusal:
        collect_source(f'"""Text."""\n\nimport torch\n\n{statement}\n')
    assert "entry.py" in str(refusal.value)
    assert f"`{offending}`" in str(refusal.value)


def test_imports_across_folders_become_flat(collect_source):
    files = collect_source(
        '"""The text may speak of depthmix, and show `from depthmix import x`.\n\n>>> import depthmix\n"""\n'
        "from depthmix.kernels.operation import (\n    first,\n    second,\n)\n"
        "from .sibling import third as fourth\n",
        operation="import torch\n",
        sibling="from depthmix.configuration.leaf import x\n",
        leaf="from .sibling import circle\n",
    )
    assert list(files) == ["entry.py", "leaf.py", "operation.py", "sibling.py"]
    assert (
        "from .operation import (\n    first,\n    second,\n)\nfrom .sibling import third as fourth"
        in files["entry.py"]
    )
    assert files["sibling.py"] == "from .leaf import x\n"


def test_missing_module_is_named():
    with pytest.raises(ImportError, match="no_such_module"):
        collect_remote_code({"AutoModel": "no_such_module.Model"})


def test_nothing_is_written_when_a_module_is_refused(monkeypatch, tmp_path):
    auto_map = AUTO_MAPS["depth_qwen3"] | {"AutoModelForMaskedLM": "no_such_module.Model"}
    with pytest.raises(ImportError):
        write_remote_code(tmp_path, auto_map)
    assert not list(tmp_path.iterdir())


def test_configuration_saved_alone(tiny, assert_complete, tmp_path):
    config = DepthQwen3Config(**tiny)
    config.save_pretrained(tmp_path / "saved")
    assert_complete(tmp_path / "saved", weights=False)
    (tmp_path / "written").mkdir()
    config.to_json_file(tmp_path / "written" / "config.json")
    assert_complete(tmp_path / "written", weights=False)
    assert (tmp_path / "written/config.json").read_bytes() == (tmp_path / "saved/config.json").read_bytes()


def test_configuration_under_another_name_comes_alone(tiny, tmp_path):
    DepthQwen3Config(**tiny).to_json_file(tmp_path / "fields.json")
    assert [file.name for file in tmp_path.iterdir()] == ["fields.json"]
    assert "auto_map" not in json.loads((tmp_path / "fields.json").read_text())


def test_saving_into_a_missing_folder_leaves_nothing(tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        DepthQwen3Config(**tiny).to_json_file(tmp_path / "missing" / "config.json")
    assert not list(tmp_path.iterdir())


def test_refused_code_leaves_no_configuration_that_names_it(monkeypatch, tiny, tmp_path):
    monkeypatch.setattr(depthmix.hub, "_module_path", mock_missing_module)
    with pytest.raises(ImportError):
        DepthQwen3Config(**tiny).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def mock_missing_module(name):
    raise ImportError(name)


class OtherTypeConfig(DepthQwen3Config):
    model_type = "depth_qwen3_of_a_user"


class OtherDefaultsConfig(DepthQwen3Config):
    pass


def test_subclasses_of_the_configuration(tiny, assert_complete, tmp_path):
    # under the same model type, it is the package's configuration for whoever loads it
    OtherDefaultsConfig(**tiny).save_pretrained(tmp_path / "same-type")
    assert_complete(tmp_path / "same-type", weights=False)
    # under another one, the package's code would silently be the wrong code
    OtherTypeConfig(**tiny).save_pretrained(tmp_path / "other-type")
    assert [file.name for file in (tmp_path / "other-type").iterdir()] == ["config.json"]
    assert "auto_map" not in json.loads((tmp_path / "other-type/config.json").read_text())


def test_a_family_whose_configuration_derives_from_another(tiny, tmp_path):
    class DerivedConfig(DepthQwen3Config):
        model_type = "derived"

    auto_map = {"AutoConfig": "configuration_depth_attention.DepthQwen3Config"}
    for _ in range(2):
        ship_remote_code(DerivedConfig, auto_map)
    DerivedConfig(**tiny).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == auto_map
    files = sorted(file.name for file in tmp_path.glob("*.py"))
    assert files == [
        "after_import.py",
        "configuration_dense_decoder.py",
        "configuration_depth_attention.py",
        "configuration_depth_common.py",
        "depth_backbones.py",
        "liger_entry.py",
    ]


def test_classes_registered_by_the_user(monkeypatch, build, assert_complete, tmp_path):
    build().save_pretrained(tmp_path / "plain")
    classes = auto_classes(build().config.model_type)
    for registered in (classes[name] for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")):
        monkeypatch.setattr(registered, "_auto_class", None)
        registered.register_for_auto_class()
    # transformers copies the package's own file, and maps AutoModel to the class with a head
    build().save_pretrained(tmp_path / "registered")
    assert_complete(tmp_path / "registered")
    for file in (tmp_path / "plain").iterdir():
        assert (tmp_path / "registered" / file.name).read_bytes() == file.read_bytes()


def test_what_the_user_maps_stays(tiny, tmp_path):
    config = DepthQwen3Config(**tiny)
    # a head of the user's, a class derived from ours, and an entry of ours as the Hub's loader leaves it
    config.auto_map = {
        "AutoModelForTokenClassification": "my_head.MyHead",
        "AutoModelForCausalLM": "my_model.MyModel",
        "AutoModel": "some/repo--modeling_depth_attention.DepthQwen3Model",
        "AutoTokenizer": ["my_tokenizer.Slow", None],
    }
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        **AUTO_MAPS["depth_qwen3"],
        "AutoModelForTokenClassification": "my_head.MyHead",
        "AutoModelForCausalLM": "my_model.MyModel",
        "AutoTokenizer": ["my_tokenizer.Slow", None],
    }


def test_subclass_drops_what_it_took_over(tiny, tmp_path):
    DepthQwen3Config(**tiny).save_pretrained(tmp_path / "ours")
    config = OtherTypeConfig.from_pretrained(tmp_path / "ours")
    config.auto_map["AutoModel"] = "my_model.MyModel"
    config.save_pretrained(tmp_path / "theirs")
    saved = json.loads((tmp_path / "theirs/config.json").read_text())
    assert saved["auto_map"] == {"AutoModel": "my_model.MyModel"}
    assert [file.name for file in (tmp_path / "theirs").iterdir()] == ["config.json"]


def test_command_keeps_what_the_user_maps(tiny, tmp_path, capsys):
    config = DepthQwen3Config(**tiny)
    config.auto_map = {"AutoModelForCausalLM": "my_model.MyModel"}
    config.save_pretrained(tmp_path)
    saved = (tmp_path / "config.json").read_bytes()
    main(["bundle", str(tmp_path)])
    assert (tmp_path / "config.json").read_bytes() == saved


def test_command_adds_code(build, assert_complete, tmp_path, capsys):
    model = build()
    model.save_pretrained(tmp_path)
    saved = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for file in tmp_path.glob("*.py"):
        file.unlink()
    config = json.loads(saved["config.json"])
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    main(["bundle", str(tmp_path)])

    assert capsys.readouterr().out.split() == sorted(name for name in saved if name.endswith(".py"))
    assert_complete(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == saved


@pytest.mark.once
def test_command_as_a_process(tiny, tmp_path):
    DepthQwen3Config(**tiny).save_pretrained(tmp_path)
    code = sorted(file.name for file in tmp_path.glob("*.py"))
    for name in code:
        (tmp_path / name).unlink()
    command = [sys.executable, "-m", "depthmix", "bundle", tmp_path]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == code
    assert sorted(file.name for file in tmp_path.glob("*.py")) == code


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no config.json"),
        (
            {"model_type": "qwen3"},
            "Similar ones are moda_qwen3, depth_qwen3.",
        ),
        ({}, "model_type is None"),
    ],
)
def test_command_refuses(tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as refusal:
        main(["bundle", str(tmp_path)])
    assert str(tmp_path) in refusal.value.code
    assert message in refusal.value.code
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


class TestWritingInPlace:
    """What is there already: links, edited code, and files that must not be half-written."""

    @pytest.fixture
    def save(self, tiny):
        """`save[route](folder)` writes code and configuration; the folder has a saved configuration for `bundle`."""
        return {
            "save_pretrained": lambda folder: DepthQwen3Config(**tiny).save_pretrained(folder),
            "to_json_file": lambda folder: DepthQwen3Config(**tiny).to_json_file(folder / "config.json"),
            "bundle": lambda folder: main(["bundle", str(folder)]),
        }

    @pytest.mark.parametrize("route", ["save_pretrained", "to_json_file", "bundle"])
    def test_links_are_replaced_and_not_followed(self, route, save, assert_complete, tmp_path):
        saved, elsewhere = tmp_path / "saved", tmp_path / "elsewhere"
        save["save_pretrained"](saved)
        elsewhere.mkdir()
        for path in saved.iterdir():
            path.rename(elsewhere / path.name)
            path.symlink_to(elsewhere / path.name)
        (saved / "modeling_depth_attention.py").unlink()
        (saved / "modeling_depth_attention.py").symlink_to(tmp_path / "nowhere.py")
        before = {path.name: (path.read_bytes(), path.stat().st_ino) for path in elsewhere.iterdir()}
        save[route](saved)
        assert_complete(saved, weights=False)
        assert not any(path.is_symlink() for path in saved.iterdir())
        assert {path.name: (path.read_bytes(), path.stat().st_ino) for path in elsewhere.iterdir()} == before
        assert not (tmp_path / "nowhere.py").exists()

    @pytest.mark.parametrize("route", ["save_pretrained", "to_json_file", "bundle"])
    def test_edited_code_is_kept_and_named(self, route, save, assert_complete, tmp_path, caplog):
        save["save_pretrained"](tmp_path)
        original = (tmp_path / "modeling_depth_attention.py").read_text()
        for number, edited in enumerate((f"{original}# mine\n", f"{original}# mine too\n")):
            (tmp_path / "modeling_depth_attention.py").write_text(edited)
            with caplog.at_level(logging.WARNING):
                save[route](tmp_path)
            kept = tmp_path / f"modeling_depth_attention.py.edited{'2' if number else ''}"
            assert kept.read_text() == edited
            assert f"modeling_depth_attention.py had been edited. It is kept as {kept.name}" in caplog.text
            assert (tmp_path / "modeling_depth_attention.py").read_text() == original
        caplog.clear()
        save[route](tmp_path)
        assert not caplog.records
        assert_complete(tmp_path, weights=False)

    def test_models_of_one_method_are_saved_over_each_other(self, tmp_path, caplog):
        """The file of their configurations names the models of one backbone."""
        texts = []
        for name in (
            "DepthOlmo2Config",
            "DepthQwen3Config",
            "AttnResConfig",
            "AttnResOlmo2Config",
            "DepthOlmo2Config",
        ):
            getattr(depthmix, name)().save_pretrained(tmp_path)
            texts.append((tmp_path / "configuration_depth_attention.py").read_text())
            # what is listed is that of the last model only
            (tmp_path / MANIFEST).unlink()
        assert texts[0] != texts[1] and texts[0] == texts[-1]
        assert not list(tmp_path.glob("*.edited*")) and "edited" not in caplog.text

    def test_code_of_another_version_is_no_edited_code(self, save, tmp_path, caplog):
        save["save_pretrained"](tmp_path)
        path, listed = tmp_path / "modeling_depth_attention.py", json.loads((tmp_path / MANIFEST).read_text())
        path.write_text("# another version\n")
        listed["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        (tmp_path / MANIFEST).write_text(json.dumps(listed))
        save["save_pretrained"](tmp_path)
        assert not list(tmp_path.glob("*.edited*")) and not caplog.records

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
    def test_what_cannot_be_read_is_replaced(self, save, tmp_path, caplog):
        """A pipe, which nobody writes to, and a file that is larger than memory."""
        os.mkfifo(tmp_path / MANIFEST)
        with open(tmp_path / "modeling_depth_attention.py", "wb") as file:
            file.truncate(2**40)
        save["save_pretrained"](tmp_path)
        verify_code(tmp_path)
        assert (tmp_path / "modeling_depth_attention.py.edited").stat().st_size == 2**40
        assert "had been edited" in caplog.text

    @pytest.mark.parametrize(
        "manifest", ["", "[]", '{"files": 5}', '{"files": {"modeling_depth_attention.py": null}}']
    )
    def test_a_broken_list_of_hashes_vouches_for_nothing(self, manifest, save, tmp_path):
        save["save_pretrained"](tmp_path)
        (tmp_path / MANIFEST).write_text(manifest)
        (tmp_path / "modeling_depth_attention.py").write_text("# mine\n")
        save["save_pretrained"](tmp_path)
        assert (tmp_path / "modeling_depth_attention.py.edited").read_text() == "# mine\n"

    @pytest.mark.parametrize("route", ["save_pretrained", "bundle"])
    def test_a_broken_off_save_leaves_what_was_there(self, route, save, tmp_path, monkeypatch):
        save["save_pretrained"](tmp_path)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        replace = os.replace

        def stop_at_the_configuration(source, target):
            if Path(target).name == "config.json":
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", stop_at_the_configuration)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            save[route](tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_modes_of_files_stay(self, save, tmp_path):
        save["save_pretrained"](tmp_path)
        (tmp_path / "config.json").chmod(0o600)
        save["save_pretrained"](tmp_path)
        assert (tmp_path / "config.json").stat().st_mode & 0o777 == 0o600
