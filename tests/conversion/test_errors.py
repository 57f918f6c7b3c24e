# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What errors of others become, and how long messages are."""

import pytest

from depthmix.auto import AUTO_MAPS
from depthmix.conversion import ConversionError, convert
from depthmix.conversion.checkpoint_source import locate_checkpoint
from depthmix.conversion.cli import main
from depthmix.conversion.source_configs import config_errors
from depthmix.conversion.source_tokenizer import resolve_tokenizer


@pytest.mark.parametrize("error", [TimeoutError("alarm"), MemoryError(), OSError(28, "No space left on device")])
def test_what_is_no_fault_of_a_configuration_passes(error):
    with pytest.raises(type(error)) as raised, config_errors():
        raise error
    assert raised.value is error


@pytest.mark.parametrize("error", [ValueError("a\n    b"), KeyError("bogus"), RecursionError("deep")])
def test_what_is_one_becomes_one_line(error):
    with pytest.raises(ConversionError, match="^The configuration is not valid: ") as raised, config_errors():
        raise error
    assert "\n" not in str(raised.value) and "\\n" not in str(raised.value)


def test_an_alarm_while_a_tokenizer_is_loaded(tmp_path, monkeypatch, tiny):
    from transformers import AutoTokenizer, Qwen3Config

    def late(*arguments, **options):
        raise TimeoutError("alarm")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", late)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TimeoutError):
        resolve_tokenizer({"tokenizer.json": tmp_path / "tokenizer.json"}, {}, Qwen3Config(), None, None)


def test_the_message_without_a_network_has_no_escaped_line_breaks(monkeypatch):
    def offline(*arguments, **options):
        raise OSError("Cannot reach the Hub.\n  Check your connection.\n")

    monkeypatch.setattr("depthmix.conversion.checkpoint_source.snapshot_download", offline)
    with pytest.raises(ConversionError, match="Cannot reach the Hub. Check your connection.") as raised:
        locate_checkpoint("owner/name")
    assert "\\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["depth_quen3", "bogus"])
def test_messages_do_not_list_all_model_types(text, qwen3_source, edit_config, tmp_path, capsys):
    source = qwen3_source()
    with pytest.raises(SystemExit) as end:
        main(["convert", str(source), str(tmp_path / "out"), "--to", text])
    said = [capsys.readouterr().err]
    assert end.value.code == 2
    with pytest.raises(ConversionError) as error:
        convert(source, tmp_path / "out", to=text, progress=False)
    said.append(str(error.value))
    edit_config(source, model_type=text)
    for command in ("verify", "bundle"):
        with pytest.raises(SystemExit) as end:
            main([command, str(source)])
        said.append(str(end.value.code))
    for message in said:
        assert sum(f" {model_type}" in message for model_type in AUTO_MAPS) < 12, message
        assert len(message.splitlines()[-1]) < 600
    assert all(("depth_qwen3" in message) for message in [said[0], *said[2:]]) or text == "bogus"
