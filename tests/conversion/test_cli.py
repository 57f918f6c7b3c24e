# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The `depthmix` command."""

import json
import re
import signal
import subprocess
import sys
import threading

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from depthmix import (
    AttnResConfig,
    DenseFormerConfig,
    DepthQwen3Config,
    MHCConfig,
    MoDAOlmo2Config,
    __version__,
)
from depthmix.__main__ import main as run_as_process
from depthmix.conversion import cli
from depthmix.conversion.cli import main
from depthmix.conversion.reports import describe_sources


@pytest.fixture
def fails(capsys):
    """`fails(code, *arguments)` runs the command, which must exit with that code; returns what it says on stderr."""

    def fails(code, *arguments):
        with pytest.raises(SystemExit) as error:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        assert output.out == ""
        # text as exit status is what Python prints to stderr before it exits with 1
        if isinstance(error.value.code, str):
            assert code == 1
            return error.value.code
        assert error.value.code == code
        return output.err

    return fails


def test_convert_and_inspect(qwen3_source, tmp_path, capsys):
    source, dest = qwen3_source(), tmp_path / "converted"
    main(["convert", str(source), str(dest), "--to", "depth_qwen3", "--depth-stride", "3", "--depth-window", "1",
          "--no-retrofit", "--key-norm-position", "after_rope", "--dtype", "bfloat16",
          "--shard-size", "100KB"])  # fmt: skip
    output = capsys.readouterr()
    assert "It starts as the method was published" in output.out
    for text in ("Converted", "47 kept", "321.15 KB", "depth_stride: 3 (new)", "key_norm_position: 'after_rope'"):
        assert text in output.out
    assert "100%" in output.err, "the progress bar"
    assert len(list(dest.glob("model-*-of-00004.safetensors"))) == 4

    main(["inspect", str(dest)])
    text = capsys.readouterr().out
    assert "DepthQwen3" in text and "depth_stride=3, depth_window=1, key_norm_position=after_rope" in text
    assert "47 BF16" in text and "160,576 values" in text and "321.15 KB" in text
    assert "to depth_attention: no" in text and "already" in text

    main(["inspect", str(source)])
    text = capsys.readouterr().out
    assert f"{source}: Qwen3 (model_type is 'qwen3')" in text
    assert "to depth_attention: yes, to depth_qwen3, with depth_stride=2, depth_window=0" in text
    assert "depth_gate=True unless asked otherwise. It is a retrofit. The converted model computes exactly" in text


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("denseformer", {"dwa_dilation": 2, "dwa_period": 3}),
        ("mhc", {"mhc_num_streams": 3, "mhc_sinkhorn_iters": 5, "mhc_sinkhorn_order": "rows_first"}),
        ("depth_qwen3", {"num_loops": 2, "key_norm_position": "after_rope"}),
    ],
)
def test_options_of_other_targets(target, options, qwen3_source, tmp_path, capsys):
    dest = tmp_path / "converted"
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    main(["convert", str(qwen3_source()), str(dest), "--to", target, *flags])
    text = capsys.readouterr().out
    assert all(f"{name}: {value!r} (new)" in text for name, value in options.items())
    config = json.loads((dest / "config.json").read_text())
    assert {name: config[name] for name in options} == options
    main(["inspect", str(dest)])
    text = capsys.readouterr().out
    assert all(f"{name}={value}" in text for name, value in options.items())


def test_dry_run(qwen3_source, tmp_path, capsys):
    main(["convert", str(qwen3_source()), str(tmp_path / "converted"), "--dry-run"])
    output = capsys.readouterr()
    assert output.out.startswith("Plan (nothing written)") and "depth_stride: 2 (new)" in output.out
    # of a Qwen3 nothing else is another than it was
    assert re.findall(r"(\w+): .* -> ", output.out) == ["model_type"]
    assert output.err == ""
    assert not (tmp_path / "converted").exists()


def test_options_of_attnres(qwen3_source, tmp_path, capsys, fails):
    source, dest = qwen3_source(), tmp_path / "converted"
    options = ["--attnres-variant", "block", "--attnres-block-size", "3", "--attnres-recency-bias"]
    main(["convert", str(source), str(dest), "--to", "attnres", *options, "--attnres-scale", "mean"])
    text = capsys.readouterr().out
    for field in ("attnres_block_size: 3", "attnres_recency_bias: True", "attnres_scale: 'mean'"):
        assert f"{field} (new)" in text
    main(["inspect", str(dest)])
    text = capsys.readouterr().out
    assert "AttnRes (depthmix)" in text and "attnres_variant=block, attnres_block_size=3" in text
    assert "depth_attention has no option attnres_scale" in fails(
        1, "convert", source, tmp_path / "other", "--attnres-scale", "sum"
    )


def test_overwrite(qwen3_source, tmp_path, capsys, fails):
    source, dest = qwen3_source(), tmp_path / "converted"
    main(["convert", str(source), str(dest)])
    capsys.readouterr()
    assert "pass --overwrite" in fails(1, "convert", source, dest)
    main(["convert", str(source), str(dest), "--overwrite", "--depth-stride", "0"])
    assert '"depth_stride": 0' in (dest / "config.json").read_text()


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"depthmix {__version__}\n")


def test_interrupted_while_it_imports(monkeypatch, capsys):
    def interrupt(*names, **content):
        raise KeyboardInterrupt

    monkeypatch.setattr("depthmix.__main__.import_late", interrupt)
    with pytest.raises(SystemExit) as end:
        run_as_process()
    assert end.value.code == 130 and capsys.readouterr().err == "depthmix: interrupted\n"


def test_bundle_wants_a_folder(qwen3_source, tmp_path, fails):
    assert "is not a folder. Give the folder that holds" in fails(1, "bundle", qwen3_source() / "config.json")
    assert "is not a folder" in fails(1, "bundle", tmp_path / "nowhere")
    # which a path would take for the current folder
    for command in ("bundle", "verify"):
        assert "The folder is empty: give a folder." in fails(1, command, "")
        assert "a NUL character, which no path can have" in fails(1, command, "a\0b")


@pytest.mark.parametrize(
    ("model_type", "field", "value", "rule"),
    [
        ("attnres", "attnres_block_size", 0, "must be a positive number of sub-layers"),
        ("denseformer", "dwa_dilation", 0, "must be a positive number of layers"),
        ("depth_qwen3", "depth_stride", -1, "must be a positive number of layers"),
        ("mhc", "mhc_num_streams", "four", "expected int"),
        ("moda_olmo2", "moda_depth_window", 1, "must be None or at least 2"),
    ],
)
def test_values_that_the_model_refuses(model_type, field, value, rule, tiny, edit_config, tmp_path, fails):
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **tiny)).save_pretrained(tmp_path)
    edit_config(tmp_path, **{field: value})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for command in ("inspect", "bundle"):
        message = fails(1, command, tmp_path)
        assert message.startswith(f"depthmix: error: {tmp_path / 'config.json'}: ")
        assert field in message and str(value) in message and rule in message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("damage", [{"auto_map": "x"}, {"auto_map": ["x"]}, {"model_type": ["mhc"]}])
def test_bundle_of_a_damaged_config(damage, tiny, edit_config, tmp_path, fails):
    AutoModelForCausalLM.from_config(AutoConfig.for_model("mhc", **tiny)).save_pretrained(tmp_path)
    edit_config(tmp_path, **damage)
    for code in tmp_path.glob("*.py"):
        code.unlink()
    message = fails(1, "bundle", tmp_path)
    (field, value), *_ = damage.items()
    assert f"{tmp_path / 'config.json'}: {field} is {value!r}, " in message
    assert not list(tmp_path.glob("*.py"))


@pytest.mark.parametrize(
    "damage",
    [{"hidden_act": "bogus"}, {"vocab_size": -1}, {"dtype": "bogus"}, {"dtype": [4]}, {"quantization_config": 0}],
)
def test_damaged_configs_of_sources(damage, qwen3_source, edit_config, tmp_path, fails):
    source = qwen3_source()
    edit_config(source, **damage)
    for family in ("mhc", "depth_qwen3"):
        message = fails(1, "convert", source, tmp_path / "converted", "--to", family, "--dry-run")
        assert "quantised" in message or ("config.json" in message and "must be" in message) or "not valid" in message


def test_refusals_exit_with_1(released_source, tmp_path, fails):
    message = fails(1, "convert", released_source(mlp_bias=True), tmp_path / "converted")
    assert message.startswith("depthmix: error: DepthQwen3 cannot represent") and "mlp_bias" in message
    assert "There is no folder nowhere" in fails(1, "inspect", "./nowhere")
    assert "is a file" in fails(1, "inspect", __file__)


def test_system_errors_exit_with_1(qwen3_source, tmp_path, fails, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    source = qwen3_source()
    monkeypatch.setitem(cli.main.__globals__, "convert", full)
    assert "No space left on device" in fails(1, "convert", source, tmp_path / "converted")


class TestSignals:
    @pytest.fixture(autouse=True)
    def signals_as_in_the_foreground(self):
        """A background shell, or nohup, hands some down as ignored."""
        defaults = {
            signal.SIGINT: signal.default_int_handler,
            signal.SIGTERM: signal.SIG_DFL,
            signal.SIGHUP: signal.SIG_DFL,
        }
        before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
        yield
        for number, handler in before.items():
            signal.signal(number, handler)

    @pytest.fixture
    def running(self, monkeypatch):
        """`running(action)` runs the command with an action in place of the work."""

        def running(action):
            monkeypatch.setitem(main.__globals__, "convert", lambda **arguments: action())
            main(["convert", "source", "dest"])

        return running

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_the_cleaning_up_is_not_broken_off(self, number, running):
        cleaned = []

        def work():
            try:
                signal.raise_signal(number)
            finally:
                for other in (signal.SIGTERM, signal.SIGHUP):
                    signal.raise_signal(other)
                cleaned.append(True)

        with pytest.raises(SystemExit) as error:
            running(work)
        assert (error.value.code, cleaned) == (128 + number, [True])
        assert signal.getsignal(number) is signal.SIG_DFL

    def test_an_interrupt_too(self, running, capsys):
        cleaned = []

        def work():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
                cleaned.append(True)

        with pytest.raises(SystemExit) as error:
            running(work)
        assert (error.value.code, cleaned) == (130, [True])
        assert capsys.readouterr().err == "depthmix: interrupted\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    @pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
    def test_what_the_caller_set_stays(self, handler, running, capsys):
        before = signal.signal(signal.SIGHUP, handler)
        try:
            running(lambda: signal.raise_signal(signal.SIGHUP) or "finished")
            assert signal.getsignal(signal.SIGHUP) is handler
        finally:
            signal.signal(signal.SIGHUP, before)
        assert capsys.readouterr().out == "finished\n"

    def test_not_in_other_threads(self, running, capsys):
        thread = threading.Thread(target=running, args=(lambda: "finished",))
        thread.start()
        thread.join()
        assert capsys.readouterr().out == "finished\n"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("convert",),
        ("convert", "source"),
        ("convert", "source", "dest", "--to", "gpt2"),
        ("convert", "source", "dest", "--dtype", "int8"),
        ("convert", "source", "dest", "--depth-stride", "two"),
        ("convert", "source", "dest", "--key-norm-position", "never"),
        ("inspect", "a", "b"),
        ("destroy",),
    ],
)
def test_wrong_usage_exits_with_2(arguments, fails):
    assert "usage: depthmix" in fails(2, *arguments)


@pytest.mark.once
def test_as_a_process(qwen3_source, tmp_path):
    """One line on stderr and no traceback, whichever way the command is started."""
    command = [sys.executable, "-m", "depthmix", "convert", tmp_path / "nowhere", tmp_path / "converted"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].startswith("depthmix: error: There is no folder")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("config_class", "fields", "lines"),
    [
        (DepthQwen3Config, {"depth_stride": 4}, ["layer 1 to layer 4: layer 0", "layer 5 to layer 7: layers 0, 4"]),
        (DepthQwen3Config, {"depth_stride": 0}, []),
        (
            DenseFormerConfig,
            {"dwa_period": 4, "dwa_dilation": 4},
            ["after layer 4: outputs 0, 4 (0: the embedding)", "after layer 8: outputs 0, 4, 8 (0: the embedding)"],
        ),
        (
            AttnResConfig,
            {"attnres_block_size": 8},
            [
                "sub-layer 1 to sub-layer 8: 1 finished source and the running sum",
                "sub-layer 9 to final norm: 2 finished sources and the running sum",
            ],
        ),
        (
            MoDAOlmo2Config,
            {},
            [
                *(f"layer {i}: slots 0 to {2 * i - 1}" for i in range(1, 5)),
                "… (2 more)",
                "layer 7: slots 0 to 13",
            ],
        ),
        (MHCConfig, {}, []),
    ],
)
def test_what_each_layer_reads(config_class, fields, lines):
    assert describe_sources(config_class(num_hidden_layers=8, **fields)) == lines


def test_report_says_what_each_layer_reads(qwen3_source, tmp_path, capsys):
    main(["convert", str(qwen3_source()), str(tmp_path / "converted"), "--depth-stride", "2", "--dry-run"])
    assert "\n  mixing:   layer 1 to layer 2: layer 0\n            layer 3: layers 0, 2\n" in capsys.readouterr().out
