# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The loss without logits: the same loss and the same gradients as from all logits, whatever the head is."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from depthmix import DepthQwen3ForCausalLM, DepthQwen3MoeForCausalLM, apply_liger_kernel
from depthmix.modeling import lean_loss


VOCABULARY = 97


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that a few rows make several pieces, the last of which is not full."""
    monkeypatch.setattr(lean_loss, "ROWS", 7)
    monkeypatch.setattr(lean_loss, "CALLED_ROWS", 5)


class Made(TorchDispatchMode):
    """The number of rows of the largest tensor that is as wide as the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.t.default, torch.ops.aten.transpose.int):
            # the weight of the head
            return result
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor) and each.ndim and each.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, each.numel() // VOCABULARY)
        return result


@pytest.fixture
def ids(token_ids):
    ids = token_ids(2, 12)
    return ids


def labels_of(ids):
    labels = ids.clone()
    labels[0, :4] = labels[1, 7] = -100
    return labels


def results(model, ids, labels, **options):
    """The loss and the gradients, by name."""
    model.zero_grad()
    output = model(ids, labels=labels, **options)
    (3 * output.loss).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output, {"loss": output.loss.detach(), **grads}


def assert_same(model, ids, labels, most_rows=7, **options):
    """With logits and without. Layers are 64 wide, so nothing else is as wide as the vocabulary, but the weights."""
    plain, expected = results(model, ids, labels, skip_logits=False, **options)
    assert plain.logits is not None
    with Made() as made:
        output = model(ids, labels=labels, skip_logits=True, **options)
    assert output.logits is None and 0 < made.rows <= max(most_rows, 7)
    _, found = results(model, ids, labels, skip_logits=True, **options)
    assert found.keys() == expected.keys() and len(found) > 1
    for name, value in expected.items():
        assert found[name].dtype is value.dtype
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=5e-6, msg=lambda m, name=name: f"{name}: {m}")


OPTIONS = {
    "mean": {},
    "number": {"num_items_in_batch": 5},
    "tensor": {"num_items_in_batch": torch.tensor(5)},
    "another index": {"ignore_index": 3},
    "kept": {"logits_to_keep": 6},
    "depth weights": {"output_depth_weights": True, "output_hidden_states": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, build, ids):
    labels = labels_of(ids)
    if "ignore_index" in options:
        labels = labels.masked_fill(labels == -100, 3)
    assert_same(build(), ids, labels[:, -options.get("logits_to_keep", 0) :], **options)


def test_kept_places(build, ids):
    places = torch.tensor([2, 3, 9])
    assert_same(build(), ids, labels_of(ids)[:, places], logits_to_keep=places)


def test_families(family, build_awake, ids):
    assert_same(build_awake(family, **family.densest), ids, labels_of(ids))


def test_shifted_labels(build, ids):
    model, labels = build(), labels_of(ids)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    expected = model(ids, labels=labels).loss
    for skip_logits in (False, True):
        for given in ({"labels": labels}, {}):
            output = model(ids, shift_labels=shifted, skip_logits=skip_logits, **given)
            torch.testing.assert_close(output.loss, expected)
            assert (output.logits is None) is skip_logits


def test_shifted_by_a_bystander(build, ids):
    """`shift_labels` come first, as context parallelism gives both."""
    model, labels = build(), labels_of(ids)
    output = model(ids, labels=torch.zeros_like(labels), shift_labels=labels, skip_logits=True)
    torch.testing.assert_close(output.loss, F.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
@pytest.mark.parametrize("called", [False, True])
def test_label_smoothing(smoothing, called, build, ids):
    """As liger-kernel has it. The stock loss takes no notice of the keyword."""
    model, labels = build(), labels_of(ids)
    if called:
        model.lm_head.register_forward_hook(lambda *_: None)
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    expected = F.cross_entropy(model(ids).logits.flatten(0, 1), targets, label_smoothing=smoothing)
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    output = model(ids, labels=labels, label_smoothing=smoothing, skip_logits=True)
    torch.testing.assert_close(output.loss, expected)
    for pair in zip(torch.autograd.grad(output.loss, list(model.parameters())), expected_grads, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("called", [False, True])
def test_nothing_to_learn(called, build, ids):
    """As with liger-kernel. The stock mean over no labels is not a number."""
    model, labels = build(), torch.full_like(ids, -100)
    if called:
        model.lm_head.register_forward_hook(lambda *_: None)
    output, found = results(model, ids, labels, skip_logits=True)
    assert output.loss == 0 and all(not value.any() for value in found.values())
    assert results(model, ids, labels, skip_logits=True, num_items_in_batch=4)[0].loss == 0


def tie(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def resize(model):
    model.resize_token_embeddings(VOCABULARY + 8)
    model.resize_token_embeddings(VOCABULARY)


def give_bias(model):
    model.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY))


def freeze_head(model):
    model.lm_head.requires_grad_(False)


def freeze_body(model):
    model.model.requires_grad_(False)


def freeze_weight(model):
    give_bias(model)
    model.lm_head.weight.requires_grad_(False)


class Scaled(nn.Linear):
    def forward(self, x):
        return 0.5 * super().forward(x)


def replace_head(model):
    model.lm_head.__class__ = Scaled


# whether the weights are taken, and what is done to the head
HEADS = {
    "tied": (True, tie),
    "resized": (True, resize),
    "a bias": (True, give_bias),
    "frozen": (True, freeze_head),
    "alone": (True, freeze_body),
    "a bias alone": (True, freeze_weight),
    "a hook": (False, lambda model: model.lm_head.register_forward_hook(lambda m, x, y: 0.5 * y)),
    "an earlier hook": (False, lambda model: model.lm_head.register_forward_pre_hook(lambda m, x: 0.5 * x[0])),
    "another class": (False, replace_head),
    "a forward": (False, lambda model: setattr(model.lm_head, "forward", lambda x: x @ model.lm_head.weight.t() / 2)),
}


@pytest.mark.parametrize("head", HEADS)
def test_heads(head, build, ids, monkeypatch):
    is_taken, change = HEADS[head]
    model, taken = build(), []
    change(model)
    original = lean_loss._chunked_loss
    monkeypatch.setattr(lean_loss, "_chunked_loss", lambda *x, **y: taken.append(1) or original(*x, **y))
    assert_same(model, ids, labels_of(ids))
    assert bool(taken) is is_taken


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "lm_head"], "lora_bias": True},
    ],
)
def test_adapters(options, build, ids):
    """An adapter of the head has its part, and learns."""
    model = get_peft_model(build(), LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options))
    assert_same(model, ids, labels_of(ids))
    _, grads = results(model, ids, labels_of(ids), skip_logits=True)
    assert all(p.grad.any() for name, p in model.named_parameters() if p.requires_grad and "lm_head" in name)


def test_experts(build, ids):
    """The auxiliary loss is added, and returned."""
    model = build(model_class=DepthQwen3MoeForCausalLM, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    assert_same(model, ids, labels_of(ids), output_router_logits=True)
    output = model(ids, labels=ids, skip_logits=True, output_router_logits=True)
    assert output.aux_loss is not None and output.router_logits is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision(dtype, autocast, build, ids):
    """No more is lost than with all logits, and the loss is in fp32."""
    wide, labels = build(), labels_of(ids)
    model = wide if autocast else copy.deepcopy(wide).to(dtype)

    def run(model, **options):
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            return results(model, ids, labels, **options)[1]

    exact = results(copy.deepcopy(model).double(), ids, labels, skip_logits=False)[1]
    plain, lean = run(model, skip_logits=False), run(model, skip_logits=True)
    assert lean["loss"].dtype is torch.float32
    for name, value in exact.items():
        assert lean[name].dtype is plain[name].dtype
        lost, lost_plainly = ((each[name].double() - value).norm() / value.norm() for each in (lean, plain))
        assert lost <= 1.5 * lost_plainly + 2e-3, name


@pytest.mark.parametrize(("rows", "scale"), [(50, 512), (4000, 8192)])
def test_scaled_loss_in_fp16(rows, scale):
    """As a gradient scaler scales it. What is made before the scale is known neither vanishes nor overflows."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(16, VOCABULARY, bias=True), 40 * torch.randn(1, rows, 16)
    with torch.no_grad():
        head.weight.mul_(0.01)
    labels = torch.zeros(1, rows, dtype=torch.long)
    grads = {}
    for dtype in (torch.float64, torch.float16):
        each, inputs = copy.deepcopy(head).half().to(dtype), hidden.half().to(dtype).requires_grad_()
        loss = lean_loss.lean_causal_lm_loss(each, inputs, labels)
        wanted = [inputs, *each.parameters()]
        grads[dtype] = [loss.detach(), *torch.autograd.grad(scale * loss, wanted)]
    for found, exact in zip(grads[torch.float16], grads[torch.float64], strict=True):
        assert ((found.double() - exact).norm() / exact.norm()).item() < 5e-3


def test_sums_in_fp32(build, ids):
    model = build().bfloat16()
    exact = results(copy.deepcopy(model).double(), ids, ids, skip_logits=False)[1]["lm_head.weight"]
    lost = [
        (results(model, ids, ids, skip_logits=True, **options)[1]["lm_head.weight"].double() - exact).norm()
        for options in ({}, {"accum_dtype": torch.float32})
    ]
    assert lost[1] < lost[0]


def test_one_backward(build, ids):
    model = build()
    loss = model(ids, labels=ids, skip_logits=True).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="for a second backward ask for skip_logits=False"):
        loss.backward()
    with pytest.raises(RuntimeError, match="cannot be differentiated again: ask for skip_logits=False"):
        model(ids, labels=ids, skip_logits=True).loss.backward(create_graph=True)


def test_without_gradients(build, ids):
    model = build()
    expected = model(ids, labels=ids).loss
    with torch.no_grad():
        loss = model(ids, labels=ids, skip_logits=True).loss
        model.lm_head.register_forward_hook(lambda *_: None)
        called = model(ids, labels=ids, skip_logits=True).loss
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(called, expected.detach())
    assert not loss.requires_grad


def test_when_logits_are_skipped(build, ids):
    model = build()
    apply_liger_kernel(model)
    for training in (True, False):
        model.train(training)
        assert (model(ids, labels=ids).logits is None) is training
        assert (model(ids, shift_labels=ids).logits is None) is training
        assert model(ids).logits.shape == (2, 12, VOCABULARY)
        assert model(ids, labels=ids, skip_logits=False).logits is not None
        assert model(ids, labels=ids, skip_logits=True).logits is None
    model.train()
    loss, *others = model(ids, labels=ids, return_dict=False, use_cache=False)
    assert loss.ndim == 0 and others == []
    with pytest.raises(ValueError, match="skip_logits=True: there are neither labels nor shift_labels"):
        model(ids, skip_logits=True)
    # somebody else computes the loss, as the Trainer does for label smoothing
    assert model(ids, skip_logits=True, num_items_in_batch=4).logits is not None
    apply_liger_kernel(model, fused_linear_cross_entropy=False)
    assert model(ids, labels=ids).logits is not None


def test_a_loss_of_ones_own(build, ids):
    """It gets the logits that it needs; they are not returned."""
    model, seen = build(), []

    def loss_function(logits, labels, vocab_size, **kwargs):
        seen.append(logits.shape)
        return logits.square().mean()

    model.loss_function = loss_function
    output = model(ids, labels=ids, skip_logits=True)
    assert seen == [(2, 12, VOCABULARY)] and output.logits is None
    torch.testing.assert_close(output.loss, model(ids).logits.square().mean())


def test_replaced_cross_entropy(build, ids, monkeypatch):
    """liger-kernel replaces it for the whole process."""
    model = build()
    expected = model(ids, labels=ids).loss

    def broken(*args, **kwargs):
        raise AssertionError("cross_entropy of torch is called")

    monkeypatch.setattr(F, "cross_entropy", broken)
    torch.testing.assert_close(model(ids, labels=ids, skip_logits=True).loss, expected)
    model.lm_head.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(model(ids, labels=ids, skip_logits=True).loss, expected)


@pytest.mark.once
@pytest.mark.slow
def test_compiled(build, ids):
    """A compiler sees plain operations, and breaks nowhere."""
    model = build(num_hidden_layers=2)
    expected, _ = results(model, ids, ids, skip_logits=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = compiled(ids, labels=ids, skip_logits=True, use_cache=False)
    output.loss.backward()
    torch.testing.assert_close(output.loss, expected.loss)
    assert output.logits is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.5}, "label_smoothing=1.5: must be between 0 and 1"),
        ({"lse_square_scale": 1e-4}, "lse_square_scale=0.0001: the loss without logits does not offer it"),
        ({"return_token_accuracy": True}, "return_token_accuracy=True: the loss without"),
        ({"logits_to_keep": 5}, r"labels have shape \[2, 12\].* \[2, 5\]"),
    ],
)
def test_what_does_not_fit(options, message, build, ids):
    model = build()
    with pytest.raises(ValueError, match=message):
        model(ids, labels=ids, skip_logits=True, **options)


def test_labels_outside_of_the_vocabulary(build, ids):
    model = build()
    for label in (VOCABULARY, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            model(ids, labels=torch.full_like(ids, label), skip_logits=True)


def test_size_of_the_pieces(monkeypatch):
    """With a large vocabulary they have fewer rows."""
    monkeypatch.setattr(lean_loss, "ROW_BUDGET", 3 * VOCABULARY)
    head, hidden = nn.Linear(4, VOCABULARY, bias=False), torch.randn(1, 10, 4)
    with Made() as made:
        lean_loss.lean_causal_lm_loss(head, hidden, torch.zeros(1, 10, dtype=torch.long))
    assert made.rows == 3


def test_liger_gets_what_it_needs(build, ids, monkeypatch):
    """Its function gets rows, weight, labels that are shifted and bias; its gradients get the factor once."""
    model, labels, calls = build(), labels_of(ids), []
    give_bias(model)
    _, expected = results(model, ids, labels, skip_logits=False, num_items_in_batch=5)

    def function(
        input, weight, target, bias=None, ignore_index=-100, label_smoothing=0.0, reduction="mean", accum_dtype=None
    ):
        calls.append(reduction)
        return F.cross_entropy(F.linear(input, weight, bias), target, ignore_index=ignore_index, reduction=reduction)

    monkeypatch.setattr(lean_loss, "liger_function", lambda name: function)
    monkeypatch.setattr(lean_loss, "_chunked_loss", lean_loss._liger_loss)
    _, found = results(model, ids, labels, skip_logits=True, num_items_in_batch=5)
    with torch.no_grad():
        assert model(ids, labels=labels, skip_logits=True, num_items_in_batch=5).loss == found["loss"]
    assert calls == ["sum"] * 2
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=5e-6)


def test_is_off_unless_asked_for(ids, build):
    model = build().train()
    assert model.fused_linear_cross_entropy is DepthQwen3ForCausalLM.fused_linear_cross_entropy is False
    assert model(ids, labels=ids).logits is not None
