# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
liger-kernel's ways to reach a model: the Trainer's argument, its Auto class, and a call. A model shows that it has
been reached by a training step that makes no logits.
"""

import os

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM, Trainer, TrainingArguments

import depthmix
from depthmix import DepthQwen3ForCausalLM, DepthQwen3ForSequenceClassification, apply_liger_kernel
from depthmix.configuration import liger_entry
from depthmix.families import FAMILIES
from depthmix.modeling import lean_loss
from depthmix.modeling.lean_loss import liger_causal_lm_loss


monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="needs liger-kernel")

from liger_kernel.transformers import AutoLigerKernelForCausalLM  # noqa: E402


@pytest.fixture
def rows(token_ids):
    ids = token_ids(4, 10)
    labels = ids.clone()
    labels[0, :6] = labels[2, :3] = -100
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(4)]


@pytest.fixture
def make_trainer(tmp_path, rows):
    def make_trainer(model, **arguments):
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "optim": "sgd",
            "learning_rate": 0.01,
            "logging_steps": 1,
            "max_steps": 1,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "dataloader_pin_memory": False,
        }
        return Trainer(model, TrainingArguments(**defaults | arguments), train_dataset=rows, eval_dataset=rows)

    return make_trainer


@pytest.fixture
def made(monkeypatch):
    """Whether each forward with labels made logits."""
    calls = []
    original = lean_loss.lean_causal_lm_loss

    def watched(*args, **kwargs):
        calls.append("no logits")
        return original(*args, **kwargs)

    from depthmix.modeling import depth_decoder

    monkeypatch.setattr(depth_decoder, "lean_causal_lm_loss", watched)
    return calls


def test_every_model_type_is_known():
    table = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    assert len(FAMILIES) > 20 and {*FAMILIES} <= {*table}
    # those of the host library keep their functions
    assert table["qwen3"] is monkey_patch.apply_liger_kernel_to_qwen3


def test_trainer(family, build_awake, make_trainer, made):
    """The same training, under accumulation of batches with unequal numbers of labels."""
    logs, models = [], []
    for liger in (False, True):
        model = build_awake(family, **family.densest)
        trainer = make_trainer(model, use_liger_kernel=liger)
        made.clear()
        trainer.train()
        assert made == ["no logits"] * 2 * liger
        logs.append(trainer.state.log_history[0])
        models.append(model)
    for name in ("loss", "grad_norm"):
        assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-5)
    for pair in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(*pair)


@pytest.mark.parametrize("options", [{"fused_linear_cross_entropy": False}, {"rope": False, "swiglu": False}])
def test_trainer_passes_options_on(options, build, make_trainer, made):
    model = build()
    make_trainer(model, use_liger_kernel=True, liger_kernel_config=options).train()
    assert bool(made) is options.get("fused_linear_cross_entropy", True) is model.fused_linear_cross_entropy


def test_trainer_with_adapters(build, make_trainer, made):
    model = get_peft_model(build(), LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"))
    make_trainer(model, use_liger_kernel=True).train()
    assert made == ["no logits"] * 2
    trained = [p for name, p in model.named_parameters() if "lm_head.lora_B" in name]
    assert trained and all(p.any() for p in trained)


def test_trainer_evaluates(build, make_trainer, made):
    """With logits for metrics, without them for the loss alone."""
    expected = make_trainer(build()).evaluate()["eval_loss"]
    trainer = make_trainer(build(), use_liger_kernel=True, learning_rate=0.0)
    trainer.train()
    made.clear()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert made == ["no logits"]
    made.clear()
    assert trainer.predict(trainer.eval_dataset).predictions.shape == (4, 10, 97)
    assert made == []


def test_trainer_smooths_labels(build, make_trainer):
    """In training and in evaluation it takes the logits, and shifts the labels."""
    results = []
    for liger in (False, True):
        trainer = make_trainer(build(), use_liger_kernel=liger, label_smoothing_factor=0.2)
        trainer.train()
        results.append([trainer.state.log_history[0]["loss"], trainer.evaluate()["eval_loss"]])
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_a_loss_function_of_the_users(build, make_trainer):
    """It gets the logits."""
    seen = []

    def loss_function(outputs, labels, num_items_in_batch=None):
        seen.append(outputs.logits.shape)
        return outputs.logits.square().mean()

    trainer = make_trainer(build(), use_liger_kernel=True)
    trainer.compute_loss_func = loss_function
    trainer.train()
    trainer.evaluate()
    assert seen == [(2, 10, 97)] * 2 + [(4, 10, 97)]


def test_classifiers_keep_their_loss(build, make_trainer, token_ids):
    model = build(model_class=DepthQwen3ForSequenceClassification, num_labels=3)
    ids, labels = token_ids(2, 6), torch.tensor([0, 2])
    expected = model(ids, labels=labels).loss
    assert apply_liger_kernel(model)["loss"] == "as before"
    assert apply_liger_kernel(build().model)["loss"] == "as before"
    torch.testing.assert_close(model.train()(ids, labels=labels).loss, expected)


@pytest.fixture
def saved(build, tmp_path):
    build().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def forget_options():
    yield
    for entry in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.values():
        vars(entry).pop("options", None)


@pytest.mark.usefixtures("forget_options")
def test_auto_class(saved, token_ids):
    ids = token_ids(2, 6)
    model = AutoLigerKernelForCausalLM.from_pretrained(saved).train()
    assert isinstance(model, DepthQwen3ForCausalLM) and model(ids, labels=ids).logits is None
    assert AutoLigerKernelForCausalLM.from_config(model.config).fused_linear_cross_entropy
    other = AutoLigerKernelForCausalLM.from_pretrained(saved, fused_linear_cross_entropy=False)
    assert not other.fused_linear_cross_entropy
    with pytest.raises(ValueError, match="only one of them"):
        AutoLigerKernelForCausalLM.from_pretrained(saved, cross_entropy=True)


def test_the_auto_class_of_the_host_library_is_not_affected(saved):
    assert not AutoModelForCausalLM.from_pretrained(saved).fused_linear_cross_entropy


SCRIPT = """
import sys

order, folder, auto = sys.argv[1:]
if order == "depthmix first":
    import depthmix
    assert not any(name.startswith("liger_kernel") for name in sys.modules)
if order == "no depthmix":
    # nor its folders, which lie beside each other in a checkout
    sys.modules["depthmix"] = None
from liger_kernel.transformers import AutoLigerKernelForCausalLM
if order == "liger first":
    import depthmix
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.liger import apply_liger_kernel

auto_class = AutoLigerKernelForCausalLM if auto == "auto" else AutoModelForCausalLM
model = auto_class.from_pretrained(folder, trust_remote_code=order == "no depthmix").train()
if auto != "auto":
    apply_liger_kernel(model, None)
ids = torch.arange(3, 9)[None]
output = model(ids, labels=ids)
output.loss.backward()
print(type(model).__module__.split(".")[0], output.logits is None)
"""


# with remote code the host library takes its own Auto classes only
@pytest.mark.parametrize(
    ("order", "auto"),
    [
        ("depthmix first", "auto"),
        pytest.param("liger first", "auto", marks=pytest.mark.exhaustive),
        ("no depthmix", "trainer"),
    ],
)
def test_in_any_order(order, auto, saved, fresh_python, tmp_path):
    """Also with the code of the saved model alone."""
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    run = fresh_python.run(SCRIPT, order, saved, auto, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    module = "transformers_modules" if order == "no depthmix" else "depthmix"
    assert run.stdout.split() == [module, "True"]


def test_a_model_type_of_ones_own(build, token_ids):
    class OwnConfig(depthmix.DepthQwen3Config):
        model_type = "own_depth_qwen3_for_liger"

    class OwnForCausalLM(DepthQwen3ForCausalLM):
        config_class = OwnConfig

    model = build(model_class=OwnForCausalLM)
    monkey_patch._apply_liger_kernel_to_instance(model)
    assert model.fused_linear_cross_entropy
    liger_entry._model_types.remove(OwnConfig.model_type)
    del monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[OwnConfig.model_type]


def test_another_entry_is_kept(monkeypatch):
    monkeypatch.setattr(liger_entry, "_model_types", [])
    monkeypatch.setitem(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, "some_type", print)
    liger_entry.enter_into_liger("some_type")
    assert monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN["some_type"] is print


def test_the_call(build, monkeypatch):
    ours = {"rope": "depthmix", "rms_norm": "depthmix", "swiglu": "depthmix"}
    model = build()
    assert apply_liger_kernel(model) == ours | {"loss": "without logits, liger-kernel on a GPU"}
    assert model.fused_linear_cross_entropy and not build().fused_linear_cross_entropy
    wrapped = nn.ModuleDict({"policy": get_peft_model(build(), LoraConfig(target_modules=["q_proj"]))})
    apply_liger_kernel(wrapped)
    assert wrapped["policy"].get_base_model().fused_linear_cross_entropy
    assert apply_liger_kernel(model, fused_linear_cross_entropy=False) == ours | {"loss": "all logits"}
    with pytest.raises(TypeError, match="model is a Qwen3ForCausalLM: there is no model of depthmix"):
        apply_liger_kernel(build(model_class=Qwen3ForCausalLM))
    monkeypatch.setattr("depthmix.modeling.depth_decoder.liger_function", lambda name: None)
    assert apply_liger_kernel(model)["loss"] == "without logits, depthmix"


def test_cross_entropy_of_all_logits(build, token_ids, monkeypatch):
    """Of this model only; torch's function stays."""
    model, ids, calls = build().train(), token_ids(2, 8), []

    def function(logits, targets, ignore_index, reduction):
        calls.append(reduction)
        return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)

    before = F.cross_entropy
    assert apply_liger_kernel(model, cross_entropy=True, fused_linear_cross_entropy=False)["loss"].endswith(
        "liger-kernel"
    )
    assert model.loss_function is liger_causal_lm_loss and F.cross_entropy is before
    monkeypatch.setattr(lean_loss, "liger_function", lambda name: function)
    expected = build()
    for options in ({}, {"num_items_in_batch": 3}, {"num_items_in_batch": torch.tensor(3)}):
        output = model(ids, labels=ids, **options)
        torch.testing.assert_close(output.loss, expected(ids, labels=ids, **options).loss)
        assert output.logits is not None
    assert calls == ["mean", "sum", "sum"]
    apply_liger_kernel(model, fused_linear_cross_entropy=False)
    assert model.loss_function is expected.loss_function
    with pytest.raises(ValueError, match="cross_entropy=True and fused_linear_cross_entropy=True: only one"):
        apply_liger_kernel(model, cross_entropy=True)
    with pytest.raises(ValueError, match="cross_entropy=True: DepthQwen3Model has no loss"):
        apply_liger_kernel(model.model, cross_entropy=True, fused_linear_cross_entropy=False)
    monkeypatch.setattr("depthmix.modeling.depth_decoder.liger_function", lambda name: None)
    with pytest.raises(ImportError, match="cross_entropy=True needs liger-kernel"):
        apply_liger_kernel(model, cross_entropy=True, fused_linear_cross_entropy=False)
