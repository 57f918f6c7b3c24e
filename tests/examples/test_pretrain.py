# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`examples/pretrain.py` in this process: what is packed, what documents see, precision, and going on."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from depthmix.families import FAMILIES, METHODS


@pytest.fixture(scope="module")
def pretrain(example):
    return example("pretrain")


@pytest.fixture(scope="module")
def packing(example):
    return example("packed_training")


@pytest.fixture
def as_tokenizer():
    """A tokenizer whose texts are lists of ids already, and whose end-of-text token is 0."""

    class AsTokenizer:
        eos_token_id = 0

        def __call__(self, texts, **options):
            return {"input_ids": texts}

    return AsTokenizer()


@pytest.mark.parametrize("length", [2, 3, 7, 64])
def test_every_token_is_predicted_once(length, packing, as_tokenizer):
    """Rows are full, and a step from a token to the next of its document is in them once, and no other step."""
    random.seed(length)
    texts = [[1000 * i + j for j in range(1, random.randrange(2, 30))] for i in range(1, 40)]
    rows = packing.pack_documents(texts, as_tokenizer, length)
    assert rows and all(sum(map(len, row)) == length for row in rows)
    steps = [pair for row in rows for part in row for pair in zip(part, part[1:], strict=False)]
    documents = [[0, *text, 0] for text in texts]
    expected = [pair for document in documents for pair in zip(document, document[1:], strict=False)]
    assert steps == expected[: len(steps)]
    # what does not fill a row is left out
    assert len(expected) - len(steps) < length


def test_rows_of_no_length(packing, as_tokenizer):
    with pytest.raises(ValueError, match="length=1: must be two tokens or more"):
        packing.pack_documents([[1, 2]], as_tokenizer, 1)


@pytest.fixture
def awake(request):
    """A small model of a method whose mixing matters, as the Trainer leaves it: without a cache."""
    from family_models import AWAKE_FIELDS, new_model, wake

    family = FAMILIES[
        {"depth_attention": "depth_qwen3", "moda": "moda_olmo2", "value_residual": "value_residual_qwen3"}.get(
            request.param, request.param
        )
    ]
    model = wake(new_model(family, **AWAKE_FIELDS[family.method]))
    model.config.use_cache = False
    return model


@pytest.mark.parametrize("one_row", [False, True], ids=["rows", "one row"])
@pytest.mark.parametrize("awake", METHODS, indirect=True)
def test_documents_do_not_see_each_other(awake, one_row, packing, as_tokenizer, token_ids):
    """The loss of a batch is that of its documents by themselves, weighted by what is predicted in each."""
    texts = [token_ids(1, length, seed=length)[0].tolist() for length in (5, 11, 2, 17, 9)]
    rows = packing.pack_documents(texts, as_tokenizer, 13)
    batch = packing.PackedDocuments(one_row)(rows)
    assert batch["input_ids"].shape == ((1, 13 * len(rows)) if one_row else (len(rows), 13))
    assert batch.keys() == {"input_ids", "labels", "position_ids"}
    parts = [torch.tensor([part]) for row in rows for part in row if len(part) > 1]
    with torch.no_grad():
        losses = [awake(part, labels=part).loss.item() * (part.shape[1] - 1) for part in parts]
        expected = sum(losses) / sum(part.shape[1] - 1 for part in parts)
        assert awake(**batch).loss.item() == pytest.approx(expected, rel=1e-5)
        # with what positions say taken away it is another
        leaking = awake(input_ids=batch["input_ids"], labels=batch["labels"]).loss.item()
    assert abs(leaking - expected) > 1e-2


def test_flash_attention_gets_one_row(packing):
    """It tells documents apart by positions in a batch of one only, as `PackedDocuments` says."""
    from transformers.modeling_flash_attention_utils import _is_packed_sequence

    rows = [[[0, 5, 6], [0, 7]], [[0, 8, 9, 3], [0]]]
    joined, separate = (packing.PackedDocuments(one_row)(rows)["position_ids"] for one_row in (True, False))
    assert _is_packed_sequence(joined, joined.shape[0])
    assert not _is_packed_sequence(separate, separate.shape[0])


def test_going_on_is_exact(pretrain, tmp_path):
    """Also in bf16: the weights are in fp32, and the arithmetic is not."""
    options = ["--precision", "bf16", "--save-every", "5", "--activation-checkpointing"]
    straight = pretrain.main(["--output", str(tmp_path / "straight"), *options])
    shutil.copytree(tmp_path / "straight" / "checkpoint-5", tmp_path / "resumed" / "checkpoint-5")
    resumed = pretrain.main(["--output", str(tmp_path / "resumed"), *options, "--resume"])
    weights, others = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("straight", "resumed"))
    assert all(tensor.dtype is torch.float32 for tensor in weights.values())
    assert weights.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    losses, again = (
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (straight, resumed)
    )
    assert losses == again and len(losses) == 10 and losses[-1] < losses[0] - 0.3
    # what computes in bf16 says so
    seen = []
    straight.model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert pretrain.held_out_loss(straight, [[[0, 5, 6, 7]]]) > 0
    assert seen == [torch.bfloat16]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "model")
    # the embedding of the token that documents begin with learns too
    assert loaded.model.embed_tokens.padding_idx is None


def test_documents_of_a_file_and_fields(pretrain, tmp_path):
    """JSON lines, another method with a field of its own, accumulated batches, a rate of the mixing's own."""
    lines = [json.dumps({"text": f"def function_{i}(a):\n    return a * {i}\n" * 4}) for i in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    options = ["--output", str(tmp_path / "out"), "--data", str(tmp_path / "text.jsonl"), "--model-type", "attnres"]
    options += ["--field", "attnres_variant=full", "--accumulate", "2", "--batch-size", "2", "--steps", "2"]
    trainer = pretrain.main([*options, "--learning-rate", "1e-3", "--mixing-rate", "1e-2"])
    assert trainer.model.config.attnres_variant == "full"
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {1e-3, 1e-2}
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], "--resume: .* has no checkpoint"),
        (["--field", "depth_stride"], "--field depth_stride: must be NAME=VALUE"),
        (["--steps", "0"], "--steps 0: must be one or more"),
        (["--length", "4000000"], "--data None: must have 4000000 tokens"),
    ],
)
def test_options_that_cannot_be(options, message, pretrain, tmp_path):
    with pytest.raises(SystemExit, match=message):
        pretrain.main(["--output", str(tmp_path / "out"), *options])
    assert not (tmp_path / "out" / "model").exists()


def test_checkpoints_are_not_overwritten(pretrain, tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(SystemExit, match="has a checkpoint; go on with --resume"):
        pretrain.main(["--output", str(tmp_path)])


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2: must be JSON"), ('{"words": 1}', "line 2: .*'text'"), ('{"text": 1}', "line 2: .*'text'")],
)
def test_lines_that_are_no_documents(line, message, packing, tmp_path):
    (tmp_path / "text.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=message):
        packing.read_texts(tmp_path / "text.jsonl")


def test_split_models_have_no_checkpoints(pretrain, tmp_path, capsys):
    with pytest.raises(SystemExit):
        pretrain.main(["--output", str(tmp_path), "--tensor-parallel", "2", "--save-every", "5"])
    assert "--save-every: transformers saves no optimizer" in capsys.readouterr().err
