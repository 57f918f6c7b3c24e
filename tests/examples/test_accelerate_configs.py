# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The files for `accelerate launch`: accelerate knows each key, and tells processes what the file says."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from accelerate import DeepSpeedPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env


EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted((EXAMPLES / "accelerate").glob("*.yaml"))
SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
}
SAID = {
    "ddp": {},
    "fsdp2": SHARDED | {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_ACTIVATION_CHECKPOINTING": "false"},
    "fsdp2_activation_checkpointing": SHARDED
    | {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
    "fsdp2_full_checkpoints": SHARDED
    | {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "FSDP_ACTIVATION_CHECKPOINTING": "false"},
    "deepspeed_zero3": {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
    },
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_processes_are_told(path, monkeypatch):
    given = yaml.safe_load(path.read_text())
    config = load_config_from_file(str(path))
    known = {field.name for field in dataclasses.fields(config)}
    assert given.keys() <= known
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    defined = vars(arguments).keys()
    for key in given.get("fsdp_config", {}):
        assert key in defined, key
    arguments = _validate_launch_command(arguments)[0]
    if path.stem == "deepspeed_zero3":
        # as the command sets it
        arguments.deepspeed_fields_from_accelerate_config = ",".join(given["deepspeed_config"])
        _, environment = prepare_deepspeed_cmd_env(arguments)
    else:
        environment = prepare_multi_gpu_env(arguments)
    found = {name: environment.get(name) for name in SAID[path.stem]}
    assert found == SAID[path.stem]
    # DDP shards nothing
    assert ("ACCELERATE_USE_FSDP" in environment) == path.stem.startswith("fsdp2")
    if path.stem == "deepspeed_zero3":
        for name, value in environment.items():
            if name.startswith("ACCELERATE_"):
                monkeypatch.setenv(name, value)
        plugin = DeepSpeedPlugin()
        assert plugin.zero_stage == 3 and plugin.deepspeed_config["zero_optimization"]["stage"] == 3


def test_every_file_is_told_of():
    documents = (EXAMPLES.parent / "docs" / "several_devices.md").read_text()
    assert {path.stem for path in FILES} == SAID.keys()
    assert all(f"../examples/accelerate/{path.name}" in documents for path in FILES)
