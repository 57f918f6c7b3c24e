# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The model families that every integration check runs over, and what the checks share."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from depthmix import DepthQwen3ForCausalLM


@dataclass(frozen=True)
class Family:
    """What the checks need to know of a model family."""

    head: type[PreTrainedModel]
    vanilla: type[PreTrainedModel]
    # how many earlier layers' values one call of an attention module reads, from its keyword arguments
    count_sources: Callable[[dict], int]
    # configuration fields for the different ways in which layers can read earlier ones, the densest first
    patterns: dict[str, dict]

    @property
    def densest(self) -> dict:
        return next(iter(self.patterns.values()))


FAMILIES = {
    "depth_qwen3": Family(
        head=DepthQwen3ForCausalLM,
        vanilla=Qwen3ForCausalLM,
        count_sources=lambda kwargs: len(kwargs["source_values"]),
        patterns={
            "stride_1": {"depth_stride": 1},
            "stride_2": {"depth_stride": 2},
            "window": {"depth_stride": 3, "depth_window": 2},
        },
    ),
}


def pytest_generate_tests(metafunc):
    """`family` runs a test over the families, `pattern` besides over the patterns of sources of each."""
    if "pattern" in metafunc.fixturenames:
        cases = [
            pytest.param(family, fields, id=f"{name}-{pattern}")
            for name, family in FAMILIES.items()
            for pattern, fields in family.patterns.items()
        ]
        metafunc.parametrize("family, pattern", cases)
    elif "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


@pytest.fixture
def build_awake(build, assert_awake):
    """`build_awake(family, **fields)` is `build` with the control that the mixing matters."""

    def build_awake(family: Family, **fields):
        model = build(model_class=family.head, **fields)
        assert_awake(model)
        return model

    return build_awake


@pytest.fixture
def gradients():
    """`gradients(model, ids)` gives the gradients of the language-model loss by parameter name; none is missing."""

    def gradients(model, ids, **kwargs):
        model.zero_grad()
        model(ids, labels=ids, **kwargs).loss.backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert all(gradient is not None for gradient in found.values())
        return found

    return gradients


@pytest.fixture
def assert_same_gradients():
    """Each tensor's difference is held against its norm."""

    def assert_same_gradients(actual, expected, *, tolerance: float):
        assert actual.keys() == expected.keys()
        errors = {name: ((actual[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected}
        assert {name: error for name, error in errors.items() if not error <= tolerance} == {}

    return assert_same_gradients


@pytest.fixture
def enable_checkpointing():
    """`enable_checkpointing(model, use_reentrant=…, every_n_layers=…)` on every version of transformers."""

    def enable_checkpointing(model, *, every_n_layers: int = 1, **kwargs):
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(kwargs, every_n_layers=every_n_layers)
        else:
            model.gradient_checkpointing_enable(kwargs, every_n_layers=every_n_layers)

    return enable_checkpointing


@torch.no_grad()
def logits_of(model, ids, **kwargs) -> torch.Tensor:
    return model(ids, **kwargs).logits


@pytest.fixture(name="logits_of")
def logits_of_fixture():
    return logits_of
