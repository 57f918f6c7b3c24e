# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the tests on a GPU share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def forget_compiled_programs():
    """The compiler refuses a ninth program for one function, and all tests of a process run the same forward."""
    yield
    torch._dynamo.reset()
