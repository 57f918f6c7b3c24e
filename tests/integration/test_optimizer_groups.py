# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Which parameters decay, in the Trainer and in groups for other loops, and which have a rate of their own."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from depthmix import MHCConfig, MHCForCausalLM, optimizer_groups
from depthmix.callbacks import gates_of
from depthmix.modeling.mixing_modules import MixingModule


# what a family adds and what of it decays, by the ends of the names; docs/train.md lists the same
DECAYED = {
    "mhc": (".projection",),
    "moda_olmo2": ("depth_kv_proj.weight",),
}
NOT_DECAYED = {
    "depth_qwen3": ("depth_gate.weight",),
    "moda_olmo2": ("depth_gate.weight",),
    "attnres": ("_mixer.pseudo_query", "_mixer.norm.weight", "_mixer.recency_bias"),
    "denseformer": ("depth_average.weight",),
    "mhc": ("norm_weight", "alpha_pre", "alpha_post", "alpha_residual", "_logits", "stream_readout.logits"),
}


@pytest.fixture
def trainer_of(tmp_path):
    def trainer_of(model, **kwargs):
        arguments = TrainingArguments(
            str(tmp_path), learning_rate=1e-3, weight_decay=0.1, report_to="none", use_cpu=True
        )
        return Trainer(model=model, args=arguments, **kwargs)

    return trainer_of


def decayed_by_groups(model):
    decayed = {
        id(parameter)
        for group in optimizer_groups(model, 1e-3, weight_decay=0.1)
        if group["weight_decay"]
        for parameter in group["params"]
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in decayed}


def test_what_decays(pattern, family, tiny, trainer_of):
    biases = {} if family.head.config_class.model_type == "moda_olmo2" else {"attention_bias": True}
    model = family.head(family.head.config_class(**tiny | biases | family.defaults | pattern))
    name = family.head.config_class.model_type
    for decayed in (set(trainer_of(model).get_decay_parameter_names(model)), decayed_by_groups(model)):
        for each, parameter in model.named_parameters():
            if family.is_own(each):
                assert each.endswith(DECAYED.get(name, ()) + NOT_DECAYED.get(name, ())), each
                assert (each in decayed) == each.endswith(DECAYED.get(name, ())), each
            else:
                # the matrices of the stock model, and no gain or bias
                assert (each in decayed) == (parameter.ndim > 1), each


def test_what_decays_beside_an_adapter(family, tiny, trainer_of):
    peft = pytest.importorskip("peft")
    if not family.own_modules or family.own_are_linear:
        pytest.skip("this family has no mixing parameters")
    model = family.head(family.head.config_class(**tiny | family.defaults))
    lora = peft.LoraConfig(target_modules=["v_proj"], modules_to_save=list(family.own_modules))
    model = peft.get_peft_model(model, lora)
    name = family.head.config_class.model_type
    trained = {each for each, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {each for each in trained if "lora_" in each or each.endswith(DECAYED.get(name, ()) or ("no",))}
    assert trained & set(trainer_of(model).get_decay_parameter_names(model)) == expected
    assert decayed_by_groups(model) == expected
    rates = {id(p): group["lr"] for group in optimizer_groups(model, 1.0, 2.0) for p in group["params"]}
    found = {each: rates[id(p)] for each, p in model.named_parameters() if p.requires_grad}
    assert found == {each: 1.0 if "lora_" in each else 2.0 for each in trained}


class WithGroups(Trainer):
    def create_optimizer(self, *args, **kwargs):
        self.optimizer = torch.optim.AdamW(optimizer_groups(self.model, 1e-3, 1e-1, weight_decay=0.1))
        return self.optimizer


@pytest.mark.parametrize("route", ["optimizers", "subclass"])
def test_in_the_trainer(route, tiny, token_ids, tmp_path):
    model = MHCForCausalLM(MHCConfig(**tiny, mhc_sinkhorn_iters=2))
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids(4, 8)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, warmup_steps=2, report_to="none", use_cpu=True, save_strategy="no"
    )
    kwargs = {"model": model, "args": arguments, "train_dataset": rows}
    if route == "optimizers":
        optimizer = torch.optim.AdamW(optimizer_groups(model, 1e-3, 1e-1, weight_decay=0.1))
        trainer = Trainer(**kwargs, optimizers=(optimizer, None))
    else:
        trainer = WithGroups(**kwargs)
    logits = model.model.layers[1].mlp_connection.post_logits
    before = logits.detach().clone()
    trainer.train()
    groups = {(group["initial_lr"], group["weight_decay"]) for group in trainer.optimizer.param_groups}
    assert groups == {(1e-3, 0.1), (1e-3, 0.0), (1e-1, 0.1), (1e-1, 0.0)}
    # a step of warming up has half of the rate, and the second all of it
    assert 0.04 < (logits - before).abs().max() < 0.2


def test_groups_hold_every_trained_parameter_once(family, tiny):
    model = family.head(family.head.config_class(**tiny, tie_word_embeddings=True))
    model.model.embed_tokens.weight.requires_grad_(False)
    groups = optimizer_groups(model, 1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    found = [id(parameter) for group in groups for parameter in group["params"]]
    expected = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(found) == sorted(expected)
    assert all(group["params"] and group["betas"] == (0.9, 0.95) for group in groups)
    mixing = any(isinstance(module, MixingModule) for module in model.modules())
    assert any(group["lr"] == 7.0 for group in optimizer_groups(model, 1e-3, 7.0)) == mixing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0: must be a finite number"),
        ({"lr": 1.0, "mixing_lr": float("nan")}, "mixing_lr=nan: must be"),
        ({"lr": 1.0, "weight_decay": float("inf")}, "weight_decay=inf: must be"),
    ],
)
def test_rates_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        optimizer_groups(torch.nn.Linear(2, 2), **arguments)


def test_decay_rates_do_not_decay():
    """Of Kimi Linear: logarithms in the shape of a matrix. The Trainer's own rule is that of the host library."""
    module = torch.nn.Module()
    module.A_log, module.weight = (torch.nn.Parameter(torch.ones(1, 1, 2, 1)) for _ in range(2))
    groups = optimizer_groups(torch.nn.ModuleDict({"gate": module}), 1.0, weight_decay=0.1)
    decayed = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert decayed == {id(module.A_log): 0.0, id(module.weight): 0.1}


def test_nothing_to_train():
    with pytest.raises(ValueError, match="no parameters that require a gradient"):
        optimizer_groups(torch.nn.Linear(2, 2).requires_grad_(False), 1.0)


@pytest.mark.once
@pytest.mark.parametrize("first", [pytest.param("depthmix", marks=pytest.mark.exhaustive), "transformers.trainer"])
def test_order_of_imports(first, fresh_python):
    code = (
        f"import sys, {first}\n"
        "assert ('transformers.trainer' in sys.modules) == (sys.argv[1] == 'transformers.trainer')\n"
        "import depthmix; depthmix.auto.register()\n"
        "from transformers import Trainer; import transformers.trainer\n"
        "function = Trainer.get_decay_parameter_names\n"
        "assert function.knows_mixing_parameters and not hasattr(function.__wrapped__, '__wrapped__')\n"
    )
    run = fresh_python.run(code, first)
    assert run.returncode == 0, run.stderr


def test_modules_of_a_saved_models_own_code(build):
    """They are of classes of another module, which know no class of this package."""
    model = build(depth_gate=True)
    own = type("MixingModule", (torch.nn.Module,), {"decayed_parameters": (), "is_gate": True})
    for layer in model.model.layers[1:]:
        gate = own()
        gate.weight = layer.self_attn.depth_gate.weight
        layer.self_attn.depth_gate = gate
    groups = optimizer_groups(model, 1e-5, mixing_lr=1e-2, weight_decay=0.1)
    assert [len(group["params"]) for group in groups if group["lr"] == 1e-2 and group["weight_decay"] == 0] == [3]
    assert len([*gates_of(model)]) == 3
