# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Every way of loading gives the saved weights and freshly computed buffers."""

import copy
import importlib
import json

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    pipeline,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

import depthmix
from depthmix.modeling.mixing_modules import MixingModule


def by_class(family, folder):
    return family.head.from_pretrained(folder)


def with_device_map(family, folder):
    return family.head.from_pretrained(folder, device_map={"": "cpu"})


def in_its_own_dtype(family, folder):
    return family.head.from_pretrained(folder, dtype="auto")


def from_empty_weights(family, folder):
    with init_empty_weights():
        model = family.head(family.head.config_class.from_pretrained(folder))
    return load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"}).eval()


def from_state_dict(family, folder):
    model = family.head.from_pretrained(folder)
    return family.head.from_pretrained(None, config=model.config, state_dict=model.state_dict())


ROUTES = [by_class, with_device_map, in_its_own_dtype, from_empty_weights, from_state_dict]
EACH_ROUTE = pytest.mark.parametrize("load", ROUTES, ids=lambda route: route.__name__)


def assert_same_weights(model, expected: dict[str, torch.Tensor], *, besides: dict[str, torch.Tensor] | None = None):
    state = model.state_dict()
    expected = {**expected, **(besides or {})}
    assert state.keys() == expected.keys()
    assert [name for name in state if state[name].dtype is not expected[name].dtype] == []
    assert [name for name in state if not torch.equal(state[name], expected[name])] == []


def assert_fresh_buffers(model):
    """Those outside the checkpoint, rotary tables above all, are as in a model that was just built."""
    fresh = dict(type(model)(model.config).named_buffers())
    buffers = dict(model.named_buffers())
    assert buffers.keys() == fresh.keys() != set()
    assert [name for name in fresh if not torch.equal(buffers[name], fresh[name])] == []


@EACH_ROUTE
def test_vanilla_checkpoint(family, load, build_awake, vanilla_twin, token_ids, logits_of, tmp_path):
    if load is from_empty_weights and family.own_modules:
        pytest.skip("accelerate initialises nothing")
    vanilla = vanilla_twin(build_awake(family, rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    vanilla.save_pretrained(tmp_path)
    model = load(family, tmp_path)
    assert model.config.model_type == family.head.config_class.model_type
    # what the checkpoint does not have is as in a model that was just built
    fresh = (model if family.own_are_linear else family.head(model.config)).state_dict()
    own = {name: tensor for name, tensor in fresh.items() if family.is_own(name)}
    if family.own_are_linear:
        stds = {name: tensor.std().item() for name, tensor in own.items()}
        assert stds == {name: pytest.approx(model.config.initializer_range, rel=0.1) for name in own}
    assert_same_weights(model, vanilla.state_dict(), besides=own)
    assert_fresh_buffers(model)
    # and the mixing is there
    ids = token_ids(2, 12)
    difference = (logits_of(model, ids) - logits_of(vanilla, ids)).abs().max()
    assert difference < 1e-3 if family.fresh_is_vanilla else difference > 0.05


@EACH_ROUTE
def test_saved_checkpoint(family, load, build_awake, token_ids, logits_of, tmp_path):
    model = build_awake(family)
    model.save_pretrained(tmp_path)
    loaded = load(family, tmp_path)
    assert_same_weights(loaded, model.state_dict())
    assert_fresh_buffers(loaded)
    ids = token_ids(2, 12)
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


def test_sharded_checkpoint(family, pattern, build_awake, token_ids, logits_of, tmp_path):
    model = build_awake(family, **pattern)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is family.head
    assert loaded.config.to_dict() | {"_name_or_path": ""} == model.config.to_dict()
    assert_same_weights(loaded, model.state_dict())
    ids = token_ids(2, 12)
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


def mixing_names(model):
    modules = {name: module for name, module in model.named_modules() if isinstance(module, MixingModule)}
    return {f"{name}.{own}" for name, module in modules.items() for own, _ in module.named_parameters()}


def test_bf16_checkpoint(family, build_awake, token_ids, logits_of, tmp_path):
    build_awake(family).save_pretrained(tmp_path / "fp32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16)
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype is not torch.bfloat16}
    assert wide == mixing_names(model)
    assert_fresh_buffers(model)
    model.save_pretrained(tmp_path / "bf16")
    for kwargs in ({}, {"dtype": "auto"}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", **kwargs)
        assert_same_weights(loaded, model.state_dict())
        assert_fresh_buffers(loaded)
        ids = token_ids(2, 12)
        assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


def cast(model, family, folder):
    model.bfloat16()
    return model


def cast_by_its_data_type(model, family, folder):
    return model.to("cpu", torch.float16)


def loaded(model, family, folder):
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def loaded_in_half_precision(model, family, folder):
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)


def saved_again(model, family, folder):
    loaded(model, family, folder / "first").save_pretrained(folder / "second")
    return AutoModelForCausalLM.from_pretrained(folder / "second", dtype="auto")


def copied(model, family, folder):
    return copy.deepcopy(model.bfloat16())


@pytest.mark.parametrize("low", [cast, cast_by_its_data_type, loaded, loaded_in_half_precision, saved_again, copied])
def test_mixing_parameters_are_not_rounded(family, low, build_awake, tmp_path):
    model = build_awake(family)
    names = mixing_names(model)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = low(model, family, tmp_path).state_dict()
    assert {name for name, tensor in state.items() if tensor.dtype is torch.float32} == names
    assert [name for name in names if not torch.equal(state[name], expected[name])] == []


def test_mixing_parameters_of_a_new_low_precision_model(family, tiny, tmp_path):
    """As built, and where the file has none of them, which the host library fills in after it has read the file."""
    config = family.head.config_class(**tiny, **family.defaults)
    expected = family.head(config)
    names = mixing_names(expected)
    expected.save_pretrained(tmp_path)
    built = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    loaded_from_vanilla = None
    if family.fresh_is_vanilla:
        family.vanilla(family.vanilla.config_class(**tiny)).save_pretrained(tmp_path)
        loaded_from_vanilla = family.head.from_pretrained(tmp_path, dtype=torch.bfloat16, **family.defaults)
    for model in filter(None, (built, loaded_from_vanilla)):
        state = model.state_dict()
        assert {name for name, tensor in state.items() if tensor.dtype is torch.float32} == names
        assert [name for name in names if not torch.equal(state[name], expected.state_dict()[name])] == []


def test_cast_keeps_rotary_tables_as_the_vanilla_model_does(family, build_awake, vanilla_twin):
    model = build_awake(family)
    vanilla = vanilla_twin(model).bfloat16()
    model = model.bfloat16()
    for name, buffer in vanilla.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
        assert model.get_buffer(name).dtype is buffer.dtype


def test_other_heads(family, build_awake, token_ids, tmp_path):
    model = build_awake(family)
    model.save_pretrained(tmp_path)
    ids = token_ids(2, 12)
    base = AutoModel.from_pretrained(tmp_path)
    assert_same_weights(base, model.model.state_dict())
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert_same_weights(classifier.model, model.model.state_dict())
    with torch.no_grad():
        states = model.model(ids).last_hidden_state
        assert torch.equal(base(ids).last_hidden_state, states)
        assert torch.equal(classifier(ids).logits, classifier.score(states)[:, -1])
    base.save_pretrained(tmp_path / "base")
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "base").model, model.model.state_dict())


def test_stock_names_keep_their_meaning(family, build_awake, vanilla_twin, token_ids, logits_of, tmp_path):
    model = build_awake(family)
    vanilla = vanilla_twin(model)
    model.save_pretrained(tmp_path / "ours")
    vanilla.save_pretrained(tmp_path / "vanilla")
    ids = token_ids(2, 12)
    for _ in range(2):
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "vanilla")
        assert type(ours) is family.head
        assert type(stock) is family.vanilla
        assert type(AutoConfig.from_pretrained(tmp_path / "vanilla")) is family.vanilla.config_class
        assert torch.equal(logits_of(ours, ids), logits_of(model, ids))
        assert torch.equal(logits_of(stock, ids), logits_of(vanilla, ids))
        # what a second import does
        importlib.reload(depthmix)
    assert "auto_map" not in json.loads((tmp_path / "vanilla" / "config.json").read_text())
    assert list((tmp_path / "vanilla").glob("*.py")) == []


def test_pipelines(family, build_awake, tmp_path):
    model = build_awake(family)
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, model.config.vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    prompts = ["w5 w80 w7 w41", "w9 w12"]
    generator = pipeline("text-generation", model=str(tmp_path), device="cpu")
    assert type(generator.model) is family.head
    generated = generator(prompts, max_new_tokens=6, do_sample=False, batch_size=2, return_full_text=False)
    for prompt, [result] in zip(prompts, generated, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert result["generated_text"].split() == tokenizer.decode(expected, skip_special_tokens=True).split()

    # a conversation, by the template of the tokenizer
    generator.tokenizer.chat_template = (
        "{% for message in messages %}<s> {{ message['content'] }} </s> {% endfor %}"
        "{% if add_generation_prompt %}w4 {% endif %}"
    )
    conversation = [{"role": "user", "content": "w5 w80"}, {"role": "assistant", "content": "w7"}]
    conversation.append({"role": "user", "content": "w41"})
    [result] = generator(conversation, max_new_tokens=6, do_sample=False)
    *before, answer = result["generated_text"]
    ids = tokenizer("<s> w5 w80 </s> <s> w7 </s> <s> w41 </s> w4", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert before == conversation and answer["role"] == "assistant"
    assert answer["content"].split() == tokenizer.decode(expected, skip_special_tokens=True).split()

    # decoding that is constrained to some tokens: at each step the best of these
    allowed = [*range(10, 20)]
    constrained = model.generate(
        ids, max_new_tokens=4, do_sample=False, prefix_allowed_tokens_fn=lambda row, so_far: allowed
    )
    with torch.no_grad():
        logits = model(constrained[:, :-1]).logits[0, ids.shape[1] - 1 :, allowed]
    assert constrained[0, ids.shape[1] :].tolist() == [allowed[i] for i in logits.argmax(-1)]

    classifier = family.classifier(family.head.config_class.from_dict(model.config.to_dict() | {"num_labels": 3}))
    scores = pipeline("text-classification", model=classifier.eval(), tokenizer=tokenizer, device="cpu", top_k=None)
    assert [len(found) for found in scores(prompts)] == [3, 3]
    # where pipelines and model cards look
    assert family.classifier.__name__ in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
    assert family.head.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
