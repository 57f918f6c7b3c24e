# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Fixtures that every folder of tests shares."""

import os


# before the libraries are imported: no look-ups on the Hub, no oversubscription by parallel test workers
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch


# before kernels are defined: without a GPU `impl="triton"` runs them in Triton's interpreter
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from depthmix import DepthQwen3ForCausalLM
from depthmix.kernels import depth_implementations


logging.disable_progress_bar()

# a wide initialisation keeps the mixing awake: with the usual 0.02 the depth scores are nearly equal and a wrong key
# or a wrong head would go unnoticed
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def pytest_addoption(parser):
    parser.addoption(
        "--peer-python",
        default=None,
        help="interpreter of an environment with another transformers version; checkpoints are exchanged with it",
    )


def pytest_runtest_setup(item):
    if item.get_closest_marker("triton") and depth_implementations.triton is None:
        pytest.skip("needs Triton")
    if item.get_closest_marker("interpreter") and not depth_implementations.INTERPRETED:
        pytest.skip("needs Triton's interpreter")


@pytest.fixture(autouse=True)
def deterministic():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def tiny():
    """Fields of the tiny configuration, to be changed freely."""
    return dict(TINY)


@pytest.fixture
def build():
    """`build(**fields)` gives an awake DepthQwen3ForCausalLM in eval mode; equal fields give equal weights."""

    def build(*, seed: int = 0, model_class=DepthQwen3ForCausalLM, **fields):
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**(TINY | fields)))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        return model.eval()

    return build


@pytest.fixture
def vanilla_twin():
    """`vanilla_twin(model)` gives the Qwen3ForCausalLM with the same weights."""

    def vanilla_twin(model):
        fields = {name: getattr(model.config, name) for name in Qwen3Config.__dataclass_fields__ if name in TINY}
        kept = ("layer_types", "sliding_window", "use_sliding_window", "tie_word_embeddings", "rope_parameters")
        fields |= {name: getattr(model.config, name) for name in kept}
        twin = Qwen3ForCausalLM(Qwen3Config(**fields))
        twin.load_state_dict(model.state_dict())
        return twin.eval()

    return vanilla_twin


@pytest.fixture
def assert_awake(vanilla_twin):
    """The control of every check: the model must not be one for which a lost mixing would go unnoticed."""

    def assert_awake(model):
        ids = token_ids(2, 12)
        with torch.no_grad():
            difference = (model(ids).logits - vanilla_twin(model)(ids).logits).abs().max()
        assert difference > 0.05

    return assert_awake


def token_ids(batch: int, length: int, *, seed: int = 1, vocab_size: int = TINY["vocab_size"]) -> torch.Tensor:
    """Random ids `[batch, length]` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (batch, length), generator=generator)


@pytest.fixture(name="token_ids")
def token_ids_fixture():
    return token_ids
