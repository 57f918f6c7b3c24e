# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Packages that train, quantise and evaluate. `make test-extras` and `make test-calibration` install them; elsewhere
these tests are left out.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from family_models import TINY
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from depthmix.families import FAMILIES


# lets tests import what lies in this folder
sys.path.append(str(Path(__file__).parent))

MODULES = ("lm_eval", "trl", "torchao", "optimum.quanto", "bitsandbytes", "onnxscript", "onnxruntime", "auto_round")
has_all = all(find_spec(name.partition(".")[0]) for name in MODULES)
collect_ignore_glob = [] if has_all else ["test_*.py"]
# it takes an older transformers, in an environment of its own
OWN = "test_llm_compressor.py"
collect_ignore = [] if find_spec("llmcompressor") else [OWN]
if collect_ignore_glob and not collect_ignore:
    collect_ignore_glob = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != OWN]

TASK = """\
task: local_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""

# one of each method, and MoDA also on the backbone of the paper
PAIRS = ("depth_qwen3", "attnres", "denseformer", "mhc", "moda_olmo2", "moda_qwen3", "value_residual_qwen3")


def pytest_generate_tests(metafunc):
    if "pair" in metafunc.fixturenames:
        metafunc.parametrize("pair", [FAMILIES[name] for name in PAIRS], ids=PAIRS)


@pytest.fixture
def tokenizer():
    """One word for each token of the tiny models, with a chat template."""
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, TINY["vocab_size"]))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=256
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    return tokenizer


@pytest.fixture
def words():
    """`words(length, seed)` is a random text of so many tokens."""

    def words(length, seed):
        generator = torch.Generator().manual_seed(seed)
        return " ".join(f"w{i}" for i in torch.randint(3, TINY["vocab_size"], (length,), generator=generator).tolist())

    return words


@pytest.fixture
def choice_task(tmp_path, monkeypatch):
    """`choice_task(rows)` is a folder with the task `local_choices` of lm-eval, of questions, choices and answers."""

    def choice_task(rows):
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (tmp_path / "tasks").mkdir()
        (tmp_path / "tasks" / "local_choices.yaml").write_text(TASK.format(file=tmp_path / "rows.jsonl"))
        return tmp_path / "tasks"

    return choice_task
