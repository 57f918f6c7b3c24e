# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The destination: nothing half-written, nothing replaced by accident."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from depthmix.conversion import ConversionError, convert, converter
from depthmix.conversion.output_folder import staged_folder


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
    "_write_legacy_generation_config",
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
    with pytest.raises(OSError), staged_folder(workplace / "model", overwrite=False) as staging:
        (staging / "config.json").write_text("new")
        (workplace / "model").mkdir()
        (workplace / "model" / "thesis.txt").write_text("mine")
    assert os.listdir(workplace) == ["model"]
    assert os.listdir(workplace / "model") == ["thesis.txt"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signalled_process_leaves_nothing(name, qwen3_source, workplace):
    # one byte at a time, so that the signal meets the writing
    code = (
        "import sys; from depthmix.conversion import checkpoint_io; from depthmix.conversion.cli import main\n"
        "checkpoint_io.CHUNK_BYTES = 8\n"
        "main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "convert", qwen3_source(), workplace / "converted"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list(workplace.glob(".converted.*/model.safetensors")) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.Signals[name])
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.Signals[name]
    assert "Traceback" not in errors and ("depthmix: interrupted" in errors) == (name == "SIGINT")
    assert os.listdir(workplace) == []


class TestDestination:
    def refused(self, source, dest, message, **options):
        with pytest.raises(ConversionError, match=message):
            convert(source, dest, progress=False, **options)

    def test_not_empty(self, qwen3_source, workplace):
        (workplace / "notes.txt").write_text("mine")
        self.refused(qwen3_source(), workplace, "is not empty")
        self.refused(qwen3_source("other"), workplace, "does not look like a model's folder", overwrite=True)
        assert os.listdir(workplace) == ["notes.txt"]

    def test_a_file(self, qwen3_source, workplace):
        (workplace / "model").write_text("mine")
        self.refused(qwen3_source(), workplace / "model", "is not a folder", overwrite=True)

    def test_a_mount_point(self, qwen3_source):
        self.refused(qwen3_source(), "/proc", "is a mount point", overwrite=True)

    @pytest.mark.parametrize("relation", [".", "inside", ".."])
    def test_not_apart_from_the_source(self, relation, qwen3_source):
        source = qwen3_source("models/source")
        (source.parent / "config.json").write_text("{}")
        before = snapshot(source.parent)
        self.refused(source, source / relation, "must be separate folders", overwrite=True)
        assert snapshot(source.parent) == before

    def test_a_link_to_the_source(self, qwen3_source, workplace):
        source = qwen3_source()
        (workplace / "link").symlink_to(source)
        self.refused(source, workplace / "link", "must be separate folders", overwrite=True)

    def test_no_space(self, qwen3_source, workplace, monkeypatch):
        usage = shutil.disk_usage(workplace)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        self.refused(qwen3_source(), workplace / "a" / "b", "1.00 KB free, and 642.30 KB")
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

    def test_dry_run_writes_nothing(self, qwen3_source, workplace):
        report = convert(qwen3_source(), workplace / "a" / "converted", dry_run=True)
        assert os.listdir(workplace) == []
        assert str(report).startswith("Plan (nothing written)")
        assert report.files == ["model.safetensors", "generation_config.json"]
