# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`depthmix inspect` reads headers and configurations, for which nobody needs torch."""

import dataclasses
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from depthmix.__main__ import USUAL_ACTIVATIONS
from depthmix.configuration.depth_backbones import BACKBONES
from depthmix.conversion import inspect_checkpoint, stock_tensors
from depthmix.late_import import import_late, is_loaded


STOCK = [name for name, backbone in BACKBONES.items() if name != "dense" and backbone.softmax_only]
SIZES = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EVERYTHING = {
    **{"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    **EXPERTS,
    "mlp_only_layers": [1],
}
CASES = [
    *[(model_type, EVERYTHING) for model_type in STOCK],
    *[pytest.param(model_type, {}, marks=pytest.mark.exhaustive) for model_type in STOCK],
    ("qwen3_moe", EXPERTS | {"decoder_sparse_step": 2}),
]
# the host library of these needs torch for any configuration
needs_late_torch = pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < (5, 24), reason="configurations need torch there"
)
SCRIPT = """
import sys
sys.argv = ["depthmix", *sys.argv[1:]]
import depthmix
assert not {"torch", "transformers"} & sys.modules.keys(), "import depthmix"
from depthmix.late_import import is_loaded
from depthmix.__main__ import main
main()
assert not any(is_loaded(name) for name in ("torch", "transformers.modeling_utils", "transformers.activations"))
assert not any(name.startswith("depthmix.modeling") for name in sys.modules)
"""


@pytest.fixture
def stock(tmp_path):
    """`stock(model_type, **fields)` gives the folder of a small stock model in bf16."""

    def stock(model_type, **fields):
        declared = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
        fields = {name: value for name, value in fields.items() if name in declared}
        config = AutoConfig.for_model(model_type, **SIZES, **fields, dtype="bfloat16")
        with torch.device("cpu"):
            AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "stock")
        return tmp_path / "stock"

    return stock


@needs_late_torch
@pytest.mark.parametrize("model_type", ["qwen3", pytest.param("olmo3", marks=pytest.mark.exhaustive), "qwen3_moe"])
def test_torch_is_not_loaded(model_type, stock):
    folder = stock(model_type, **EXPERTS)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, "inspect", folder], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{inspect_checkpoint(folder)}\n"


@pytest.mark.parametrize(("model_type", "fields"), CASES)
def test_the_early_answer_is_that_of_the_models(model_type, fields, stock, monkeypatch):
    folder = stock(model_type, **fields)
    answers = []

    def record(*arguments):
        answers.append(original(*arguments))
        return answers[-1]

    original = stock_tensors.has_stock_tensors
    monkeypatch.setattr("depthmix.conversion.converter.has_stock_tensors", record)
    early = str(inspect_checkpoint(folder))
    assert early.count(": yes, to ") == len(answers) > 0 and all(answers)
    monkeypatch.setattr("depthmix.conversion.converter.has_stock_tensors", lambda *arguments: False)
    assert str(inspect_checkpoint(folder)) == early


def test_activations_that_are_known_without_loading():
    assert set(USUAL_ACTIVATIONS) <= set(ACT2FN)


def test_late_modules_are_the_modules(tmp_path, monkeypatch):
    (tmp_path / "slow_table.py").write_text("TABLE = {'a': 1, 'b': 2}\n")
    (tmp_path / "slow_package").mkdir()
    (tmp_path / "slow_package" / "__init__.py").write_text("number = 5\n")
    (tmp_path / "slow_package" / "inner.py").write_text("from . import number\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        import_late("slow_table", TABLE=("a",))
        from slow_table import TABLE

        assert "a" in TABLE and not is_loaded("slow_table")
        assert "c" not in TABLE and is_loaded("slow_table")
        assert dict(TABLE) == sys.modules["slow_table"].TABLE == {"a": 1, "b": 2}

        import_late("slow_package")
        import slow_package

        assert slow_package.__spec__.name == "slow_package" and slow_package.__file__.endswith("__init__.py")
        assert not is_loaded("slow_package")
        import slow_package.inner

        assert slow_package.inner.number == 5 and sys.modules["slow_package"] is slow_package
        import_late("slow_package")
        assert is_loaded("slow_package")
    finally:
        for name in ("slow_table", "slow_package", "slow_package.inner"):
            sys.modules.pop(name, None)
