# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The destination: nothing half-written, nothing replaced by accident."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from depthmix.auto import AUTO_MAPS
from depthmix.conversion import ConversionError, convert, converter, output_folder
from depthmix.conversion.output_folder import check_model_only, clear_leftovers, staged_folder
from depthmix.hub import MANIFEST, collect_remote_code


pytestmark = pytest.mark.once


def snapshot(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def workplace(tmp_path):
    """A folder that holds the destination only."""
    (tmp_path / "workplace").mkdir()
    return tmp_path / "workplace"


STEPS = (
    "write_checkpoint",
    "verify_checkpoint",
    "_verify_config",
    "make_model_card",
)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_leaves_nothing(step, error, qwen3_source, workplace, monkeypatch):
    source = qwen3_source()
    original = getattr(converter, step)

    def fail_after(*args, **kwargs):
        original(*args, **kwargs)
        assert os.listdir(workplace), "control: something is there by now"
        raise error

    monkeypatch.setattr(converter, step, fail_after)
    before = snapshot(source)
    with pytest.raises(type(error)):
        convert(source, workplace / "new" / "parents" / "converted", progress=False)
    assert os.listdir(workplace) == []
    assert snapshot(source) == before


def test_a_failure_leaves_parents_that_others_use(workplace):
    (workplace / "old").mkdir()
    with pytest.raises(OSError, match="disk full"), staged_folder(workplace / "old/new/inner/model", overwrite=False):
        (workplace / "old/new/thesis.txt").write_text("mine")
        raise OSError("disk full")
    assert sorted(path.name for path in workplace.rglob("*")) == ["new", "old", "thesis.txt"]
    with pytest.raises(OSError, match="disk full"), staged_folder(workplace / "empty/model", overwrite=False):
        raise OSError("disk full")
    (workplace / "empty").mkdir()
    with pytest.raises(OSError, match="disk full"), staged_folder(workplace / "empty/model", overwrite=False):
        raise OSError("disk full")
    assert (workplace / "empty").is_dir(), "it was there before"


def test_a_failure_leaves_the_model_that_was_to_be_overwritten(qwen3_source, workplace, monkeypatch):
    source = qwen3_source()
    shutil.copytree(source, workplace / "converted")
    monkeypatch.setattr(converter, "_verify_config", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        convert(source, workplace / "converted", overwrite=True, progress=False)
    assert os.listdir(workplace) == ["converted"]
    assert snapshot(workplace / "converted") == snapshot(source)


def test_a_model_of_another_family_may_be_replaced(qwen3_source, workplace):
    for target in ("attnres", "depth_qwen3", "mhc"):
        convert(qwen3_source(), workplace / "model", to=target, overwrite=True, progress=False)
    assert json.loads((workplace / "model/config.json").read_text())["model_type"] == "mhc"


def test_a_failing_rename_brings_the_old_model_back(workplace, monkeypatch):
    (workplace / "model").mkdir()
    (workplace / "model" / "config.json").write_text("old")

    def remove_and_end():
        with staged_folder(workplace / "model", overwrite=True) as staging:
            # the rename of the new folder finds nothing
            staging.rmdir()

    with pytest.raises(FileNotFoundError):
        remove_and_end()
    assert os.listdir(workplace) == ["model"]
    assert (workplace / "model" / "config.json").read_text() == "old"


def test_a_destination_that_appears_meanwhile_is_kept(workplace):
    with (
        pytest.raises(ConversionError, match="model was filled by something else meanwhile"),
        staged_folder(workplace / "model", overwrite=False) as staging,
    ):
        (staging / "config.json").write_text("new")
        (workplace / "model").mkdir()
        (workplace / "model" / "thesis.txt").write_text("mine")
    assert os.listdir(workplace) == ["model"]
    assert os.listdir(workplace / "model") == ["thesis.txt"]


# for each line of its input, the command in a process of its own, which it forks after the slow imports
COMMANDS = """
import json, os, signal, sys
from depthmix import DepthQwen3ForCausalLM
from depthmix.conversion import checkpoint_io
from depthmix.conversion.cli import main

# one byte at a time, so that a signal meets the writing
checkpoint_io.CHUNK_BYTES = 8
for line in sys.stdin:
    log, *sys.argv[1:] = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        # a background shell hands signals down as ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        main()
        sys.exit()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def commands():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", COMMANDS], **pipes) as process:
        yield process


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.exhaustive)])
def test_a_signalled_process_leaves_nothing(name, commands, qwen3_source, workplace, tmp_path):
    arguments = [tmp_path / "log", "convert", qwen3_source(), workplace / "converted"]
    print(json.dumps([str(argument) for argument in arguments]), file=commands.stdin, flush=True)
    child = int(commands.stdout.readline())
    deadline = time.monotonic() + 120
    while not list(workplace.glob(".converted.*/model.safetensors")):
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.01)
    os.kill(child, signal.Signals[name])
    assert int(commands.stdout.readline()) == 128 + signal.Signals[name]
    errors = (tmp_path / "log").read_text()
    assert "Traceback" not in errors and ("depthmix: interrupted" in errors) == (name == "SIGINT")
    assert os.listdir(workplace) == []


class TestDestination:
    def refused(self, source, dest, message, **options):
        with pytest.raises(ConversionError, match=message):
            convert(source, dest, progress=False, **options)

    def test_not_empty(self, qwen3_source, workplace):
        (workplace / "notes.txt").write_text("mine")
        self.refused(qwen3_source(), workplace, "is not empty")
        # what is wrong with the command itself comes first
        self.refused("no/source", workplace, "depth_attention has no option dwa_period", dwa_period=2)
        self.refused(qwen3_source("other"), workplace, r"saved model.*\(1 found\):\n  - notes.txt$", overwrite=True)
        assert os.listdir(workplace) == ["notes.txt"]
        (workplace / "notes.txt").rename(workplace / "README.md")
        self.refused(qwen3_source("other"), workplace, "does not look like a model's folder", overwrite=True)
        assert os.listdir(workplace) == ["README.md"]

    def test_a_file(self, qwen3_source, workplace):
        (workplace / "model").write_text("mine")
        self.refused(qwen3_source(), workplace / "model", "is not a folder", overwrite=True)

    def test_in_a_file(self, qwen3_source, workplace):
        (workplace / "file").write_text("mine")
        self.refused(qwen3_source(), workplace / "file" / "a" / "b", r"/file is a file, so there cannot be a folder")

    @pytest.mark.parametrize("dest", [".", "{}"])
    @pytest.mark.parametrize("overwrite", [False, True])
    def test_the_current_folder(self, dest, overwrite, qwen3_source, workplace, monkeypatch):
        monkeypatch.chdir(workplace)
        if overwrite:
            (workplace / "config.json").write_text("{}")
        self.refused(qwen3_source(), dest.format(workplace), "is the current folder", overwrite=overwrite)

    def test_an_empty_name(self, qwen3_source, workplace, monkeypatch):
        monkeypatch.chdir(workplace)
        self.refused(qwen3_source(), "", "The destination is empty")
        self.refused("", workplace / "model", "The source is empty")

    def test_a_mount_point(self, qwen3_source):
        self.refused(qwen3_source(), "/proc", "is a mount point", overwrite=True)

    @pytest.mark.parametrize(
        ("relation", "message"),
        [
            (".", "must be separate folders"),
            ("inside", "must be separate folders"),
            ("..", "no part of .*\n  - source/"),
        ],
    )
    def test_not_apart_from_the_source(self, relation, message, qwen3_source):
        source = qwen3_source("models/source")
        (source.parent / "config.json").write_text("{}")
        before = snapshot(source.parent)
        self.refused(source, source / relation, message, overwrite=True)
        assert snapshot(source.parent) == before

    def test_a_link_to_the_source(self, qwen3_source, workplace):
        source = qwen3_source()
        (workplace / "link").symlink_to(source)
        self.refused(source, workplace / "link", "must be separate folders", overwrite=True)

    def test_no_space(self, qwen3_source, workplace, monkeypatch):
        usage = shutil.disk_usage(workplace)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        self.refused(qwen3_source(), workplace / "a" / "b", r"1\.00 KB free, and 642\.\d\d KB")
        assert os.listdir(workplace) == []

    @pytest.mark.parametrize("kind", ["new", "empty", "nested", "link"])
    def test_accepted(self, kind, qwen3_source, workplace):
        dest = workplace / "converted"
        if kind == "empty":
            dest.mkdir()
        elif kind == "nested":
            dest = workplace / "a" / "b" / "converted"
        elif kind == "link":
            (workplace / "real").mkdir()
            dest.symlink_to(workplace / "real")
        convert(qwen3_source(), dest, progress=False)
        assert (dest / "config.json").is_file()
        assert dest.is_symlink() == (kind == "link")
        assert not list(workplace.rglob(".*"))
        # as any other new folder and file, and not private as temporary ones are
        (workplace / "fresh").mkdir()
        assert dest.stat().st_mode == (workplace / "fresh").stat().st_mode

    @pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
    def test_dry_run_writes_nothing_and_lists_what_would_be(self, shard_size, qwen3_source, edit_config, workplace):
        source = qwen3_source()
        # these two files are written and not copied
        (source / "generation_config.json").unlink()
        edit_config(source, temperature=0.5)
        (source / "vocab.json").write_text("{}")
        plan = convert(source, workplace / "a" / "converted", dry_run=True, shard_size=shard_size)
        assert os.listdir(workplace) == []
        assert str(plan).startswith("Plan (nothing written)")
        report = convert(source, workplace / "a" / "converted", progress=False, shard_size=shard_size)
        assert plan.files == report.files
        assert {"generation_config.json", "tokenizer_config.json", "modeling_depth_attention.py"} < set(plan.files)


class TestOverwriting:
    FOREIGN = (".git/", "additional_chat_templates/notes.md", "checkpoint-500/", "helpers.py", "thesis.tex")

    def put(self, folder, names):
        for name in names:
            path = folder / name / "inside" if name.endswith("/") else folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("mine")

    def test_other_files_are_refused_and_named(self, qwen3_source, workplace):
        source = qwen3_source()
        convert(source, workplace / "model", progress=False)
        self.put(workplace / "model", self.FOREIGN)
        before = snapshot(workplace)
        with pytest.raises(ConversionError) as error:
            convert(source, workplace / "model", overwrite=True, progress=False)
        assert str(error.value).splitlines()[1:] == [f"  - {name}" for name in self.FOREIGN]
        assert "holds what is no part of a saved model" in str(error.value)
        assert snapshot(workplace) == before

    def test_a_saved_model_may_go(self, qwen3_source, edit_config, workplace):
        source = qwen3_source(shard_size="100KB")
        shutil.copytree(source, workplace / "model")
        auto_map = {"AutoModel": "modeling_mine.Mine", "AutoTokenizer": ["acme/repo--tokenization_mine.Mine", None]}
        edit_config(workplace / "model", auto_map=auto_map)
        own = ("modeling_mine.py", "tokenization_mine.py", "decoder_layers.py")
        self.put(workplace / "model", (*own, ".gitattributes", "additional_chat_templates/a.jinja", "LICENSE"))
        report = convert(source, workplace / "model", overwrite=True, progress=False)
        assert sorted(path.name for path in (workplace / "model").iterdir()) == report.files

    def test_what_appears_meanwhile_is_kept(self, qwen3_source, workplace, monkeypatch):
        source = qwen3_source()
        shutil.copytree(source, workplace / "model")
        original = converter.make_model_card

        def make_model_card(*args):
            self.put(workplace / "model", ["thesis.tex"])
            return original(*args)

        monkeypatch.setattr(converter, "make_model_card", make_model_card)
        with pytest.raises(ConversionError, match="thesis.tex"):
            convert(source, workplace / "model", overwrite=True, progress=False)
        assert os.listdir(workplace) == ["model"]
        assert snapshot(workplace / "model").keys() - snapshot(source).keys() == {Path("thesis.tex")}


CODE = {MANIFEST, *collect_remote_code(AUTO_MAPS["depth_qwen3"])}


def put_model(folder, content="old"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"content": content}))
    (folder / "model.safetensors").write_text(content)
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["exchanged", "moved away"])
def way(request, monkeypatch):
    """Both ways in which an older folder goes."""
    if request.param == "moved away":
        monkeypatch.setattr(output_folder, "_exchange", lambda first, second: False)
    return request.param


class TestPuttingInPlace:
    def replace(self, dest, **options):
        with staged_folder(dest, overwrite=True, **options) as staging:
            (staging / "config.json").write_text("new")

    def test_everything_is_on_the_disk_before_the_older_one_goes(self, way, workplace, monkeypatch):
        put_model(workplace / "model")
        flushed, calls = set(), []
        fsync, remove = os.fsync, shutil.rmtree

        def record(descriptor):
            flushed.add(os.fstat(descriptor).st_ino)
            fsync(descriptor)

        def rmtree(path, **options):
            calls.append((path.name, flushed.copy()))
            remove(path, **options)

        monkeypatch.setattr(os, "fsync", record)
        monkeypatch.setattr(output_folder.shutil, "rmtree", rmtree)
        with staged_folder(workplace / "model", overwrite=True) as staging:
            (staging / "config.json").write_text("new")
            (staging / "additional_chat_templates").mkdir()
            (staging / "additional_chat_templates" / "a.jinja").write_text("new")
        ((_, before),) = calls
        assert {path.stat().st_ino for path in (workplace / "model", *(workplace / "model").rglob("*"))} <= before
        assert workplace.stat().st_ino in flushed
        assert names(workplace) == ["model"]

    def test_there_is_no_moment_without_a_model(self, workplace, monkeypatch):
        put_model(workplace / "model")
        renamed = []
        monkeypatch.setattr(Path, "rename", lambda *paths: renamed.append(paths))
        self.replace(workplace / "model")
        assert not renamed and (workplace / "model" / "config.json").read_text() == "new"
        assert names(workplace) == ["model"]

    @pytest.mark.parametrize("name", ["x" * 255, "ä" * 127, "x" * 230, "." * 3 + "x" * 252])
    def test_long_names(self, name, way, workplace):
        dest = workplace / name
        for _ in range(2):
            self.replace(dest)
            assert names(workplace) == [name]
        with pytest.raises(KeyboardInterrupt), staged_folder(dest, overwrite=True):
            raise KeyboardInterrupt
        assert names(workplace) == [name]
        staging = output_folder._beside(dest, "0123abcd", "incomplete")
        put_model(staging)
        put_model(output_folder._beside(workplace / ("y" + name[1:]), "0123abcd", "incomplete"))
        assert len(clear_leftovers(dest, CODE)) == 1 and not staging.exists()
        assert len(names(workplace)) == 2, "that of another destination stays"

    def test_names_that_no_file_system_takes(self, qwen3_source, workplace):
        with pytest.raises(ConversionError, match="at most 255 bytes"):
            convert(qwen3_source(), workplace / ("ä" * 128), progress=False)
        assert names(workplace) == []

    def test_what_appears_at_the_last_moment_comes_back(self, way, workplace):
        put_model(workplace / "model")

        def check(folder):
            (folder / "thesis.tex").write_text("mine")
            check_model_only(folder, CODE)

        with pytest.raises(ConversionError, match="thesis.tex"):
            self.replace(workplace / "model", check_replaced=check)
        assert names(workplace) == ["model"]
        assert names(workplace / "model") == ["config.json", "model.safetensors", "thesis.tex"]

    def test_a_lost_race_leaves_the_winner_only(self, workplace, monkeypatch):
        monkeypatch.setattr(output_folder, "_exchange", lambda first, second: False)
        put_model(workplace / "model")
        rename = Path.rename

        def race(source, target):
            if target == workplace / "model":
                put_model(workplace / "model", "the winner's")
            return rename(source, target)

        monkeypatch.setattr(Path, "rename", race)
        with pytest.raises(ConversionError, match="filled by something else meanwhile"):
            self.replace(workplace / "model")
        assert names(workplace) == ["model"]
        assert (workplace / "model" / "model.safetensors").read_text() == "the winner's"

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_after_the_exchange_is_too_late(self, number, way, workplace, monkeypatch):
        put_model(workplace / "model")
        remove = shutil.rmtree

        def rmtree(path, **options):
            signal.raise_signal(number)
            remove(path, **options)

        monkeypatch.setattr(output_folder.shutil, "rmtree", rmtree)
        before = signal.signal(number, lambda number, frame: sys.exit(128 + number))
        try:
            self.replace(workplace / "model")
            assert names(workplace) == ["model"]
            put_model(workplace / "other")
            with pytest.raises(SystemExit):
                self.replace(workplace / "other", more_follows=True)
        finally:
            signal.signal(number, before)
        assert names(workplace) == ["model", "other"]
        assert (workplace / "other" / "config.json").read_text() == "new"

    def test_second_signals_do_not_break_off_the_cleaning_up(self, workplace, monkeypatch):
        remove = shutil.rmtree

        def rmtree(path, **options):
            signal.raise_signal(signal.SIGINT)
            remove(path, **options)

        monkeypatch.setattr(output_folder.shutil, "rmtree", rmtree)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt), staged_folder(workplace / "model", overwrite=True):
                signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGINT, before)
        assert names(workplace) == []

    def test_a_model_of_another_user_is_refused_first(self):
        if os.geteuid() != 0:
            pytest.skip("only root can become another user")
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o777)
            model = put_model(Path(folder, "model"))
            os.seteuid(65534)
            try:
                with pytest.raises(ConversionError, match="belongs to another user or is read-only"):
                    output_folder.check_destination(model, True, CODE)
            finally:
                os.seteuid(0)
            output_folder.check_destination(model, True, CODE)


class TestLeftovers:
    @pytest.fixture
    def leave(self, workplace):
        """`leave(kind)` makes the folder that a killed conversion to `model` leaves."""
        return lambda kind, mark="0123abcd": put_model(workplace / f".model.{mark}.{kind}", kind)

    @pytest.mark.parametrize("older", [False, True])
    def test_they_are_cleared_and_reported(self, older, leave, qwen3_source, workplace):
        if older:
            put_model(workplace / "model")
        left = [leave("incomplete"), leave("incomplete", "ffffffff"), *([leave("replaced")] if older else [])]
        (left[0] / ".config.json.0a1b2c3d.tmp").write_text("{")
        others = [put_model(workplace / name) for name in (".model.x.incomplete", ".other.0123abcd.incomplete")]
        report = convert(qwen3_source(), workplace / "model", overwrite=older, progress=False)
        for folder in left:
            assert f"{folder}, left over from an earlier run, was removed." in report.warnings
        assert names(workplace) == sorted(["model", *(folder.name for folder in others)])
        assert "left over" not in (workplace / "model" / "README.md").read_text(), "paths are nobody's business"

    def test_a_model_that_was_moved_away_comes_back(self, leave, qwen3_source, workplace):
        leave("replaced")
        with pytest.raises(ConversionError, match="is not empty"):
            convert(qwen3_source(), workplace / "model", progress=False)
        assert names(workplace) == ["model"]
        assert (workplace / "model" / "model.safetensors").read_text() == "replaced"
        assert (workplace / "model").rename(workplace / ".model.0123abcd.replaced")
        assert "The older model is back there" in clear_leftovers(workplace / "model", CODE)[0]

    def test_a_run_that_is_still_going_is_left_alone(self, workplace):
        with staged_folder(workplace / "model", overwrite=False) as staging:
            # another process has locks of its own
            child = os.fork()
            if not child:
                status = 99
                try:
                    status = len(clear_leftovers(workplace / "model", []))
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            (staging / "config.json").write_text("new")
        assert names(workplace) == ["model"]

    def test_what_is_no_model_is_kept_and_named(self, leave, workplace):
        put_model(workplace / "model")
        for kind in ("incomplete", "replaced"):
            (leave(kind) / "thesis.tex").write_text("mine")
        remarks = clear_leftovers(workplace / "model", CODE)
        assert len(remarks) == 2 and all("holds thesis.tex, so it was not removed" in remark for remark in remarks)
        assert len(names(workplace)) == 3

    def test_links_are_not_followed(self, workplace):
        real = put_model(workplace / "real")
        (workplace / ".model.0123abcd.incomplete").symlink_to(real)
        assert clear_leftovers(workplace / "model", CODE) == []
        assert names(real) == ["config.json", "model.safetensors"]

    def test_a_dry_run_clears_nothing(self, leave, qwen3_source, workplace):
        folder = leave("incomplete")
        convert(qwen3_source(), workplace / "model", dry_run=True)
        assert folder.is_dir()
