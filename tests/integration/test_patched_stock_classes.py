# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Other packages replace classes, forwards and functions of the stock decoders in a running process. Whenever they do so,
our models compute the same, bit for bit, and their norms still lend their weights to fused operations.

Stock on purpose, and not checked here: mixtures of experts, the sub-layers of Kimi Linear, the loss of classifiers,
and the host library's tables of activations, scalings of the rotation and attention functions, which users extend.
"""

import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3


DENSE_BACKBONES = ("llama", "mistral", "olmo2", "olmo3", "qwen2", "qwen3", "smollm3")
REPLACED_ENDINGS = ("RMSNorm", "MLP", "RotaryEmbedding", "Attention", "DecoderLayer", "Model", "ForCausalLM")
REPLACED_FUNCTIONS = ("apply_rotary_pos_emb", "rotate_half", "repeat_kv", "eager_attention_forward")
# one model of each method, on backbones that differ in norms and rotation
MODELS = {
    "DepthQwen3": {"depth_stride": 2, "head_dim": 16},
    "AttnRes": {"attnres_block_size": 3, "head_dim": 16},
    "DenseFormer": {"head_dim": 16, "use_qk_norm": False},
    "MHCSmolLM3": {"mhc_num_streams": 2, "mhc_sinkhorn_iters": 2},
    "MoDAOlmo2": {},
    "ValueResidualOlmo3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
SCRIPT = """
import sys

sys.path[:0] = [sys.argv[1]]
import torch
from test_patched_stock_classes import build, measure, replace_stock_code

torch.set_num_threads(1)
if sys.argv[2] == "before the import":
    replace_stock_code(setattr)
    import depthmix
else:
    import depthmix
    replace_stock_code(setattr)
torch.save(measure(build()), sys.argv[3])
"""


class Broken(torch.nn.Module):
    """A module that cannot be built."""

    def __init__(self, *args, **kwargs):
        raise AssertionError("a stock class that was replaced is built")


def broken(*args, **kwargs):
    raise AssertionError("stock code that was replaced is called")


def replace_stock_code(set_attribute):
    """
    Replaces the classes of which stock decoders are made, their forwards, and the functions they call, by broken ones.
    Models and heads keep their classes, which ours derive from or read plans of, and lose their forwards.
    """
    count = 0
    for backbone in DENSE_BACKBONES:
        module = import_module(f"transformers.models.{backbone}.modeling_{backbone}")
        for name, member in list(vars(module).items()):
            if inspect.isclass(member) and member.__module__ == module.__name__ and name.endswith(REPLACED_ENDINGS):
                if "forward" in vars(member):
                    set_attribute(member, "forward", broken)
                    count += 1
                if not issubclass(member, PreTrainedModel):
                    set_attribute(module, name, Broken)
        for name in REPLACED_FUNCTIONS:
            if hasattr(module, name):
                set_attribute(module, name, broken)
    # the control: there was something to replace
    assert count >= 6 * len(DENSE_BACKBONES)


def build():
    import depthmix

    models = {}
    for name, fields in MODELS.items():
        for attention in ("sdpa", "eager"):
            torch.manual_seed(0)
            config = getattr(depthmix, f"{name}Config")(**SIZES | fields, attn_implementation=attention)
            models[f"{name}, {attention}"] = getattr(depthmix, f"{name}ForCausalLM")(config)
    return models


def measure(models):
    """By model: the logits, the loss, the gradients, and of which classes its modules are."""
    from depthmix.modeling.lent_weights import runs_plainly

    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    results = {}
    for name, model in models.items():
        model.zero_grad()
        output = model(ids, labels=ids)
        output.loss.backward()
        modules = {path: type(module) for path, module in model.named_modules() if path}
        norms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
        results[name] = {
            "tensors": [output.logits.detach(), output.loss.detach(), *(p.grad for p in model.parameters())],
            "types": {path: f"{each.__module__}.{each.__qualname__}" for path, each in modules.items()},
            "plain norms": [runs_plainly(norm) for norm in norms],
        }
    return results


@pytest.fixture(scope="module")
def untouched():
    return measure(build())


def assert_equal_results(actual, expected):
    assert actual.keys() == expected.keys()
    for name, results in expected.items():
        assert actual[name]["types"] == results["types"], name
        stock = [each for each in results["types"].values() if each.startswith("transformers.models.")]
        assert stock == [], name
        assert len(actual[name]["plain norms"]) > 8 and all(actual[name]["plain norms"]), name
        pairs = zip(actual[name]["tensors"], results["tensors"], strict=True)
        assert all(torch.equal(*pair) for pair in pairs), name


@pytest.mark.parametrize("order", ["before the import", pytest.param("before they are built", marks=pytest.mark.once)])
def test_replaced(order, untouched, fresh_python, tmp_path):
    run = fresh_python.run(SCRIPT, Path(__file__).parent, order, tmp_path / "results.pt")
    assert run.returncode == 0, run.stderr
    assert_equal_results(torch.load(tmp_path / "results.pt"), untouched)


def test_replaced_after_they_are_built(untouched, monkeypatch):
    models = build()
    replace_stock_code(monkeypatch.setattr)
    with pytest.raises(AssertionError, match="stock code"):
        modeling_qwen3.apply_rotary_pos_emb(None, None, None, None)
    assert_equal_results(measure(models), untouched)
