# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""A Python without depthmix, and what a folder must hold for it."""

import ast
import functools
import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from depthmix.auto import AUTO_MAPS


# runs functions of test modules, each in a process of its own, which this one forks after the slow imports; the
# modules must not import depthmix
RUNNER = """
import gc, json, os, runpy, sys, traceback, warnings
from importlib.util import find_spec

# until it is frozen, for the sake of the children
gc.disable()

sys.modules.update(dict.fromkeys(os.environ["BLOCKED"].split()))
assert find_spec("depthmix") is None, "depthmix can be imported here: this environment is not clean"

import torch

torch.set_num_threads(1)
warnings.filterwarnings("error", category=FutureWarning, module="transformers")
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft 0.21 reads it

from transformers import AutoModelForCausalLM, Qwen3ForCausalLM, Trainer, dynamic_module_utils


def call(path, name, folder):
    os.chdir(folder)
    # whoever asks for permission to run remote code gets no answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    # for each function its own
    dynamic_module_utils.HF_MODULES_CACHE = f"{folder}/huggingface/modules"
    returned = runpy.run_path(path)[name](*torch.load("arguments"))
    assert "depthmix" not in sys.modules
    torch.save(returned, f"{folder}/result")


gc.freeze()
gc.enable()
answers = os.fdopen(os.dup(1), "w", buffering=1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            call(*json.loads(line))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    print(os.waitpid(child, 0)[1], file=answers)
"""


def pytest_generate_tests(metafunc):
    if "clean_python" in metafunc.fixturenames:
        interpreters = {"same": sys.executable}
        if peer := metafunc.config.getoption("--peer-python"):
            interpreters["peer"] = os.path.abspath(peer)
        metafunc.parametrize("clean_python", interpreters.values(), ids=interpreters, indirect=True)


def pytest_itemcollected(item):
    """What is saved by the oldest version of transformers is of the first family, whichever version loads it."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "clean_python" in parameters:
        item.add_marker(pytest.mark.long)
        sampled = item.get_closest_marker("sampled_peer")
        if sampled and parameters["clean_python"] != sys.executable:
            item.add_marker(pytest.mark.sampled(*sampled.args))


@pytest.fixture
def build(build, family):
    """The shared one with the family's head in place of the default: what is built here is built for every family."""
    return functools.partial(build, model_class=family.head)


def start_runner(python: str, home: Path) -> subprocess.Popen:
    # all folders of packages, since an environment may read some from another one's; and what it says it has not:
    # that with the oldest transformers has no Triton
    code = (
        "import json, sys; print(json.dumps([sys.path, [name for name in sys.modules if sys.modules[name] is None]]))"
    )
    paths, blocked = json.loads(subprocess.check_output([python, "-c", code], text=True, cwd="/"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    environment |= {
        "PYTHONPATH": os.pathsep.join(path for path in paths if Path(path).name in ("site-packages", "dist-packages")),
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "BLOCKED": " ".join(blocked),
    }
    # -S: without .pth files, so without the editable installation
    command = [python, "-S", "-c", RUNNER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=home.parent, env=environment, **pipes)


@pytest.fixture(scope="session")
def hub_home(tmp_path_factory):
    """Where all processes that run without depthmix look for what was downloaded."""
    return tmp_path_factory.mktemp("runner") / "huggingface"


@pytest.fixture(scope="session")
def runner(hub_home):
    """`runner(python)` gives the process of this interpreter, which starts once."""
    started = {}

    def runner(python):
        if python not in started:
            started[python] = start_runner(python, hub_home)
        return started[python]

    yield runner
    for process in started.values():
        process.communicate()


@pytest.fixture
def clean_python(request, runner, hub_home, tmp_path_factory):
    """
    `clean_python(function, *arguments)` calls a function of the test's module in a process without depthmix, and
    returns what it returns (tensors, strings, numbers, lists). The test runs for this environment and for that of
    `--peer-python`. `clean_python.cache` is the Hub's cache of these processes, which is empty when the test begins.
    """
    folder = tmp_path_factory.mktemp("clean")
    shutil.rmtree(hub_home, ignore_errors=True)

    def clean_python(function, *arguments):
        torch.save(arguments, folder / "arguments")
        (folder / "log").write_text("")
        process = runner(request.param)
        call = json.dumps([inspect.getsourcefile(function), function.__name__, str(folder)])
        print(call, file=process.stdin, flush=True)
        status = process.stdout.readline()
        assert status == "0\n", (folder / "log").read_text()
        return torch.load(folder / "result")

    clean_python.cache = hub_home / "hub"
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
