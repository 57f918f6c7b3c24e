# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Fixtures that every folder of tests shares."""

import copy
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


# before the libraries are imported, and for the processes that tests start: no look-ups on the Hub, no
# oversubscription by parallel test workers
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch


# before kernels are defined: without a GPU `impl="triton"` runs them in Triton's interpreter
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from torch import nn
from transformers import LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM, PreTrainedModel, Qwen3ForCausalLM
from transformers.utils import logging

from depthmix import (
    AttnResForCausalLM,
    AttnResForSequenceClassification,
    DenseFormerForCausalLM,
    DenseFormerForSequenceClassification,
    DepthQwen3ForCausalLM,
    DepthQwen3ForSequenceClassification,
    MHCForCausalLM,
    MHCForSequenceClassification,
    MoDAOlmo2ForCausalLM,
    MoDAOlmo2ForSequenceClassification,
)
from depthmix.kernels import depth_dispatch


# lets tests import what lies in this folder
sys.path.append(str(Path(__file__).parent))

from faster_interpreter import do_repeated_work_once
from fresh_process import FreshPython


do_repeated_work_once()
logging.disable_progress_bar()

# what is written outlasts the tests without waiting for the disk at every file; a bad descriptor still is an error
os.fsync = os.fstat

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


@dataclass(frozen=True)
class Family:
    """What the checks that run over all model families need to know of each."""

    head: type[PreTrainedModel]
    classifier: type[PreTrainedModel]
    vanilla: type[PreTrainedModel]
    # the module of a layer that reads earlier ones, and how many it reads, from the arguments of a call
    reader: Callable[[nn.Module], nn.Module]
    count_sources: Callable[[tuple, dict], int]
    # configuration fields for the different ways in which layers can read earlier ones, the densest first
    patterns: dict[str, dict]
    # fields that all of its awake models have, unless given
    defaults: dict = field(default_factory=dict)
    # a vanilla checkpoint that is read as this family keeps its function, up to the epsilon of the norms
    fresh_is_vanilla: bool = False
    # names of the modules that a vanilla model does not have, whether these are projections, which start at random,
    # and the one of them that has nothing to mix
    own_modules: tuple[str, ...] = ()
    own_are_linear: bool = False
    idle_module: str | None = None
    # with how many layers the densest pattern makes a difference
    fewest_layers: int = 2
    # whether it returns depth weights, and whether layers hand tensors on besides the hidden states
    has_depth_weights: bool = True
    has_sources: bool = True
    # configuration fields with which the model returns the weights over depth, and under which name
    weights_fields: dict = field(default_factory=lambda: {"output_depth_weights": True})
    weights_name: str = "depth_weights"

    @property
    def densest(self) -> dict:
        return next(iter(self.patterns.values()))

    def is_own(self, parameter_name: str) -> bool:
        """Whether a vanilla model has no such parameter."""
        return not set(self.own_modules).isdisjoint(parameter_name.split("."))

    def is_idle(self, parameter_name: str) -> bool:
        """Whether its gradient is zero, or nothing but rounding, since there is nothing to mix."""
        return self.idle_module is not None and f"{self.idle_module}." in parameter_name


FAMILIES = {
    "depth_qwen3": Family(
        head=DepthQwen3ForCausalLM,
        classifier=DepthQwen3ForSequenceClassification,
        vanilla=Qwen3ForCausalLM,
        reader=lambda layer: layer.self_attn,
        count_sources=lambda args, kwargs: len(kwargs["source_values"]),
        patterns={
            "stride_1": {"depth_stride": 1},
            "gated": {"depth_stride": 2, "depth_gate": True},
            "window": {"depth_stride": 3, "depth_window": 2},
        },
        own_modules=("depth_gate",),
    ),
    "attnres": Family(
        head=AttnResForCausalLM,
        classifier=AttnResForSequenceClassification,
        vanilla=Qwen3ForCausalLM,
        reader=lambda layer: layer.mlp_mixer,
        count_sources=lambda args, kwargs: len(next(each for each in args if isinstance(each, tuple))),
        patterns={
            "full": {"attnres_variant": "full"},
            "block_4": {"attnres_block_size": 4},
            "additive": {"attnres_block_size": 3, "attnres_routing": "additive", "attnres_recency_bias": True},
            "block_3": {"attnres_block_size": 3, "attnres_scale": "sum", "attnres_recency_bias": True},
            "cumulative": {"attnres_variant": "cumulative", "attnres_block_size": 4, "attnres_recency_bias": True},
        },
        fresh_is_vanilla=True,
        own_modules=("attn_mixer", "mlp_mixer", "output_mixer"),
        idle_module="layers.0.attn_mixer",
    ),
    "mhc": Family(
        head=MHCForCausalLM,
        classifier=MHCForSequenceClassification,
        vanilla=Qwen3ForCausalLM,
        reader=lambda layer: layer.mlp_connection,
        count_sources=lambda args, kwargs: args[0].shape[-2],
        patterns={"streams": {"mhc_num_streams": 3}},
        # the time to compile grows with the iterations
        defaults={"mhc_sinkhorn_iters": 2},
        fresh_is_vanilla=True,
        own_modules=("attn_connection", "mlp_connection", "stream_readout"),
        # the streams are equal there
        idle_module="layers.0.attn_connection",
        has_depth_weights=False,
        has_sources=False,
    ),
    "moda_olmo2": Family(
        head=MoDAOlmo2ForCausalLM,
        classifier=MoDAOlmo2ForSequenceClassification,
        vanilla=Olmo2ForCausalLM,
        reader=lambda layer: layer.self_attn,
        count_sources=lambda args, kwargs: len(kwargs["handle"]),
        patterns={
            "row_5": {"moda_attn_depth_proj": True},
            "row_4_reader_norm": {"moda_depth_key_mode": "reader_norm"},
            "window": {"moda_depth_window": 3, "moda_norm_style": "pre", "moda_gate": True},
        },
        own_modules=("attn_depth_kv_proj", "mlp_depth_kv_proj", "depth_gate"),
        own_are_linear=True,
        weights_fields={"output_attentions": True, "attn_implementation": "eager"},
        weights_name="attentions",
    ),
    "denseformer": Family(
        head=DenseFormerForCausalLM,
        classifier=DenseFormerForSequenceClassification,
        vanilla=Qwen3ForCausalLM,
        # not every layer has an average
        reader=lambda layer: layer.depth_average or layer.mlp,
        count_sources=lambda args, kwargs: len(args),
        patterns={"spaced": {"dwa_dilation": 2, "dwa_period": 2}},
        fresh_is_vanilla=True,
        own_modules=("depth_average",),
        fewest_layers=3,
        has_depth_weights=False,
    ),
}


def pytest_addoption(parser):
    parser.addoption(
        "--peer-python",
        default=None,
        help="interpreter of an environment with another transformers version; checkpoints are exchanged with it",
    )


def pytest_runtest_setup(item):
    if item.get_closest_marker("triton") and depth_dispatch.triton is None:
        pytest.skip("needs Triton")
    if item.get_closest_marker("interpreter") and not depth_dispatch.INTERPRETED:
        pytest.skip("needs Triton's interpreter")


def pytest_itemcollected(item):
    """Of a test that takes long, some families are left to another run, as its markers say."""
    family = item.callspec.params.get("family") if hasattr(item, "callspec") else None
    place = list(FAMILIES.values()).index(family) if family in FAMILIES.values() else 0
    if any(place >= sampled.args[0] for sampled in item.iter_markers("sampled")):
        item.add_marker(pytest.mark.exhaustive)
    if item.get_closest_marker("long") and place > 0:
        item.add_marker(pytest.mark.once)
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """
    From here on the garbage collector looks at what tests make only: with all that is loaded, a full collection, as
    the Trainer and the compiler ask for, took half a second.
    """
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc):
    """`family` runs a test over the families, `pattern` besides over the patterns of sources of each."""
    families = FAMILIES
    if metafunc.definition.get_closest_marker("two_families"):
        families = {name: FAMILIES[name] for name in ("depth_qwen3", "attnres")}
    if "pattern" in metafunc.fixturenames:
        first_only = metafunc.definition.get_closest_marker("densest")
        cases = [
            pytest.param(
                family,
                fields,
                id=f"{name}-{pattern}",
                marks=pytest.mark.exhaustive if first_only and fields is not family.densest else (),
            )
            for name, family in families.items()
            for pattern, fields in family.patterns.items()
        ]
        metafunc.parametrize("family, pattern", cases)
    elif "family" in metafunc.fixturenames:
        metafunc.parametrize("family", families.values(), ids=families)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """The same for what the tests of a module have imported, and traced, when the last of them is over."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def deterministic():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fresh_python(tmp_path_factory):
    """`fresh_python.run(code, *arguments)` runs code where nothing of the host library has been imported."""
    python = FreshPython(tmp_path_factory.mktemp("fresh_python"))
    yield python
    python.close()


@pytest.fixture
def own_remote_code(tmp_path, monkeypatch):
    """Code of saved models is loaded as if no test before had loaded any, and from a folder of this test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def tiny():
    """Fields of the tiny configuration, to be changed freely."""
    return dict(TINY)


# the last models that were built, which nobody uses but `build`, with the state of the generator after that
BUILT: dict[tuple, tuple[PreTrainedModel, torch.Tensor]] = {}


@pytest.fixture
def build():
    """
    `build(**fields)` gives an awake DepthQwen3ForCausalLM, or another `model_class`, in eval mode; equal fields give
    equal weights.
    """

    def build(*, seed: int = 0, model_class=DepthQwen3ForCausalLM, **fields):
        arguments = seed, model_class, repr(sorted(fields.items()))
        if arguments not in BUILT:
            torch.manual_seed(seed)
            model = model_class(model_class.config_class(**(TINY | fields)))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1 or not parameter.any():
                        parameter.add_(0.3 * torch.randn_like(parameter))
            BUILT[arguments] = model.eval(), torch.get_rng_state()
            if len(BUILT) > 32:
                del BUILT[next(iter(BUILT))]
        # a copy takes a quarter of the time; what follows draws the same numbers after either
        model, random_state = BUILT[arguments]
        torch.set_rng_state(random_state)
        return copy.deepcopy(model)

    return build


@pytest.fixture
def vanilla_twin():
    """`vanilla_twin(model)` gives its vanilla model, or without q/k norms the Llama, with the same weights."""

    def vanilla_twin(model):
        if isinstance(model.config, Olmo2Config):
            vanilla_class = Olmo2ForCausalLM
        else:
            vanilla_class = Qwen3ForCausalLM if getattr(model.config, "use_qk_norm", True) else LlamaForCausalLM
        config_class = vanilla_class.config_class
        names = {*TINY, "layer_types", "sliding_window", "use_sliding_window", "tie_word_embeddings"}
        names |= {"rope_parameters", "attention_bias", "mlp_bias"}
        names &= {*config_class.__dataclass_fields__, "head_dim"}
        twin = vanilla_class(config_class(**{n: getattr(model.config, n) for n in names if hasattr(model.config, n)}))
        state = model.state_dict()
        twin.load_state_dict({name: state[name] for name in twin.state_dict()})
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


# the arguments of models that a test of this process has found to be awake
FOUND_AWAKE: set[str] = set()


@pytest.fixture
def build_awake(build, assert_awake):
    """`build_awake(family, **fields)` is `build` with the control that the mixing matters."""

    def build_awake(family: Family, **fields):
        fields = family.defaults | fields
        model = build(model_class=family.head, **fields)
        # equal arguments give equal models
        arguments = repr((family.head, sorted(fields.items())))
        if arguments not in FOUND_AWAKE:
            assert_awake(model)
            FOUND_AWAKE.add(arguments)
        return model

    return build_awake


def token_ids(batch: int, length: int, *, seed: int = 1, vocab_size: int = TINY["vocab_size"]) -> torch.Tensor:
    """Random ids `[batch, length]` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (batch, length), generator=generator)


@pytest.fixture(name="token_ids")
def token_ids_fixture():
    return token_ids
