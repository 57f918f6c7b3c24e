# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""When the gated activation is one operation, with the map after it or without, and when the modules are called."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn.utils import parametrize
from transformers.activations import ACT2FN

from depthmix.modeling import lent_weights
from depthmix.modeling.lent_weights import DepthMLP, apply_mlp


pytestmark = [pytest.mark.triton, pytest.mark.once]


class OtherLinear(nn.Linear):
    """As quantisation puts one in the place of a linear map."""

    def forward(self, x):
        return 2 * super().forward(x)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def double(module, *arguments):
    return 2 * arguments[-1]


def replace_down(mlp):
    other = OtherLinear(16, 8, bias=mlp.down_proj.bias is not None)
    other.load_state_dict(mlp.down_proj.state_dict())
    mlp.down_proj = other


def adapt(*names):
    def change(mlp):
        config = LoraConfig(r=2, target_modules=list(names), init_lora_weights=False)
        inject_adapter_in_model(config, mlp)

    return change


def set_forward(mlp):
    mlp.forward = lambda x: 2 * DepthMLP.forward(mlp, x)


CHANGES = {
    "nothing": (lambda mlp: None, "gated_linear"),
    "a frozen weight": (lambda mlp: mlp.down_proj.weight.requires_grad_(False), "gated_linear"),
    "a hook on gate": (lambda mlp: mlp.gate_proj.register_forward_hook(double), "gated_linear"),
    "an adapter on gate and up": (adapt("gate_proj", "up_proj"), "gated_linear"),
    "a hook on down": (lambda mlp: mlp.down_proj.register_forward_hook(double), "gated_product"),
    "an earlier hook on down": (
        lambda mlp: mlp.down_proj.register_forward_pre_hook(lambda m, x: 2 * x[0]),
        "gated_product",
    ),
    "a backward hook on down": (
        lambda mlp: mlp.down_proj.register_full_backward_hook(lambda *_: None),
        "gated_product",
    ),
    "an adapter on down": (adapt("down_proj"), "gated_product"),
    "another class of down": (replace_down, "gated_product"),
    "a parametrised down": (
        lambda mlp: parametrize.register_parametrization(mlp.down_proj, "weight", Doubled()),
        "gated_product",
    ),
    "a wider down": (lambda mlp: mlp.down_proj.double(), None),
    "a wider gate": (lambda mlp: mlp.gate_proj.register_forward_hook(lambda m, x, y: y.double()), None),
    "a hook on the activation": (lambda mlp: mlp.act_fn.register_forward_hook(double), None),
    "another activation": (lambda mlp: setattr(mlp, "act_fn", nn.GELU()), None),
    "a hook on the network": (lambda mlp: mlp.register_forward_hook(double), None),
    "a forward of its own": (set_forward, None),
}


@pytest.fixture
def called(monkeypatch):
    """The operations that are called."""
    names = []

    def watch(name):
        original = getattr(lent_weights, name)

        def operation(*arguments, **keywords):
            names.append(name)
            return original(*arguments, **keywords)

        monkeypatch.setattr(lent_weights, name, operation)

    watch("gated_linear")
    watch("gated_product")
    return names


def make(bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return DepthMLP(8, 16, copy.deepcopy(ACT2FN["silu"]), bias).to(dtype)


def results(mlp, impl, x, autocast=None):
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        (output,) = apply_mlp(mlp, x, impl)
    trained = [p for p in mlp.parameters() if p.requires_grad]
    return [output.detach(), *torch.autograd.grad(output.square().sum(), [x, *trained])]


def compare(called, expected, mlp, x, **options):
    plain = results(mlp, "reference", x, **options)
    assert called == []
    found = results(mlp, "triton", x, **options)
    assert called == ([] if expected is None else [expected])
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.dtype is theirs.dtype
        tolerance = {} if ours.dtype is torch.float32 and not options else {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_who_is_called(change, bias, called):
    function, expected = CHANGES[change]
    mlp, x = make(bias), torch.randn(2, 5, 8)
    function(mlp)
    if change.startswith("a wider"):
        # as calling the modules, this is an error, or the result of theirs
        for impl in ("reference", "triton"):
            with pytest.raises(RuntimeError, match="dtype"):
                apply_mlp(mlp, x, impl)
        return
    compare(called, expected, mlp, x)


def count_parallel(monkeypatch):
    counts = []
    original = lent_weights.parallel_linear

    def watched(hidden_states, weights):
        counts.append(len(weights))
        return original(hidden_states, weights)

    monkeypatch.setattr(lent_weights, "parallel_linear", watched)
    return counts


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda linears: None, [3]),
        (lambda linears: linears[1].weight.requires_grad_(False), [3]),
        (lambda linears: linears[1].register_forward_hook(double), []),
        (lambda linears: setattr(linears[2], "bias", nn.Parameter(torch.ones(8))), []),
        (lambda linears: linears[0].register_full_backward_hook(lambda *_: None), []),
    ],
)
def test_maps_of_one_input(change, expected, monkeypatch):
    torch.manual_seed(0)
    linears = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    change(linears)
    counts, x = count_parallel(monkeypatch), torch.randn(2, 5, 8, requires_grad=True)
    found = []
    for impl in ("triton", "reference"):
        outputs = lent_weights.apply_linears(linears, x, impl)
        wanted = [x, *(p for linear in linears for p in linear.parameters() if p.requires_grad)]
        found.append([*outputs, *torch.autograd.grad(sum(y.square().sum() for y in outputs), wanted)])
    for pair in zip(*found, strict=True):
        torch.testing.assert_close(*pair)
    assert counts == expected
    with torch.no_grad():
        lent_weights.apply_linears(linears, x, "triton")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lent_weights.apply_linears(linears, x, "triton")
    assert counts == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype, called):
    """Weights stay in fp32 and get gradients in fp32."""
    compare(called, "gated_linear", make(), torch.randn(2, 5, 8), autocast=dtype)


def test_where_the_host_decides(called):
    mlp, token, tokens = make(), torch.randn(2, 1, 8), torch.randn(2, 5, 8)
    with torch.no_grad():
        apply_mlp(mlp, token, "triton")
        assert called == []
        apply_mlp(mlp, tokens, "triton")
    assert called == ["gated_linear"]
    called.clear()
    apply_mlp(mlp, token.requires_grad_(), "triton")
    assert called == ["gated_linear"]


def test_compilers_fuse_by_themselves(called):
    mlp, tokens = make(), torch.randn(2, 5, 8)
    compiled = torch.compile(lambda x: apply_mlp(mlp, x, "triton")[0], fullgraph=True, backend="eager")
    assert torch.equal(compiled(tokens), mlp(tokens)) and called == []


def test_without_a_gpu_nothing_changes(called):
    """Bit for bit: `"auto"` takes kernels on a GPU only."""
    mlp, tokens = make(), torch.randn(2, 5, 8)
    assert torch.equal(apply_mlp(mlp, tokens, "auto")[0], mlp(tokens))
    assert called == []


@pytest.mark.sampled(3)
def test_models_take_it(family, build_awake, called, token_ids, monkeypatch):
    counts = count_parallel(monkeypatch)
    model, ids = build_awake(family, num_hidden_layers=2, depth_impl="triton"), token_ids(2, 6)
    called.clear(), counts.clear()
    model(ids, labels=ids).loss.backward()
    assert called == ["gated_linear"] * 2
    # query, key and value; gate and up, in MoDA with the slots of the network
    assert sorted(set(counts)) in ([2, 3], [3]) and len(counts) == 4
