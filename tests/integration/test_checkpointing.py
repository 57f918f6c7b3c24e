# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Activation checkpointing: exact gradients in every mode, and no side effect of the recomputation."""

import warnings

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import PreTrainedModel


# in the names of methods and arguments; the first from transformers 5.23 on
WORDS = ("activation", "gradient")

MODES = {
    "non_reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "every_second_layer": {"use_reentrant": False, "every_n_layers": 2},
    "every_second_layer_reentrant": {"use_reentrant": True, "every_n_layers": 2},
}
BOTH_MODES = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_exact(
    family, pattern, mode, build_awake, token_ids, gradients, assert_same_gradients, enable_checkpointing
):
    model = build_awake(family, **pattern).double().train()
    ids = token_ids(2, 12)
    expected = gradients(model, ids)
    enable_checkpointing(model, **MODES[mode])
    assert_same_gradients(gradients(model, ids), expected, tolerance=1e-10)


@pytest.mark.interpreter
@pytest.mark.sampled(2)
def test_with_kernels(family, build_awake, token_ids, gradients, assert_same_gradients, enable_checkpointing):
    model = build_awake(family, **family.densest, num_hidden_layers=3, depth_impl="triton").train()
    ids = token_ids(1, 5)
    expected = gradients(model, ids)
    for use_reentrant in (False, True):
        enable_checkpointing(model, use_reentrant=use_reentrant)
        # where a recomputed layer mixes for itself, sums have another order
        assert_same_gradients(gradients(model, ids), expected, tolerance=1e-5)


@BOTH_MODES
@pytest.mark.parametrize("word", [word for word in WORDS if hasattr(PreTrainedModel, f"{word}_checkpointing_enable")])
def test_both_enabling_methods(family, word, use_reentrant, build_awake, token_ids, gradients, assert_same_gradients):
    model = build_awake(family, **family.densest).double().train()
    ids = token_ids(2, 12)
    expected = gradients(model, ids)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        enable = getattr(model, f"{word}_checkpointing_enable")
        enable(**{f"{word}_checkpointing_kwargs": {"use_reentrant": use_reentrant}})
    assert model.model.layers[0].gradient_checkpointing
    assert_same_gradients(gradients(model, ids), expected, tolerance=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("wrapped", [slice(None), slice(0, 1), slice(1, 3)], ids=["all", "first", "middle"])
@pytest.mark.parametrize("implementation", CheckpointImpl)
def test_wrapped_layers(family, wrapped, implementation, build_awake, token_ids, gradients, assert_same_gradients):
    """PyTorch's way, which accelerate takes for `activation_checkpointing` of FSDP: modules around the layers."""
    model = build_awake(family, **family.densest).double().train()
    ids = token_ids(2, 12)
    expected = gradients(model, ids)
    layers = model.model.layers
    for i in range(len(layers))[wrapped]:
        layers[i] = checkpoint_wrapper(layers[i], checkpoint_impl=implementation)
    found = gradients(model, ids, use_cache=False)
    found = {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in found.items()}
    assert_same_gradients(found, expected, tolerance=1e-10)


@pytest.mark.long
@BOTH_MODES
@pytest.mark.parametrize("frozen_layers", [0, 2])
def test_frozen_embeddings_and_lower_layers(
    family,
    frozen_layers,
    use_reentrant,
    build_awake,
    token_ids,
    gradients,
    assert_same_gradients,
    enable_checkpointing,
):
    """With frozen layers, sources that need no gradient stand beside hidden states that do."""
    model = build_awake(family, **family.densest).double().train()
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[:frozen_layers].requires_grad_(False)
    ids = token_ids(2, 12)
    expected = gradients(model, ids)
    enable_checkpointing(model, use_reentrant=use_reentrant)
    model.enable_input_require_grads()
    assert_same_gradients(gradients(model, ids), expected, tolerance=1e-10)


@pytest.mark.long
@BOTH_MODES
@pytest.mark.densest
def test_training_steps_with_the_cache_left_on(
    family, pattern, use_reentrant, build_awake, token_ids, enable_checkpointing
):
    batches = [token_ids(2, length, seed=length) for length in (12, 7, 15)]

    def train(*, checkpointing):
        model = build_awake(family, **pattern).train()
        assert model.config.use_cache
        if checkpointing:
            enable_checkpointing(model, use_reentrant=use_reentrant)
        seen = [[] for _ in model.model.layers]
        for layer, counts in zip(model.model.layers, seen, strict=True):
            family.reader(layer).register_forward_pre_hook(
                lambda _, *call, counts=counts: counts.append(family.count_sources(*call)), with_kwargs=True
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for ids in batches:
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, seen

    expected, forward_counts = train(checkpointing=False)
    losses, counts = train(checkpointing=True)
    assert losses == pytest.approx(expected, rel=1e-6)
    # one call each step without checkpointing, and the recomputation besides with it
    assert [sorted(set(layer)) for layer in counts] == [sorted(set(layer)) for layer in forward_counts]
    assert [len(layer) for layer in forward_counts] == [3, 3, 3, 3]
    assert [len(layer) for layer in counts] == [6, 6, 6, 6]


@pytest.mark.long
@BOTH_MODES
def test_generation_in_training_mode(
    family, use_reentrant, build_awake, vanilla_twin, token_ids, enable_checkpointing
):
    """As a reinforcement-learning loop generates: dropout is zero, so the tokens are those of eval mode."""
    ids = token_ids(2, 6)

    def tokens_stay_the_same(model):
        expected = model.eval().generate(ids, max_new_tokens=6, do_sample=False)
        enable_checkpointing(model, use_reentrant=use_reentrant)
        return torch.equal(model.train().generate(ids, max_new_tokens=6, do_sample=False), expected)

    model = build_awake(family, **family.densest)
    if not tokens_stay_the_same(vanilla_twin(model)):
        pytest.skip("this transformers takes the cache away from stock models too")
    assert tokens_stay_the_same(model)


def test_disabling(family, build_awake, token_ids, gradients, assert_same_gradients, enable_checkpointing):
    model = build_awake(family, **family.densest).double().train()
    ids = token_ids(2, 12)
    expected = gradients(model, ids)
    enable_checkpointing(model, use_reentrant=True)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        model.gradient_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    assert_same_gradients(gradients(model, ids), expected, tolerance=0)
