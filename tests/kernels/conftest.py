# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the tests of kernels share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def nan_in_fresh_memory():
    """What a kernel does not write is not a number."""
    torch.use_deterministic_algorithms(True)
    assert torch.ones(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def compiled_ahead_of_time():
    """What such a script of this folder has compiled, in a process of its own, since kernels here are interpreted."""

    def run(script):
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        path = Path(__file__).with_name(script)
        process = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    return run
