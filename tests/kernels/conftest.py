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


@pytest.fixture
def compiled_ahead_of_time(gpu_target):
    """What such a script of this folder has compiled, in a process of its own, since kernels here are interpreted."""

    def run(script):
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        path = Path(__file__).with_name(script)
        command = [sys.executable, path, gpu_target]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    return run
