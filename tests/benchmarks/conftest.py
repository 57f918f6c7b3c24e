# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Benchmarks run on one version of transformers."""

import pytest


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.once)
