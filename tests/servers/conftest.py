# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Servers need environments of their own; where one is missing, its tests are left out."""

from importlib.util import find_spec


collect_ignore = [] if find_spec("vllm") else ["test_vllm.py"]
