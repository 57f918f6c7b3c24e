# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`python -m benchmarks.vllm_speed`: what it makes of the times that servers tell."""

import importlib
from pathlib import Path

import pytest


class Told:
    """A server that takes these milliseconds for a step, the first of its rounds a hundred times as many."""

    def __init__(self, milliseconds: float, spent: float):
        self.milliseconds, self.spent, self.asked = milliseconds, spent, 0

    def ask(self, order: str, **arguments) -> list[tuple[float, float]]:
        assert (order, arguments) == ("decode", {"tokens": 4})
        self.asked += 1
        factor = 100 if self.asked == 1 else self.asked
        return [(factor * self.milliseconds, factor * self.spent)] * 2


def test_ratios_are_those_of_rounds(monkeypatch):
    """Rounds that are slower for everyone change no ratio, and the first, in which servers warm up, does not count."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    compare = importlib.import_module("benchmarks.vllm_speed").compare
    stock, own = [Told(10, 9), Told(11, 9)], [Told(12, 10), Told(12, 10)]
    found = compare(stock, own, rounds=3, tokens=4)
    assert {server.asked for server in (*stock, *own)} == {4}
    assert found["ratio"] == pytest.approx(12 / 10.5)
    assert found["ratio_low"] == pytest.approx(found["ratio_high"]) == pytest.approx(found["ratio"])
    assert found["cpu_ratio"] == pytest.approx(10 / 9)
    assert (found["stock_low"], found["low"]) == (20, 24)
    assert (found["stock_milliseconds"], found["milliseconds"]) == (31.5, 36)
    assert found["noise"] == pytest.approx(1.1)
