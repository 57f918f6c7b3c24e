# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Depth weights and what is made of them."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from depthmix.families import FAMILIES, METHODS, method_sites
from depthmix.inspection import (
    Site,
    SiteWeights,
    depth_map,
    depth_weights,
    gate_values,
    output_magnitudes,
    source_entropy,
    stream_maps,
)
from depthmix.inspection.measures import _in_order
from depthmix.inspection.sites import MethodSites, whole
from depthmix.inspection.watch import evaluation, run, viewing, watch
from depthmix.modeling.modeling_attnres import AttnResSite
from depthmix.modeling.modeling_denseformer import DepthAverage
from depthmix.modeling.modeling_mhc import MHCConnection, MHCReadout
from depthmix.modeling.modeling_value_residual import ValueMix


def test_every_method_has_sites_and_a_variant(variants):
    assert {FAMILIES[model_type].method for model_type, _ in variants.values()} == {*METHODS}
    for method in METHODS:
        assert isinstance(method_sites(method), MethodSites) and type(method_sites(method)).__doc__


def weights_of(model, inputs):
    return {row.site.target: row.weights for row in depth_weights(model, inputs)}


def state_of(model):
    """All that watching could leave behind."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    found = [model.config._attn_implementation]
    for module in model.modules():
        members = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        found.append(({name: repr(value) for name, value in members.items()}, module.training))
        found.append([dict(vars(module)[name]) for name in hooks])
    return found


def test_watching_changes_nothing_and_leaves_nothing(model, inputs):
    model.model.layers[1].mlp.train()
    before, expected = state_of(model), model(**inputs).logits
    with evaluation(model), watch(model):
        seen = run(model, inputs).logits
    # only the eager form of a softmax rounds otherwise, and gives padding something else
    counts = inputs["attention_mask"].bool()
    torch.testing.assert_close(seen[counts], expected[counts], atol=2e-5, rtol=0)
    assert state_of(model) == before
    assert torch.equal(model(**inputs).logits, expected)


def test_mixes_are_what_the_model_computes(model, inputs):
    """With the sum of weights times entries in place of each mix, the model is the same."""

    def recompute(place, mix):
        mix.replace(0, mix.contribution(0))

    places = []
    with evaluation(model), watch(model) as watched:
        expected = run(model, inputs).logits
        with (
            viewing(watched.editors, recompute),
            viewing(watched.readers, lambda place, mix: places.append((place, mix.site, mix.weights.shape[-1]))),
        ):
            recomputed = run(model, inputs).logits
    torch.testing.assert_close(recomputed, expected, atol=2e-5, rtol=0)
    assert places == [(i, site, len(site.sources)) for i, site in enumerate(watched.sites)]


def test_own_weights_of_models_that_return_them(small, inputs):
    for model_type, fields in (
        ("depth_qwen3", {"depth_stride": 1, "depth_gate": True}),
        ("depth_llama", {"depth_stride": 2, "num_loops": 2}),
        ("attnres", {"attnres_block_size": 3}),
        ("attnres", {"attnres_block_size": 2, "attnres_routing": "additive"}),
    ):
        model = small(model_type, **fields)
        returned = model(**inputs, output_depth_weights=True).depth_weights
        rows = depth_weights(model, inputs)
        assert len(rows) > 1
        for row in rows:
            expected = returned[row.site.number]
            assert torch.equal(row.weights, expected if expected.ndim == 4 else expected.unsqueeze(1))
            assert row.weights.shape[-1] == len(row.site.sources)


def test_weights_that_are_parameters(small, inputs):
    model = small("denseformer")
    for i, weights in enumerate(weights_of(model, inputs).values()):
        assert weights.shape == (2, 1, 7, i + 2)
        assert torch.equal(weights[1, 0, 3], model.model.layers[i].depth_average.weight)
    model = small("value_residual_qwen2")
    weights = weights_of(model, inputs)
    assert torch.equal(weights["layer 2"][0, 0, 4], model.model.layers[2].self_attn.value_mix.weight)


def test_slot_weights_are_columns_of_the_attention(small, inputs):
    model = small("moda_qwen3", moda_gate=True)
    weights = weights_of(model, inputs)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    attentions = model(**inputs, output_attentions=True).attentions
    for i in (1, 2):
        found, expected = weights[f"layer {i}"], attentions[i]
        assert found.shape == (2, 4, 7, 1 + 2 * i) and torch.equal(found[..., 1:], expected[..., 7:])
        torch.testing.assert_close(found[..., 0], expected[..., :7].sum(-1))


def test_unrolled_streams_are_what_sub_layers_read(small, inputs):
    """mHC: the weights times the outputs of earlier sub-layers are what a connection reads from its streams."""
    model = small("mhc_olmo2", mhc_num_streams=3, mhc_sinkhorn_iters=3)
    weights, read, updates = weights_of(model, inputs), {}, [model.get_input_embeddings()(inputs["input_ids"])]
    for i, layer in enumerate(model.model.layers):
        layer.attn_connection.register_forward_hook(
            lambda _, __, out, i=i: read.update({f"layer {i} attention": out[0]})
        )
        layer.mlp_connection.register_forward_hook(lambda _, __, out, i=i: read.update({f"layer {i} mlp": out[0]}))
        layer.post_attention_layernorm.register_forward_hook(lambda _, __, out: updates.append(out))
        layer.post_feedforward_layernorm.register_forward_hook(lambda _, __, out: updates.append(out))
    model.model.stream_readout.register_forward_hook(lambda _, __, out: read.update(output=out))
    model(**inputs)
    assert len(read) == 7
    for target, expected in read.items():
        parts = weights[target][:, 0].unsqueeze(-1)
        found = sum(parts[:, :, j] * updates[j] for j in range(parts.shape[2]))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_stream_maps(small, inputs):
    """They are what carries streams from one connection to the next."""
    model, streams, updates = small("mhc", mhc_num_streams=3, mhc_sinkhorn_iters=3), [], []
    read = []
    for layer in model.model.layers:
        for connection, part in ((layer.attn_connection, layer.self_attn), (layer.mlp_connection, layer.mlp)):
            connection.register_forward_hook(lambda _, args, out: streams.append(args[0]) or read.append(out[0]))
            part.register_forward_hook(lambda _, __, out: updates.append(out[0] if isinstance(out, tuple) else out))
    model(**inputs)
    before, after, added = streams[3].clone(), streams[4].clone(), updates[3].clone()
    mixed = read[3].clone()
    maps = stream_maps(model, inputs)
    assert [each.target for each in maps][:3] == ["layer 0 attention", "layer 0 mlp", "layer 1 attention"]
    found = maps[3]
    torch.testing.assert_close((found.reads.unsqueeze(-1) * before).sum(-2), mixed, atol=1e-5, rtol=1e-5)
    written = found.matrix @ before + found.writes.unsqueeze(-1) * added.unsqueeze(-2)
    torch.testing.assert_close(written, after, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="has no residual streams"):
        stream_maps(small("denseformer"), inputs)


def test_names(small, inputs):
    def sites(model_type, **fields):
        return {row.site.target: row.site.sources for row in depth_weights(small(model_type, **fields), inputs)}

    assert sites("depth_qwen3", depth_stride=2, num_hidden_layers=4)["layer 3"] == ("layer 0", "layer 2", "own")
    looped = sites("depth_llama", depth_stride=2, num_loops=2)
    assert looped["loop 1, layer 2"] == ("loop 0, layer 0", "loop 0, layer 2", "loop 1, layer 1", "own")
    block = sites("attnres", attnres_block_size=4)
    assert block["layer 0 attention"] == ("embeddings",) and block["layer 0 mlp"] == ("embeddings", "block 0")
    # the first sub-layer of a block still reads the last one as a sum, and all of it
    assert block["layer 2 attention"] == ("embeddings", "block 0") and block["output"][-1] == "block 1"
    assert sites("attnres", attnres_variant="full")["layer 1 attention"] == (
        "embeddings",
        "layer 0 attention",
        "layer 0 mlp",
    )
    cumulative = sites("attnres", attnres_variant="cumulative", attnres_block_size=4)
    assert cumulative["output"] == ("embeddings", "stream after layer 1", "stream")
    assert sites("denseformer", dwa_dilation=2)["layer 2"] == ("layer 0", "layer 2")
    assert sites("mhc", mhc_num_streams=2)["layer 0 mlp"] == ("embeddings", "layer 0 attention")
    moda = sites("moda_qwen3", moda_depth_window=3)
    assert moda["layer 2"] == ("tokens", "layer 0 mlp", "layer 1 attention", "layer 1 mlp")
    assert sites("moda_qwen3", moda_attn_slots=False)["layer 2"] == ("tokens", "layer 0 mlp", "layer 1 mlp")
    assert sites("value_residual_qwen2")["layer 2"] == ("layer 0", "own")


def test_maps(small, inputs):
    model = small("depth_qwen3", depth_stride=1)
    mean, heads, tokens = (depth_map(model, inputs, per=per) for per in ("mean", "head", "token"))
    assert mean.targets == ("layer 1", "layer 2") and mean.sources == ("layer 0", "layer 1", "own")
    assert mean.values.shape == (2, 3) and heads.values.shape == (2, 2, 3) and tokens.values.shape == (2, 2, 7, 3)
    assert mean["layer 1", "layer 1"].isnan() and not mean["layer 2", "layer 1"].isnan()
    torch.testing.assert_close(heads.values.mean(1), mean.values, equal_nan=True)
    counted = tokens.values[:, inputs["attention_mask"].bool()].mean(1)
    torch.testing.assert_close(counted, mean.values, equal_nan=True)
    with pytest.raises(ValueError, match="per='layer': must be one of mean, head, token"):
        depth_map(model, inputs, per="layer")
    with pytest.raises(ValueError, match="mixes nothing"):
        depth_map(small("depth_qwen3", depth_stride=0), inputs)


def test_padding_does_not_count(model, inputs):
    alone = {"input_ids": inputs["input_ids"][1:, 2:]}
    padded = {name: tensor[1:] for name, tensor in inputs.items()}
    # slots that are not rotated are read by rotated queries in one of the variants
    padded["position_ids"] = (padded["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    expected, found = depth_map(model, alone).values, depth_map(model, padded).values
    torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-5, rtol=1e-4)
    for name in ("hidden_states", "attention", "mlp"):
        sizes = [getattr(output_magnitudes(model, each), name) for each in (padded, alone)]
        torch.testing.assert_close(*sizes, atol=1e-5, rtol=1e-4)


@pytest.mark.once
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_low_precision(model, inputs, autocast):
    """The mixes are those that such a model computes, up to a few roundings."""
    model = model if autocast else model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), evaluation(model), watch(model) as watched:
        expected = run(model, inputs).logits
        with viewing(watched.editors, lambda _, mix: mix.replace(0, mix.contribution(0))):
            found = run(model, inputs).logits
        rows = depth_weights(model, inputs)
    assert found.dtype is expected.dtype is torch.bfloat16
    counts = inputs["attention_mask"].bool()
    difference = (found[counts] - expected[counts]).float().norm() / expected[counts].float().norm()
    assert difference < 0.05
    assert all(row.weights.dtype is torch.float32 and row.weights.isfinite().all() for row in rows)


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.once
def test_sharded_models(model, inputs, mesh):
    """FSDP2 takes the memory of parameters back, also of those that mix, once their module has run."""
    expected, gates = depth_weights(model, inputs), gate_values(model)
    for module in model.modules():
        if isinstance(module, (AttnResSite, DepthAverage, MHCConnection, MHCReadout, ValueMix)):
            fully_shard(module, mesh=mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for row, whole_row in zip(depth_weights(model, inputs), expected, strict=True):
        assert torch.equal(row.weights, whole_row.weights)
    for name, values in gate_values(model).items():
        assert torch.equal(values, gates[name])


@pytest.mark.once
def test_order_of_names():
    assert _in_order([("a", "own"), ("a", "b", "own")]) == ("a", "b", "own")
    assert _in_order([("t", "a", "b"), ("t", "b", "c"), ("t", "d")]) == ("t", "a", "b", "c", "d")


@pytest.mark.once
def test_entropy():
    def entropies(*weights):
        row = SiteWeights(Site("x", tuple("abcd"[: len(weights)]), 0), torch.tensor(weights).view(1, 1, 1, -1), mask)
        return row.mean_entropy()

    mask = torch.ones(1, 1, dtype=torch.bool)
    assert entropies(0.25, 0.25, 0.25, 0.25) == pytest.approx(1)
    assert entropies(0.0, 1.0) == 0 and entropies(1.0) == 0 and entropies(0.0, 0.0) == 0
    # sizes of any sign and sum
    assert entropies(-2.0, 2.0) == pytest.approx(1)
    assert entropies(3.0, 1.0) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2))


def test_source_entropy(small, inputs):
    found = source_entropy(small("attnres", attnres_block_size=3), inputs)
    # the first attention has one source
    assert [*found][0] == "layer 0 mlp" and len(found) == 6 and all(0 < value < 1 for value in found.values())


def test_gates(small):
    model = small("depth_olmo2", depth_stride=1, depth_gate=True)
    gates = gate_values(model)
    assert [*gates] == ["layer 1", "layer 2"]
    assert torch.equal(gates["layer 2"], model.model.layers[2].self_attn.depth_gate.weight)
    assert gate_values(small("attnres")) == {}


def test_magnitudes(small, inputs):
    del inputs["attention_mask"]
    model = small("value_residual_olmo2")
    found = output_magnitudes(model, inputs)
    states = model.model(**inputs, output_hidden_states=True).hidden_states
    kept = []
    model.model.layers[1].register_forward_hook(lambda _, __, output: kept.append(output))
    model.model.layers[2].register_forward_hook(lambda _, __, output: kept.append(output))
    model.model.layers[2].post_attention_layernorm.register_forward_hook(lambda _, __, output: kept.append(output))
    model(**inputs)
    before, attention, after = kept
    assert found.layers == ("layer 0", "layer 1", "layer 2")
    root_mean_squares = [each.square().mean().sqrt() for each in (states[1], before, after)]
    torch.testing.assert_close(found.hidden_states, torch.stack(root_mean_squares).detach())
    torch.testing.assert_close(found.attention[2], attention.square().mean().sqrt().detach())
    torch.testing.assert_close(found.mlp[2], (after - before - attention).square().mean().sqrt().detach())


def test_magnitudes_of_every_method(model, inputs):
    found = output_magnitudes(model, inputs)
    loops = getattr(model.config, "num_loops", 1)
    for sizes in (found.hidden_states, found.attention, found.mlp):
        assert sizes.shape == (loops * model.config.num_hidden_layers,) and (sizes > 0).all()


@pytest.mark.once
def test_refuses(small, inputs):
    model = small("denseformer")
    with pytest.raises(TypeError, match="inputs is a Tensor: must be what the model takes by name"):
        depth_weights(model, inputs["input_ids"])
    with pytest.raises(TypeError, match="model is a Linear: there is no model of depthmix in it"):
        depth_weights(torch.nn.Linear(2, 2), inputs)
    with pytest.raises(ValueError, match="offloaded or partitioned"):
        whole(torch.nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(ValueError, match="offloaded or partitioned"):
        whole(torch.empty(0))
