# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints whose gates are all open, written without gates: the same function, in the published form."""

import json
import logging
import os
import shutil

import torch

from .checkpoint_io import (
    FLOAT_DTYPES,
    StoredTensor,
    TensorWrite,
    find_file,
    open_checkpoint,
    plan_shards,
    read_json,
    verify_checkpoint,
    write_checkpoint,
)
from .checkpoint_source import CARD_FILE, CHAT_TEMPLATE_FOLDER, COMPANION_FILES, CONFIG_FILE, expand_path
from .code_check import check_result, own_code_names
from .errors import ConversionError
from .output_folder import (
    check_apart,
    check_destination,
    check_model_only,
    check_space,
    clear_leftovers,
    staged_folder,
)
from .plain_text import printable
from .source_configs import read_own


logger = logging.getLogger(__name__)

# the field that says whether there are gates, by the method's
_FIELDS = ("depth_gate", "moda_gate")
_ENDING = ".depth_gate.weight"


def fold_gates(folder: str | os.PathLike, dest: str | os.PathLike, *, overwrite: bool = False) -> list[str]:
    """
    Writes a model of which all gates are one without them. It computes the same, bit for bit, and is of the published
    form of its method, as any other converted model is.

    Args:
        folder (`str` or `os.PathLike`):
            A saved model of this package with gates (`depth_gate` or `moda_gate`), which stays as it is.
        dest (`str` or `os.PathLike`):
            Folder of the result. It must not exist or be empty, unless `overwrite` is set.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace a model that is in `dest`, once the new one is complete.

    Returns:
        `list` of `str`: the names of the tensors that have been left out.

    Raises:
        [`ConversionError`]: if there are no gates, or one of them is another number than one, by however little; the
            message names the first and its value. Nothing is written then.
    """
    source, dest = expand_path(folder, "source"), expand_path(dest, "destination")
    if not source.is_dir():
        raise ConversionError(f"{source} is not a folder. Give the folder that holds a saved model.")
    config_path = find_file(source, CONFIG_FILE)
    if config_path is None:
        raise ConversionError(f"{source} has no config.json.")
    content = read_json(config_path)
    config = read_own(content, config_path)
    field = next((name for name in _FIELDS if getattr(config, name, False)), None)
    if config is None or field is None:
        raise ConversionError(f"{config_path}: must be of a model with gates ({' or '.join(_FIELDS)}: true).")
    own_files = own_code_names()
    check_apart(dest, source)
    for remark in clear_leftovers(dest, own_files):
        logger.warning(printable(remark))
    check_destination(dest, overwrite, own_files)

    stored = open_checkpoint(source).tensors
    gates = [name for name in stored if name.endswith(_ENDING)]
    if not gates:
        raise ConversionError(f"{source} has no tensor that ends in {_ENDING}, though its config.json has {field}.")
    for name in gates:
        _check_open(stored[name])
    writes = [TensorWrite.from_stored(name, tensor) for name, tensor in stored.items() if name not in gates]
    shards = plan_shards(writes, "5GB")
    # made anew, since the plans of a configuration depend on it
    values = config.to_dict() | {field: False}
    folded = type(config).from_dict(values)
    templates = (f"{CHAT_TEMPLATE_FOLDER}/{path.name}" for path in (source / CHAT_TEMPLATE_FOLDER).glob("*.jinja"))
    companions = {name: find_file(source, name) for name in (*COMPANION_FILES, *templates, CARD_FILE)}
    written_bytes = [write.nbytes for write in writes] + [path.stat().st_size for path in companions.values() if path]
    check_space(dest, sum(written_bytes))
    with staged_folder(dest, overwrite, lambda replaced: check_model_only(replaced, own_files)) as staging:
        write_checkpoint(staging, shards, progress=False)
        verify_checkpoint(staging, shards)
        for name, path in companions.items():
            if path is not None:
                (staging / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, staging / name)
        if companions[CARD_FILE] is not None:
            with open(staging / CARD_FILE, "a", encoding="utf-8") as card:
                card.write(f"\nThe gates of this model were all one and have been left out since (`{field}=False`).\n")
        folded.save_pretrained(staging)
        written = read_json(staging / CONFIG_FILE)
        # the class of the model, and what is no field
        carried = {key: value for key, value in content.items() if key not in written}
        (staging / CONFIG_FILE).write_text(json.dumps(carried | written, indent=2) + "\n", encoding="utf-8")
        check_result(staging, str(source))
    return gates


def _check_open(gate: StoredTensor) -> None:
    if gate.dtype not in FLOAT_DTYPES:
        raise ConversionError(f"{gate.name} has the dtype {gate.dtype}: must be a floating dtype.")
    values = torch.frombuffer(bytearray(b"".join(gate.chunks())), dtype=getattr(torch, FLOAT_DTYPES[gate.dtype]))
    for i, value in enumerate(values.tolist()):
        if value != 1:
            raise ConversionError(
                f"{gate.name}[{i}] is {value!r}: must be 1. A gate that is not quite open changes the function "
                "when it is left out; the model runs as it is."
            )
