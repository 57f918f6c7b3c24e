# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Signals while a conversion runs: no model is lost, half replaced or left behind, and nothing hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = [pytest.mark.once, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]


@pytest.fixture
def meet_signals(qwen3_source, tmp_path):
    """`meet_signals(count, seed)` runs so many conversions that signals meet; returns what was found."""

    def meet_signals(count, seed):
        script = Path(__file__).with_name("killed_conversions.py")
        command = [sys.executable, script, qwen3_source(), tmp_path / "workplace", str(count), str(seed)]
        (tmp_path / "workplace").mkdir()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        found = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert found.stdout, found.stderr
        return json.loads(found.stdout)

    return meet_signals


def test_chosen_points(meet_signals):
    # every signal with every kind of older model
    found = meet_signals(12, seed=1)
    assert found["faults"] == []
    assert found["trials"] == 12 and found["operations"] > 60


@pytest.mark.skipif("DEPTHMIX_KILL" not in os.environ, reason="`make kill` runs it")
@pytest.mark.timeout(3600)
def test_random_points(meet_signals):
    count = int(os.environ["DEPTHMIX_KILL"])
    found = meet_signals(count, seed=int(os.environ.get("DEPTHMIX_KILL_SEED", "0")))
    print(f"{count} conversions met signals; faults: {found['kinds']}")
    assert found["faults"] == []
