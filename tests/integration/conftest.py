# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the integration checks share."""

import pytest
import torch


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
    """Each tensor's difference is held against its norm, or that of the largest where nearly everything cancels."""

    def assert_same_gradients(actual, expected, *, tolerance: float):
        assert actual.keys() == expected.keys()
        # as in a mixer that has nothing to mix
        norms = {name: gradient.norm() for name, gradient in expected.items()}
        norms = {name: norm.clamp(min=1e-3 * max(norms.values())) for name, norm in norms.items()}
        errors = {name: ((actual[name] - expected[name]).norm() / norms[name]).item() for name in expected}
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
