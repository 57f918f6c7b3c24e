# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""A Python without depthmix, and what a folder must hold for it."""

import ast
import functools
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from depthmix.auto import AUTO_MAPS


# runs one function of a test module; the module must not import depthmix
RUNNER = """
import os, runpy, sys, warnings
from importlib.util import find_spec

sys.modules.update(dict.fromkeys(os.environ["BLOCKED"].split()))
assert find_spec("depthmix") is None, "depthmix can be imported here: this environment is not clean"

import torch

torch.set_num_threads(1)
warnings.filterwarnings("error", category=FutureWarning, module="transformers")
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft 0.21 reads it
path, name, arguments, result = sys.argv[1:]
returned = runpy.run_path(path)[name](*torch.load(arguments))
assert "depthmix" not in sys.modules
torch.save(returned, result)
"""


def pytest_generate_tests(metafunc):
    if "clean_python" in metafunc.fixturenames:
        interpreters = {"same": sys.executable}
        if peer := metafunc.config.getoption("--peer-python"):
            interpreters["peer"] = os.path.abspath(peer)
        metafunc.parametrize("clean_python", interpreters.values(), ids=interpreters, indirect=True)


@pytest.fixture
def build(build, family):
    """The shared one with the family's head in place of the default: what is built here is built for every family."""
    return functools.partial(build, model_class=family.head)


@functools.cache
def site_folders(python: str) -> str:
    # all of them: an environment may read packages from another one's folder
    code = "import json, sys; print(json.dumps(sys.path))"
    paths = json.loads(subprocess.check_output([python, "-c", code], text=True, cwd="/"))
    return os.pathsep.join(path for path in paths if Path(path).name in ("site-packages", "dist-packages"))


@pytest.fixture
def clean_python(request, tmp_path_factory):
    """
    `clean_python(function, *arguments, blocked=())` calls a function of the test's module in a process without
    depthmix, and returns what it returns (tensors, strings, numbers, lists). The test runs for this environment and
    for that of `--peer-python`. The `blocked` packages cannot be imported in the process.
    """
    python = request.param
    folder = tmp_path_factory.mktemp("clean")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    environment |= {
        "PYTHONPATH": site_folders(python),
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TQDM_DISABLE": "1",
    }

    def clean_python(function, *arguments, blocked=()):
        torch.save(arguments, folder / "arguments")
        # -S: without .pth files, so without the editable installation
        command = [python, "-S", "-c", RUNNER, inspect.getsourcefile(function), function.__name__]
        command += [folder / "arguments", folder / "result"]
        run = subprocess.run(
            command,
            cwd=folder,
            env=environment | {"BLOCKED": " ".join(blocked)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        return torch.load(folder / "result")

    clean_python.cache = folder / "huggingface" / "hub"
    return clean_python


@pytest.fixture
def assert_complete():
    """`assert_complete(folder)`: weights, the whole `auto_map`, all the code that it needs, and nothing else."""

    def assert_complete(folder, *, weights: bool = True):
        folder = Path(folder)
        config = json.loads((folder / "config.json").read_text())
        assert config["auto_map"] == AUTO_MAPS[config["model_type"]]
        assert (folder / "model.safetensors").exists() == weights
        assert not list(folder.glob("adapter*"))
        entries = {f"{reference.split('.')[0]}.py" for reference in config["auto_map"].values()}
        needed = {Path(file).name for entry in entries for file in get_relative_import_files(folder / entry)}
        assert {file.name for file in folder.glob("*.py")} == entries | needed
        for file in folder.glob("*.py"):
            assert set(get_imports(file)) - sys.stdlib_module_names <= {"torch", "transformers", "huggingface_hub"}
            for node in ast.walk(ast.parse(file.read_text())):
                assert not isinstance(node, ast.Import | ast.ImportFrom) or "depthmix" not in ast.unparse(node)

    return assert_complete
