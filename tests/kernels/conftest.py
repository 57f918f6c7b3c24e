# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the tests of kernels share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nan_in_fresh_memory():
    """What a kernel does not write is not a number."""
    torch.use_deterministic_algorithms(True)
    assert torch.ones(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
