# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Saved models where depthmix is not installed, and what is saved there where it is."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)


REPOSITORY = "some-org/depth-qwen3-1.0"


def causal_results(model, ids) -> dict:
    greedy = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8}
    with torch.no_grad():
        return {
            "logits": model(ids).logits,
            "cached": model.generate(ids, use_cache=True, **greedy),
            "uncached": model.generate(ids, use_cache=False, **greedy),
        }


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(results[name], tensor), name
    assert torch.equal(results["cached"], results["uncached"])


def read(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def load_and_resave(causal, classifier, ids, resaved):
    refusals = []
    for flag in ({}, {"trust_remote_code": False}):
        for auto_class in (AutoConfig, AutoModelForCausalLM):
            with pytest.raises(ValueError) as refusal:
                auto_class.from_pretrained(causal, **flag)
            refusals.append(str(refusal.value))
    config = AutoConfig.from_pretrained(causal, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(causal, trust_remote_code=True)
    base = AutoModel.from_pretrained(causal, trust_remote_code=True)
    classifier = AutoModelForSequenceClassification.from_pretrained(classifier, trust_remote_code=True)
    names = [type(loaded).__name__ for loaded in (config, model, base, classifier)]
    with torch.no_grad():
        hidden, scores = base(ids).last_hidden_state, classifier(ids).logits

    model.save_pretrained(resaved[0])
    AutoModelForCausalLM.from_pretrained(resaved[0], trust_remote_code=True).save_pretrained(resaved[1])
    # the stock names still mean the stock classes
    stock = AutoModelForCausalLM.from_config(Qwen3Config(num_hidden_layers=1, hidden_size=32, vocab_size=97))
    assert type(stock) is Qwen3ForCausalLM
    return {
        "refusals": refusals,
        "names": names,
        "hidden": hidden,
        "scores": scores,
        "causal": causal_results(model, ids),
    }


@pytest.mark.sampled(3)
@pytest.mark.sampled_peer(1)
def test_load_without_package(clean_python, family, build, token_ids, assert_awake, assert_complete, tmp_path):
    model = build()
    classifier = build(model_class=family.classifier, num_labels=3)
    assert_awake(model)
    saved, resaved = tmp_path / "saved", [tmp_path / "resaved", tmp_path / "resaved-again"]
    model.save_pretrained(saved)
    classifier.save_pretrained(tmp_path / "classifier")
    ids = token_ids(2, 9)

    results = clean_python(load_and_resave, str(saved), str(tmp_path / "classifier"), ids, [str(f) for f in resaved])

    expected = causal_results(model, ids)
    assert results["names"] == [type(each).__name__ for each in (model.config, model, model.model, classifier)]
    assert_same(results["causal"], expected)
    with torch.no_grad():
        assert torch.equal(results["hidden"], model.model(ids).last_hidden_state)
        assert torch.equal(results["scores"], classifier(ids).logits)
    for refusal in results["refusals"]:
        assert "trust_remote_code=True" in refusal

    assert read(resaved[0]) == read(resaved[1])
    for name, content in read(saved).items():
        if name.endswith(".py"):
            assert (resaved[0] / name).read_bytes() == content
    for folder in resaved:
        assert_complete(folder)
        # where the package is, its classes come first, and what they save is complete again
        for flag in ({}, {"trust_remote_code": True}, {"trust_remote_code": False}):
            loaded = AutoModelForCausalLM.from_pretrained(folder, **flag)
            assert type(loaded) is family.head
            with torch.no_grad():
                assert torch.equal(loaded(ids).logits, expected["logits"])
        assert_same(causal_results(loaded, ids), expected)
        loaded.save_pretrained(tmp_path / "from-package")
        assert_complete(tmp_path / "from-package")


def load_from_folders(folders, ids, resaved):
    results = []
    for folder in folders:
        os.chdir(folder)
        for name in (folder, "."):
            model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
            results.append(causal_results(model, ids))
    model = AutoModelForCausalLM.from_pretrained(REPOSITORY, trust_remote_code=True)
    results.append(causal_results(model, ids))
    AutoConfig.from_pretrained(REPOSITORY, trust_remote_code=True)
    AutoModel.from_pretrained(REPOSITORY, trust_remote_code=True)
    model.save_pretrained(resaved)
    return results


# how a folder becomes a module's name does not depend on what the module holds
@pytest.mark.sampled(1)
@pytest.mark.sampled_peer(0)
@pytest.mark.two_families
def test_unusual_folders(clean_python, build, token_ids, assert_awake, assert_complete, tmp_path):
    model = build()
    assert_awake(model)
    folders = [tmp_path / name for name in ("v1.0", "depth-qwen3-0.6b.final", "1-step", "class", "with space")]
    for folder in folders:
        model.save_pretrained(folder)
    write_hub_cache(clean_python.cache, folders[0])
    ids = token_ids(2, 9)

    arguments = [str(folder) for folder in folders], ids, str(tmp_path / "resaved")
    results = clean_python(load_from_folders, *arguments)

    for result in results:
        assert_same(result, causal_results(model, ids))
    assert len(results) == 11
    # from the Hub's cache, the saved `auto_map` must not point back at the repository
    assert_complete(tmp_path / "resaved")
    AutoModelForCausalLM.from_pretrained(REPOSITORY, cache_dir=clean_python.cache).save_pretrained(tmp_path / "again")
    assert_complete(tmp_path / "again")


def save_configurations_alone(folder, saved):
    """As tools do that write the tensors themselves."""
    for number, name in enumerate((folder, REPOSITORY)):
        config = AutoConfig.from_pretrained(name, trust_remote_code=True)
        config.save_pretrained(saved[number])
        AutoConfig.from_pretrained(saved[number], trust_remote_code=True).save_pretrained(f"{saved[number]}-again")


@pytest.mark.sampled(1)
@pytest.mark.sampled_peer(0)
def test_a_configuration_saved_alone_brings_all_code(
    clean_python, build, token_ids, assert_awake, assert_complete, tmp_path
):
    model = build()
    assert_awake(model)
    model.save_pretrained(tmp_path / "saved")
    write_hub_cache(clean_python.cache, tmp_path / "saved")
    saved = [tmp_path / "local", tmp_path / "hub"]
    clean_python(save_configurations_alone, str(tmp_path / "saved"), [str(folder) for folder in saved])
    code = {name: content for name, content in read(tmp_path / "saved").items() if name.endswith(".py")}
    for folder in saved:
        for each in (folder, folder.with_name(f"{folder.name}-again")):
            assert_complete(each, weights=False)
            assert {name: content for name, content in read(each).items() if name.endswith(".py")} == code
    # what such a tool makes is a model
    shutil.copy(tmp_path / "saved" / "model.safetensors", tmp_path / "local")
    ids = token_ids(2, 9)
    results = clean_python(load_one, str(tmp_path / "local"), ids)
    with torch.no_grad():
        assert torch.equal(results, model(ids).logits)


def load_one(folder, ids):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)(ids).logits


def write_by_value(folders, file):
    configurations = [AutoConfig.from_pretrained(folder, trust_remote_code=True) for folder in folders]
    cloudpickle.register_pickle_by_value(sys.modules["transformers_modules"])
    # as after a model has been built
    configurations[0].note_model()
    Path(file).write_bytes(cloudpickle.dumps(configurations))


def read_by_value(file):
    configurations = pickle.loads(Path(file).read_bytes())
    # the globals of its methods came along
    for each in configurations:
        each.depth_impl = "reference"
        each.validate_depth_mixing()
    return [each.to_json_string(use_diff=False) for each in configurations]


@pytest.mark.once
@pytest.mark.sampled_peer(1)
def test_configurations_are_handed_on_by_value(clean_python, family, tiny, tmp_path):
    """As servers hand a configuration of remote code to processes that have not loaded that code."""
    configurations = [
        family.head.config_class(**tiny, **fields, depth_impl="reference")
        for fields in ({}, family.densest | family.defaults)
    ]
    folders = [tmp_path / "default", tmp_path / "densest"]
    for configuration, folder in zip(configurations, folders, strict=True):
        configuration.save_pretrained(folder)
    clean_python(write_by_value, [str(folder) for folder in folders], str(tmp_path / "pickled"))
    read = clean_python(read_by_value, str(tmp_path / "pickled"))
    for text, folder in zip(read, folders, strict=True):
        given, saved = json.loads(text), json.loads((folder / "config.json").read_text())
        # which the process that reads may have another of
        del saved["transformers_version"]
        assert {name: given[name] for name in saved if name in given} == saved


def write_hub_cache(cache, folder):
    """The layout that huggingface_hub leaves after a download: links into a folder of blobs."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    for created in (snapshot, blobs, repository / "refs"):
        created.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for i, file in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(file, blobs / f"{i:040}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:040}")


def smooth_labels(folder, ids, output):
    """The Trainer's loss with label smoothing, and the same by hand."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    trainer = Trainer(model, TrainingArguments(output, label_smoothing_factor=0.1, report_to="none", use_cpu=True))
    with torch.no_grad():
        loss = trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    return {"loss": loss, "expected": expected}


@pytest.mark.sampled_peer(1)
def test_label_smoothing_without_package(clean_python, family, build, token_ids, tmp_path):
    build().save_pretrained(tmp_path / "saved")
    results = clean_python(smooth_labels, str(tmp_path / "saved"), token_ids(2, 9), str(tmp_path / "run"))
    torch.testing.assert_close(results["loss"], results["expected"], atol=1e-4, rtol=1e-4)
