# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Whole-model compilation and export.

Tracing takes the time, so nothing is traced twice: `aot_eager`, which also traces derivatives and what is written in
place and generates no code, where these matter, and `eager` where the question is whether and how often Python is
traced. Models have the fewest layers that mix.
"""

import os
import shutil

import pytest
import torch
from torch._dynamo.aot_compile_types import GraphModuleSerializableCallable
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import StaticCache

from depthmix import DepthQwen3ForCausalLM


pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def counting():
    return CompileCounterWithBackend("aot_eager")


@pytest.fixture
def counting_eager():
    return CompileCounterWithBackend("eager")


def assert_close(actual, expected, tolerance=2e-5):
    assert (actual - expected).abs().max() <= tolerance


def part_of(model, part):
    return model.base_model if part == "base_model" else model


# servers take the base model
@pytest.mark.parametrize("part", ["base_model", pytest.param("head", marks=pytest.mark.sampled(1))])
def test_forward_of_the_class_ahead_of_time(family, part, build_awake, token_ids):
    """As vLLM compiles it: a function that gets the model as an argument, without guards."""
    model = part_of(build_awake(family, **family.densest, num_hidden_layers=family.fewest_layers), part)
    keywords = {"position_ids": None, "inputs_embeds": None, "use_cache": False, "return_dict": False}
    function = torch.compile(
        type(model).forward,
        fullgraph=True,
        backend=lambda graph, inputs: GraphModuleSerializableCallable(graph),
        options={"guard_filter_fn": lambda guards: [False for _ in guards]},
    )
    with torch.no_grad():
        compiled = function.aot_compile(((model,), {"input_ids": token_ids(1, 12)} | keywords))
        for seed in (1, 2):
            keywords["input_ids"] = token_ids(1, 12, seed=seed)
            assert_close(compiled(model, **keywords)[0], model(**keywords)[0])


# the graphs of each family are counted when it decodes
@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", [pytest.param("base_model", marks=pytest.mark.sampled(1)), "head"])
@torch.no_grad()
def test_bound_forward_by_keyword(family, part, build_awake, token_ids, counting_eager):
    model = part_of(build_awake(family, num_hidden_layers=3), part)
    compiled, mask = torch.compile(model.forward, fullgraph=True, backend=counting_eager), torch.ones(2, 9).long()
    for seed in (1, 2):
        ids = token_ids(2, 9, seed=seed)
        expected = model(ids, attention_mask=mask, use_cache=False)[0]
        assert_close(compiled(input_ids=ids, attention_mask=mask, use_cache=False)[0], expected)
    assert counting_eager.frame_count == 1


# the forward of all base models is one, and that of all heads
@pytest.mark.once
@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", ["base_model", "head"])
@torch.no_grad()
def test_bound_forward_by_position(family, part, build_awake, token_ids):
    model = part_of(build_awake(family, **family.densest, num_hidden_layers=family.fewest_layers), part)
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    ids, mask = token_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    expected = model(ids, attention_mask=mask, use_cache=False)[0]
    assert_close(compiled(ids, mask, None, None, use_cache=False)[0], expected)


@pytest.mark.parametrize(
    "checkpointing",
    [pytest.param(False, marks=pytest.mark.sampled(3)), pytest.param(True, marks=pytest.mark.sampled(1))],
    ids=["plain", "checkpointing"],
)
def test_training_step(
    family,
    checkpointing,
    build_awake,
    token_ids,
    gradients,
    assert_same_gradients,
    enable_checkpointing,
    counting,
):
    model = build_awake(family, **family.densest, num_hidden_layers=family.fewest_layers).train()
    ids = token_ids(2, 12)
    expected = gradients(model, ids, use_cache=False)
    if checkpointing:
        enable_checkpointing(model, use_reentrant=False)
    model.compile(fullgraph=True, backend=counting)
    assert_same_gradients(gradients(model, ids, use_cache=False), expected, tolerance=1e-4)
    assert counting.frame_count == 1


@pytest.mark.sampled(1)
@pytest.mark.two_families
@pytest.mark.once
@pytest.mark.slow
def test_lengths_share_a_graph(family, build_awake, token_ids, logits_of, counting_eager):
    model = build_awake(family, **family.densest, num_hidden_layers=2)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counting_eager)
    graphs = set()
    for length in (12, 7, 33, 20):
        ids = token_ids(2, length)
        assert_close(logits_of(compiled, ids, use_cache=False), logits_of(model, ids, use_cache=False))
        graphs.add(counting_eager.frame_count)
    assert len(graphs) == 1


@pytest.mark.sampled(3)
def test_static_cache_decoding(family, build_awake, token_ids, logits_of, counting):
    model = build_awake(family, num_hidden_layers=3)
    compiled = torch.compile(model.forward, fullgraph=True, backend=counting)

    @torch.no_grad()
    def decode(prompt_length, steps=6):
        ids = token_ids(1, prompt_length + steps, seed=prompt_length)
        expected = logits_of(model, ids, use_cache=False)
        cache = StaticCache(model.config, max_cache_len=64)
        model(ids[:, :prompt_length], past_key_values=cache)
        graphs = []
        for i in range(prompt_length, prompt_length + steps):
            token, position = ids[0, i].view(1, 1), torch.tensor([[i]])
            logits = compiled(token, position_ids=position, past_key_values=cache, use_cache=True).logits
            assert_close(logits[:, 0], expected[:, i])
            graphs.append(counting.frame_count)
        return graphs

    graphs = decode(5)
    assert graphs[1] == graphs[-1]
    assert decode(9)[-1] == graphs[-1]


@pytest.mark.interpreter
@pytest.mark.sampled(1)
def test_decoding_with_kernels_reads_weights_of_one_input_together(family, build_awake, token_ids, logits_of):
    """One kernel each: query, key and value; the output; each half of the gated network. Hooked modules are called."""
    model, kernels = build_awake(family, num_hidden_layers=2, depth_impl="triton"), []

    def backend(graph, inputs):
        kernels.append(sum("shared_input_linear" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    @torch.no_grad()
    def decode(ids):
        cache = StaticCache(model.config, max_cache_len=16)
        model(ids[:, :5], past_key_values=cache)
        compiled = torch.compile(model.forward, fullgraph=True, backend=backend)
        return compiled(ids[:, 5:], position_ids=torch.tensor([[5]]), past_key_values=cache).logits[:, 0]

    def check(ids):
        kernels.clear()
        assert_close(decode(ids), logits_of(model, ids, use_cache=False)[:, 5])
        return kernels

    loops = getattr(model.config, "num_loops", 1)
    assert check(token_ids(1, 6)) == [8 * loops]
    if family.head is not DepthQwen3ForCausalLM:
        # what follows is code that families share
        return
    # for several sequences a library's matrix products are better
    assert check(token_ids(2, 6)) == [0]
    called = []
    for module in (model.model.layers[0].self_attn.k_proj, model.model.layers[1].mlp):
        module.register_forward_hook(lambda *_: called.append(1))
    torch.compiler.reset()
    assert check(token_ids(1, 6)) == [5 * loops]
    assert called


@pytest.mark.interpreter
@pytest.mark.sampled(1)
def test_forwards_replaced_after_compilation_are_called(family, build_awake, token_ids, logits_of):
    model = build_awake(family, num_hidden_layers=2, depth_impl="triton")
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    layer = model.model.layers[1]
    # one token, whose weight is 1 in its own attention, for what is read beside the modules in decoding only
    cases = [(1, layer.mlp.down_proj)]
    if hasattr(layer, "mlp_mixer"):
        cases.append((3, layer.mlp_mixer.norm))
    else:
        # of code that both families share
        cases += [(1, layer.self_attn.v_proj), (3, layer.self_attn.q_norm)]
    for length, module in cases:
        ids = token_ids(1, length)
        before = logits_of(compiled, ids, use_cache=False)

        def changed(*args, own=module.forward):
            return 10 * own(*args)

        module.forward = changed
        expected = logits_of(model, ids, use_cache=False)
        assert (expected - before).abs().max() > 2e-4
        assert_close(logits_of(compiled, ids, use_cache=False), expected)


@pytest.mark.sampled(1)
def test_depth_weights(build_awake, token_ids, counting_eager, family):
    if not family.has_depth_weights:
        pytest.skip("this family returns none")
    model = build_awake(family, **family.densest, **family.weights_fields, num_hidden_layers=3)
    ids = token_ids(2, 12)
    compiled = torch.compile(model, fullgraph=True, backend=counting_eager)
    with torch.no_grad():
        # the host library's recorders install themselves in the first call, which therefore cannot be compiled
        expected = model(ids, use_cache=False)[family.weights_name]
        actual = compiled(ids, use_cache=False)[family.weights_name]
    for weights, own in zip(actual, expected, strict=True):
        assert_close(weights, own)


@pytest.mark.parametrize(
    "strict",
    [
        pytest.param(False, marks=pytest.mark.sampled(3)),
        pytest.param(True, marks=[pytest.mark.once, pytest.mark.sampled(1)]),
    ],
    ids=["non_strict", "strict"],
)
def test_export(family, strict, build_awake, token_ids, logits_of):
    model = build_awake(family, **family.densest, num_hidden_layers=3)
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        model,
        (),
        {"input_ids": token_ids(2, 12), "use_cache": False},
        dynamic_shapes={"input_ids": {1: length}, "use_cache": None},
        strict=strict,
    )
    # no operation that other runtimes do not know
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert [target for target in targets if "depth" in target or "moda" in target] == []
    for length in (12, 7):
        ids = token_ids(2, length)
        assert_close(program.module()(input_ids=ids, use_cache=False).logits, logits_of(model, ids))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.once
@pytest.mark.two_families
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler on CPU")
def test_inductor(family, build_awake, token_ids, gradients, assert_same_gradients):
    model = build_awake(family, **family.densest, num_hidden_layers=2).train()
    ids = token_ids(2, 12)
    expected = gradients(model, ids, use_cache=False)
    model.compile(fullgraph=True)
    assert_same_gradients(gradients(model, ids, use_cache=False), expected, tolerance=1e-4)
