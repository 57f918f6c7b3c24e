# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the tests of kernels share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


# without it, matrix products on a GPU are refused as not deterministic
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_itemcollected(item):
    """Kernels do not depend on transformers."""
    item.add_marker(pytest.mark.once)


@pytest.fixture(autouse=True)
def nan_in_fresh_memory():
    """What a kernel does not write is not a number."""
    torch.use_deterministic_algorithms(True)
    assert torch.ones(3).new_empty_strided((2, 3), (1, 2)).isnan().all()
    assert torch.ones(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


OTHER_TARGETS = [pytest.param(target, marks=pytest.mark.exhaustive) for target in ("sm_80", "sm_100", "gfx942")]


@pytest.fixture(params=["sm_90", *OTHER_TARGETS])
def gpu_target(request):
    """The architecture that kernels are compiled for: in every run the one that they are measured on."""
    return request.param


# runs scripts, each in a process of its own, which this one forks after the slow imports
COMPILER = """
import json, os, runpy, sys, traceback

sys.path.insert(0, os.getcwd())
import ahead_of_time

for line in sys.stdin:
    output, *sys.argv = json.loads(line)
    child = os.fork()
    if not child:
        status = 1
        try:
            with open(output, "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                runpy.run_path(sys.argv[0], run_name="__main__")
                sys.stdout.flush()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="session")
def compiler():
    """A process that compiles kernels, since here they are interpreted; starting it takes longer than compiling."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", COMPILER]
    with subprocess.Popen(command, cwd=Path(__file__).parent, env=environment, **pipes) as process:
        yield process


@pytest.fixture
def compiled_ahead_of_time(gpu_target, compiler, tmp_path):
    """What such a script of this folder has compiled."""

    def run(script):
        arguments = [tmp_path / "output", Path(__file__).with_name(script), gpu_target]
        print(json.dumps([str(argument) for argument in arguments]), file=compiler.stdin, flush=True)
        status, output = compiler.stdout.readline(), (tmp_path / "output").read_text()
        assert status == "0\n", output
        return json.loads(output)

    return run
