# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`import depthmix`, from anywhere and with whatever else is or is not installed."""

import configparser
import json
import os
import pydoc
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from transformers.utils import import_utils

from depthmix import checkout
from depthmix.families import FAMILIES


ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, sys

sys.modules.update(dict.fromkeys(os.environ["BLOCKED"].split()))
import depthmix
import torch
from depthmix import DepthQwen3Config, DepthQwen3ForCausalLM

fields = dict(vocab_size=19, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
model = DepthQwen3ForCausalLM(DepthQwen3Config(**fields, intermediate_size=16, num_hidden_layers=2))
logits = model(torch.tensor([[3, 4, 5]])).logits
print(json.dumps({
    "shape": list(logits.shape),
    "file": depthmix.__file__,
    "imported": sorted(name for name in sys.modules if sys.modules[name] is not None),
    "kernels": getattr(sys.modules.get("kernels"), "__file__", None),
}))
"""


def start(folder, *, blocked=(), path=()):
    environment = os.environ | {"BLOCKED": " ".join(blocked), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    run = subprocess.run([sys.executable, "-c", SCRIPT], cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["shape"] == [1, 3, 19]
    return result


def test_imports_no_more_than_it_needs(tmp_path):
    (tmp_path / "a folder-1.0").mkdir()
    optional = ["triton", "kernels", "peft"]
    result = start(tmp_path / "a folder-1.0", blocked=optional)
    unneeded = ("depthmix.conversion", "pytest", *optional)
    assert not [name for name in result["imported"] if name.startswith(unneeded)]


def write_kernels_package(folder):
    """A stand-in for Hugging Face's `kernels`, of a version that transformers takes."""
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "__init__.py").write_text(
        "from unittest.mock import MagicMock\n\n\n"
        "def use_kernel_forward_from_hub(*names):\n    return lambda decorated: decorated\n\n\n"
        "use_kernelized_func = use_kernel_forward_from_hub\n\n\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'):\n        raise AttributeError(name)\n"
        "    return MagicMock(name=name)\n"
    )
    metadata = folder / f"kernels-{import_utils.KERNELS_MIN_VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {import_utils.KERNELS_MIN_VERSION}\n")


@pytest.mark.once
def test_from_the_root_of_the_repository(tmp_path):
    result = start(ROOT)
    assert Path(result["file"]).parent == ROOT / "depthmix"
    assert result["kernels"] is None


@pytest.mark.once
def test_from_the_root_with_the_kernels_package_installed(tmp_path):
    write_kernels_package(tmp_path)
    result = start(ROOT, path=[tmp_path])
    assert result["kernels"] == str(tmp_path / "kernels" / "__init__.py")


@pytest.mark.once
def test_a_clone_without_an_installation_says_what_to_do(tmp_path):
    shutil.copytree(ROOT / "depthmix", tmp_path / "depthmix")
    run = subprocess.run(
        [sys.executable, "-S", "-c", "import depthmix"], cwd=tmp_path, env={}, capture_output=True, text=True
    )
    assert run.returncode == 1 and "depthmix is not installed in this Python" in run.stderr


def test_names_that_are_misspelt():
    package = import_module("depthmix")
    with pytest.raises(AttributeError, match="no attribute 'DepthQwen3ForCasualLM'") as caught:
        package.DepthQwen3ForCasualLM  # noqa: B018
    # from these Python makes "Did you mean: 'DepthQwen3ForCausalLM'?" where it prints the error
    assert caught.value.name == "DepthQwen3ForCasualLM" and caught.value.obj is package
    assert package.callbacks.GateWarmup and package.pipeline.pipeline_stages


PUBLIC = ("depthmix", "depthmix.conversion", "depthmix.inspection", "depthmix.kernels")


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_documented(package):
    module = import_module(package)
    assert module.__doc__
    assert module.__all__ == sorted(module.__all__)
    for name in dir(module) if package == "depthmix" else module.__all__:
        public = getattr(module, name)
        if not name.startswith("__"):
            # their own words, not those of a stock class
            assert vars(public).get("__doc__") if isinstance(public, type) else public.__doc__, name


def test_umbrella_offers_all_configurations_and_models():
    offered = dir(import_module("depthmix"))
    assert {*import_module("depthmix").__all__} < {*offered}
    for family in FAMILIES.values():
        for ending in ("Config", "PreTrainedModel", "Model", "ForCausalLM", "ForSequenceClassification"):
            name = f"{family.prefix}{ending}"
            assert name in offered and getattr(import_module("depthmix"), name).__name__ == name


@pytest.mark.once
def test_help_fits_on_a_few_screens():
    text = pydoc.render_doc(import_module("depthmix"), renderer=pydoc.plaintext)
    assert text.count("\n") < 300
    assert "optimizer_groups(" in text and "DepthQwen3ForCausalLM" in text


def copy_packages(tmp_path, *, edited: str):
    """A clone, and beside it what `pip install .` makes of it; then the clone changes."""
    clone, installed = tmp_path / "clone", tmp_path / "site-packages" / "depthmix"
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for line in setup["options"]["package_dir"].strip().splitlines():
        name, folder = (part.strip() for part in line.split("="))
        shutil.copytree(ROOT / folder, clone / folder)
        shutil.copytree(ROOT / folder, installed.parent.joinpath(*name.split(".")), dirs_exist_ok=True)
    shutil.copy(ROOT / "setup.cfg", clone)
    with open(clone / edited, "a", encoding="utf-8") as file:
        file.write("# pulled\n")
    return clone, installed


@pytest.mark.once
@pytest.mark.parametrize("edited", ["depthmix/hub.py", "modeling/depth_decoder.py", "kernels/depth_ops/a_new_one.py"])
def test_a_clone_beside_another_state_is_refused(tmp_path, edited):
    clone, installed = copy_packages(tmp_path, edited=edited)
    found = [str(clone / "depthmix"), str(installed)]
    with pytest.raises(ImportError, match=f"another state: {re.escape(edited)} differs. Start Python"):
        checkout.refuse_mixed_states(found)
    # whoever finds all of it in one place has no mix
    checkout.refuse_mixed_states(found[::-1])
    checkout.refuse_mixed_states(found[:1])
    shutil.copy(clone / edited, installed / edited.replace("kernels/depth_ops", "kernels").removeprefix("depthmix/"))
    checkout.refuse_mixed_states(found)


@pytest.mark.once
def test_python_in_a_clone_beside_another_state_says_so(tmp_path):
    clone, installed = copy_packages(tmp_path, edited="conversion/cli.py")
    # -S: without the editable install of the test environment
    run = subprocess.run(
        [sys.executable, "-S", "-c", "import depthmix"],
        cwd=clone,
        env=os.environ | {"PYTHONPATH": str(installed.parent)},
        capture_output=True,
        text=True,
    )
    assert "ImportError" in run.stderr and "conversion/cli.py differs" in run.stderr
