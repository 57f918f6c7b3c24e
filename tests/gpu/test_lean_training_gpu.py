# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""On a CUDA device: the loss without logits, by liger-kernel and by PyTorch, and what a train step keeps in memory."""

import copy

import pytest
import torch
from torch import nn

from depthmix import apply_liger_kernel
from depthmix.modeling import lean_loss
from depthmix.modeling.lean_loss import lean_causal_lm_loss
from depthmix.modeling.lent_weights import DepthMLP, apply_mlp


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FIELDS = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128, "depth_stride": 1}
HAS_LIGER = lean_loss.liger_function("liger_fused_linear_cross_entropy") is not None
BY = [pytest.param("liger", marks=pytest.mark.skipif(not HAS_LIGER, reason="needs liger-kernel")), "torch"]


@pytest.fixture(autouse=True)
def exact_fp32():
    torch.backends.cuda.matmul.allow_tf32 = False


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / (expected.double().norm() + 1e-12)).item()


def results(head, hidden, labels, **options):
    hidden = hidden.detach().requires_grad_()
    loss = lean_causal_lm_loss(head, hidden, labels, **options)
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, *head.parameters()])]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 999}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_without_logits(by, dtype, options, bias):
    """More rows than one piece has, and a vocabulary that fills no tile."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(192, 5003, bias=bias, device="cuda"), torch.randn(3, 1500, 192, device="cuda")
    labels = torch.randint(5003, (3, 1500), device="cuda")
    labels[0, :700] = -100
    exact_head = copy.deepcopy(head).to(dtype).double()
    called = copy.deepcopy(head).to(dtype)
    called.register_forward_hook(lambda *_: None)
    exact = results(exact_head, hidden.to(dtype).double(), labels, **options)
    found = results(head.to(dtype), hidden.to(dtype), labels, with_liger=by == "liger", **options)
    plain = results(called, hidden.to(dtype), labels, **options)
    assert found[0].dtype is torch.float32
    for ours, theirs, expected in zip(found, plain, exact, strict=True):
        assert relative_error(ours, expected) < 2 * relative_error(theirs, expected) + 2e-5


@pytest.mark.parametrize("by", BY)
def test_a_head_that_trains_alone(by):
    head, hidden = nn.Linear(64, 999, bias=False, device="cuda"), torch.randn(2, 50, 64, device="cuda")
    labels = torch.randint(999, (2, 50), device="cuda")
    expected = results(head, hidden, labels)[2]
    loss = lean_causal_lm_loss(head, hidden, labels, with_liger=by == "liger")
    torch.testing.assert_close(torch.autograd.grad(loss, head.weight)[0], expected)


@pytest.mark.parametrize("by", BY)
def test_models(by, build, token_ids, monkeypatch):
    model, ids = build(**FIELDS).cuda().train(), token_ids(2, 40).cuda()
    if by == "torch":
        monkeypatch.setattr(lean_loss, "liger_function", lambda name: None)
    losses, grads = [], []
    for lean in (False, True):
        apply_liger_kernel(model, fused_linear_cross_entropy=lean)
        model.zero_grad()
        output = model(ids, labels=ids)
        output.loss.backward()
        assert (output.logits is None) is lean
        losses.append(output.loss.detach())
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    torch.testing.assert_close(*losses)
    for name, grad in grads[0].items():
        assert relative_error(grads[1][name], grad) < 1e-4, name


def test_the_loss_waits_for_nothing():
    """Neither forward nor backward asks the device for a number."""
    head, hidden = nn.Linear(64, 999, device="cuda"), torch.randn(2, 50, 64, device="cuda", requires_grad=True)
    labels = torch.randint(999, (2, 50), device="cuda")
    for options in ({}, {"num_items_in_batch": torch.tensor(7, device="cuda")}, {"num_items_in_batch": 7}):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            lean_causal_lm_loss(head, hidden, labels, **options).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("by", BY)
def test_memory_of_the_loss(by, monkeypatch):
    """Far less than the logits take once, in bf16, beside the gradients that are kept."""
    head = nn.Linear(256, 50000, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(1, 32768, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(50000, (1, 32768), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lean_causal_lm_loss(head, hidden, labels, with_liger=by == "liger").backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 0.5 * 2 * 32768 * 50000


def test_memory_of_the_gated_network():
    """Between forward and backward: its input, gate and up. A first call compiles and finds libraries' workspaces."""
    mlp = DepthMLP(256, 1024, nn.SiLU(), False).cuda().bfloat16()
    x = torch.randn(4, 2048, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    apply_mlp(mlp, x, "auto")[0].sum().backward()
    before = torch.cuda.memory_allocated()
    (output,) = apply_mlp(mlp, x, "auto")
    kept = torch.cuda.memory_allocated() - before - output.numel() * 2
    assert kept <= 2 * 4 * 2048 * 1024 * 2 * 1.01
    assert mlp(x).shape == output.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_network(dtype):
    torch.manual_seed(0)
    mlp, x = DepthMLP(192, 704, nn.SiLU(), True).cuda(), torch.randn(2, 300, 192, device="cuda")
    grads = {}
    for name, impl, kind in (
        ("exact", "reference", torch.float64),
        ("plain", "reference", dtype),
        ("ours", "auto", dtype),
    ):
        each, inputs = copy.deepcopy(mlp).to(dtype).to(kind), x.to(dtype).to(kind).requires_grad_()
        (output,) = apply_mlp(each, inputs, impl)
        grads[name] = [output, *torch.autograd.grad(output.square().sum(), [inputs, *each.parameters()])]
    for ours, plain, exact in zip(grads["ours"], grads["plain"], grads["exact"], strict=True):
        assert relative_error(ours, exact) < 1.1 * relative_error(plain, exact) + 1e-5
