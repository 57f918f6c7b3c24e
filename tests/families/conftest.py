# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Lets the tests of this folder share the tiny models of every pair."""

import sys
from pathlib import Path


sys.path.append(str(Path(__file__).parent))
