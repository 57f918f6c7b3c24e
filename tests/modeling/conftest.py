# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Lets the tests of this folder import the checks and the plain models beside them."""

import sys
from pathlib import Path

import pytest


sys.path.append(str(Path(__file__).parent))
pytest.register_assert_rewrite("causal_lm_checks")
