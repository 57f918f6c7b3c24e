# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Adapters of PEFT on top of the models."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast


peft = pytest.importorskip("peft")

# PEFT asks for it by its old name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TARGETS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "key_and_value": ["k_proj", "v_proj"],
    "all_linear": "all-linear",
}


def lora(targets, **kwargs):
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **kwargs)


def train_one_step(model, ids):
    """One large step, so that the adapter shows; returns the loss."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    assert [name for name, p in trainable.items() if p.grad is None] == []
    torch.optim.SGD(trainable.values(), lr=0.2).step()
    model.eval()
    return loss


@pytest.mark.long
@pytest.mark.parametrize(
    "targets",
    # among all linear layers are the others
    [name if name == "all_linear" else pytest.param(name, marks=pytest.mark.sampled(2)) for name in TARGETS],
)
def test_lora(family, targets, build_awake, token_ids, logits_of, tmp_path):
    build_awake(family, **family.densest).save_pretrained(tmp_path / "base")
    ids = token_ids(2, 12)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, lora(TARGETS[targets]))
    names = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name, p in model.named_parameters() if p.requires_grad}
    own = {*family.own_modules} - {"depth_gate"} if family.own_are_linear else set()
    others = {"gate_proj", "up_proj", "down_proj", *own}
    assert names == (set(TARGETS["attention"]) | others if targets == "all_linear" else set(TARGETS[targets]))

    for _ in range(2):
        train_one_step(model, ids)
    logits = logits_of(model, ids)
    assert (logits - logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), ids)).abs().max() > 0.05

    model.save_pretrained(tmp_path / "adapter")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(logits_of(peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter"), ids), logits)
    automatic = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert type(automatic.get_base_model()) is family.head
    assert torch.equal(logits_of(automatic, ids), logits)
    # the other way round, through transformers
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(logits_of(plain, ids), logits)

    merged = model.merge_and_unload()
    assert type(merged) is family.head
    assert (logits_of(merged, ids) - logits).abs().max() <= 1e-5 * logits.abs().max()
    merged.save_pretrained(tmp_path / "merged")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits_of(reloaded, ids), logits_of(merged, ids))


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_lora_with_checkpointing(
    family, use_reentrant, build_awake, token_ids, assert_same_gradients, enable_checkpointing
):
    ids = token_ids(2, 12)
    found = []
    for checkpointing in (False, True):
        model = build_awake(family, **family.densest).double()
        if checkpointing:
            enable_checkpointing(model, use_reentrant=use_reentrant)
            model.enable_input_require_grads()
        torch.manual_seed(0)
        model = peft.get_peft_model(model, lora("all-linear", init_lora_weights=False)).double().train()
        model(input_ids=ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(gradient.any() for gradient in found[0].values())
    assert_same_gradients(found[1], found[0], tolerance=1e-10)


def test_lora_without_targets_is_refused(family, build_awake):
    """PEFT has its defaults for the model types it knows; ours must not fall back to some of them in silence."""
    with pytest.raises(ValueError, match="target_modules"):
        peft.get_peft_model(build_awake(family), peft.LoraConfig())


def test_naming_nothing_is_refused(family, build_awake):
    with pytest.raises(ValueError, match="depth_mixer"):
        peft.get_peft_model(build_awake(family), lora(["depth_mixer"]))


def test_new_tokens_and_modules_to_save(family, build_awake, token_ids, logits_of, tmp_path):
    build_awake(family).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(100)
    model = peft.get_peft_model(
        model, lora(["v_proj"], modules_to_save=["embed_tokens", "lm_head", "k_norm", *family.own_modules])
    )
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    fresh.resize_token_embeddings(100)
    # all that the family adds is trained
    own = [name for name, parameter in model.named_parameters() if parameter.requires_grad and family.is_own(name)]
    assert len(own) == sum(family.is_own(name) for name, _ in fresh.named_parameters())
    ids = token_ids(2, 12)
    ids[:, 3] = 99
    for _ in range(2):
        train_one_step(model, ids)
    logits = logits_of(model, ids)
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits_of(peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter"), ids), logits)
    assert (logits_of(model.merge_and_unload(), ids) - logits).abs().max() <= 1e-5 * logits.abs().max()


# PEFT looks for it under its old name; from transformers 5.24 on, it therefore puts the virtual tokens in again at
# every step of a cached generation, with stock models too
PEFT_FINDS_THE_CACHE = "past_key_values" in BaseModelOutputWithPast.__dataclass_fields__

PROMPT_METHODS = {
    "prompt_tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    "p_tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=5, encoder_hidden_size=16, task_type="CAUSAL_LM"),
    "prefix_tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
}


# what they put in front of the prompt is embeddings or a cache, both as the user may give them to every family
@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", PROMPT_METHODS)
def test_prompt_methods(family, method, build_awake, token_ids, logits_of, tmp_path):
    build_awake(family, **family.densest).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = token_ids(2, 12)
    plain = logits_of(base, ids)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, PROMPT_METHODS[method]())
    train_one_step(model, ids)
    logits = logits_of(model, ids)
    assert (logits[:, -12:] - plain).abs().max() > 1e-3

    # the virtual tokens reach every step of the generation
    expected = ids
    for _ in range(4):
        expected = torch.cat([expected, logits_of(model, expected)[:, -1:].argmax(-1)], dim=1)
    for use_cache in (False, True) if PEFT_FINDS_THE_CACHE else (False,):
        tokens = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, use_cache=use_cache)
        assert torch.equal(tokens, expected)

    model.save_pretrained(tmp_path / "adapter")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(logits_of(peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter"), ids), logits)
