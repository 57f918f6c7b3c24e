# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Ablation and patching, against planted routes and against computing the same in other ways."""

import math

import pytest
import torch

from depthmix.inspection import ablate, ablated, depth_weights, importance_map, patch, patched
from depthmix.inspection.causal import next_token_loss
from depthmix.inspection.watch import viewing, watch
from depthmix.kernels import attn_res, attn_res_weights


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def close_all_but(modules, kept, closed):
    """Fills the weights of all modules but one with numbers that close a route."""
    with torch.no_grad():
        for module in modules:
            if module is not kept:
                module.copy_(torch.as_tensor(closed, dtype=module.dtype))


def plant_depth_attention(small):
    """Only layer 2 mixes, half, and the values of layer 1 are zero."""
    model = small("depth_qwen3", depth_stride=1, depth_gate=True)
    layers = model.model.layers
    close_all_but([layer.self_attn.depth_gate.weight for layer in layers[1:]], None, 0.0)
    with torch.no_grad():
        layers[2].self_attn.depth_gate.weight.fill_(0.5)
        layers[1].self_attn.v_proj.weight.zero_()
    # without its own value layer 1 has none
    return model, {("layer 2", "layer 0"), ("layer 2", "own")}


def plant_attnres(small):
    """Biases let the last mlp read the embeddings alone, more or less, and every other site its last source."""
    model = small("attnres", attnres_block_size=6, attnres_recency_bias=True)
    mixers = [mixer for layer in model.model.layers for mixer in (layer.attn_mixer, layer.mlp_mixer)]
    mixers.append(model.model.output_mixer)
    close_all_but([mixer.recency_bias for mixer in mixers], mixers[5].recency_bias, 200.0)
    with torch.no_grad():
        mixers[5].recency_bias.fill_(-200.0)
    names = [f"layer {i} {kind}" for i in range(3) for kind in ("attention", "mlp")]
    newest = {(name, "block 0") for name in [*names[1:5], "output"]}
    return model, newest | {("layer 0 attention", "embeddings"), ("layer 2 mlp", "embeddings")}


def plant_denseformer(small):
    """The last average is the output of layer 0 alone; what comes after that does not matter."""
    model = small("denseformer")
    averages = [layer.depth_average.weight for layer in model.model.layers]
    with torch.no_grad():
        averages[0].copy_(torch.tensor([0.0, 1.0]))
        averages[2].copy_(torch.tensor([0.0, 1.0, 0.0, 0.0]))
    # the first layer itself reads the embeddings, and not by an average
    return model, {("layer 2", "layer 0")}


def plant_mhc(small):
    """No sub-layer but the mlp of layer 1 is written to the streams."""
    model = small("mhc", mhc_num_streams=3, mhc_sinkhorn_iters=3)
    connections = [c for layer in model.model.layers for c in (layer.attn_connection, layer.mlp_connection)]
    for connection in connections:
        connection.projection.data.zero_()
    close_all_but([c.post_logits for c in connections], connections[3].post_logits, -80.0)
    return model, {("layer 1 mlp", "embeddings"), ("output", "embeddings"), ("output", "layer 1 mlp")}


def plant_moda(small):
    """Only layer 2 reads slots, and only the slot of the mlp of layer 0 has a value."""
    model = small("moda_qwen3", moda_gate=True, moda_attn_depth_proj=True)
    layers = model.model.layers
    size = layers[0].self_attn.slot_size
    with torch.no_grad():
        layers[1].self_attn.depth_gate.weight.zero_()
        for module in (layers[0].attn_depth_kv_proj, layers[1].attn_depth_kv_proj, layers[1].mlp_depth_kv_proj):
            module.weight[size:].zero_()
    return model, {("layer 1", "tokens"), ("layer 2", "tokens"), ("layer 2", "layer 0 mlp")}


def plant_value_residual(small):
    """Layer 1 reads its own value alone, layer 2 the first layer's."""
    model = small("value_residual_qwen3")
    with torch.no_grad():
        model.model.layers[1].self_attn.value_mix.weight.copy_(torch.tensor([0.0, 1.0]))
        model.model.layers[2].self_attn.value_mix.weight.copy_(torch.tensor([1.0, 0.0]))
    return model, {("layer 1", "own"), ("layer 2", "layer 0")}


PLANTED = [plant_depth_attention, plant_attnres, plant_denseformer, plant_mhc, plant_moda, plant_value_residual]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.removeprefix("plant_"))
def test_planted_routes(small, inputs, plant):
    """Removing a source changes the loss where a route leads through it, and nowhere else."""
    model, routes = plant(small)
    if plant is plant_depth_attention:
        # its own value is zero, like that of layer 1 as a source
        routes = {route for route in routes if route[0] != "layer 1"}
    found = importance_map(model, inputs)
    matters = {
        (target, source)
        for target in found.targets
        for source in found.sources
        if not math.isnan(found[target, source]) and abs(found[target, source]) > 1e-5
    }
    assert matters == routes


def test_ablation_of_source_layers_of_depth_attention(small, inputs):
    """A value of zero is as good as none, and a source that is not passed leaves the softmax to the others."""
    model = small("depth_olmo2", depth_stride=1)
    attention = model.model.layers[2].self_attn

    def without(_, args, kwargs, keep):
        keys, values = kwargs["source_keys"], kwargs["source_values"]
        if keep:
            return args, kwargs | {"source_values": (torch.zeros_like(values[0]), *values[1:])}
        return args, kwargs | {"source_keys": keys[1:], "source_values": values[1:]}

    for renormalise in (False, True):
        hook = attention.register_forward_pre_hook(
            lambda *call, keep=not renormalise: without(*call, keep=keep), with_kwargs=True
        )
        expected = model(**inputs).logits
        hook.remove()
        assert_equal(ablate(model, inputs, "layer 0", "layer 2", renormalise).logits, expected)
    # everywhere: nobody gets its value
    hook = model.model.layers[0].register_forward_hook(lambda _, __, out: (*out[:2], torch.zeros_like(out[2])))
    expected = model(**inputs).logits
    hook.remove()
    assert_equal(ablate(model, inputs, "layer 0").logits, expected)


@pytest.mark.parametrize("routing", ["replace", "additive"])
def test_ablation_of_blocks_of_attention_residuals(small, inputs, routing):
    """Renormalised, it is the operation on the sources that are left; else what the source adds is taken away."""
    model = small("attnres", attnres_block_size=2, attnres_routing=routing)
    mixer, norm = model.model.layers[2].mlp_mixer, model.model.layers[2].post_attention_layernorm
    # called after the mixer, and not as a part of it
    norm.register_forward_hook(lambda *_: None)
    query, gain, eps = mixer.pseudo_query, mixer.norm.weight, mixer.eps

    def replace(_, args, output, renormalise):
        last = output[0] if routing == "replace" else args[1][-1]
        sources = [*(args[2] if routing == "replace" else args[1][:-1]), last]
        left = [sources[0], *sources[2:]]
        if renormalise:
            mixed = attn_res(left, query, gain, eps=eps)
            if routing == "additive":
                mixed = args[0] + mixed - sum(left) / len(left)
        else:
            weight = attn_res_weights(sources, query, gain, eps=eps)[..., 1:2]
            mixed = output[1 if routing == "replace" else 0]
            mixed = mixed - (weight - (1 / len(sources) if routing == "additive" else 0)) * sources[1]
        return (output[0], mixed, output[2]) if routing == "replace" else (mixed, output[1])

    for renormalise in (False, True):
        hook = mixer.register_forward_hook(lambda *call, r=renormalise: replace(*call, renormalise=r))
        expected = model(**inputs).logits
        hook.remove()
        assert_equal(ablate(model, inputs, "block 0", "layer 2 mlp", renormalise).logits, expected)


@pytest.mark.parametrize(
    ("model_type", "find"),
    [
        ("denseformer", lambda layer: layer.depth_average.weight),
        ("value_residual_qwen2", lambda layer: layer.self_attn.value_mix.weight),
    ],
)
def test_ablation_of_parameters(small, inputs, model_type, find):
    """A weight of zero, and with renormalisation larger others."""
    for renormalise in (False, True):
        model = small(model_type)
        found = ablate(model, inputs, "layer 0", renormalise=renormalise).logits
        with torch.no_grad():
            for i, layer in enumerate(model.model.layers):
                if model_type != "denseformer" and i == 0:
                    continue
                weight, total = find(layer), find(layer).sum()
                weight[1 if model_type == "denseformer" else 0] = 0
                if renormalise:
                    weight *= total / weight.sum()
        assert_equal(found, model(**inputs).logits)


def test_ablation_of_sub_layers_of_mhc(small, inputs):
    """At the readout: the model without what the streams have of a sub-layer."""
    model = small("mhc", mhc_num_streams=3, mhc_sinkhorn_iters=3)
    (weights,) = [row.weights for row in depth_weights(model, inputs) if row.site.target == "output"]
    updates = []
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, out: updates.append(out))
    found = ablate(model, inputs, "layer 1 mlp", "output").logits
    scaled = ablate(model, inputs, "layer 1 mlp", "output", renormalise=True).logits
    part = weights[:, 0, :, 4:5] * updates[0]
    rest = 1 - weights[:, 0, :, 4:5] / weights[:, 0].sum(-1, keepdim=True)
    for logits, factor in ((found, 1), (scaled, rest)):
        hook = model.model.stream_readout.register_forward_hook(lambda _, __, out, f=factor: (out - part) / f)
        assert_equal(logits, model(**inputs).logits)
        hook.remove()


def test_ablation_of_slots(small, inputs):
    """A slot whose value is zero adds nothing; one that is not there leaves its share to the others."""
    model = small("moda_qwen3", attn_implementation="eager")
    expected = ablate(model, inputs, "layer 1 mlp").logits
    hook = model.model.layers[1].register_forward_hook(lambda _, __, out: (*out[:4], torch.zeros_like(out[4])))
    assert_equal(expected, model(**inputs).logits)
    hook.remove()
    # the window of the last layer is moved, by which it does not read the oldest slot
    scaled = ablate(model, inputs, "layer 0 attention", "layer 2", renormalise=True).logits
    model.model.layers[2].self_attn.first_slot = 1
    assert_equal(scaled, model(**inputs).logits)


def test_patching_with_the_same_prompt_changes_nothing(model, inputs):
    sources = {name for row in depth_weights(model, inputs) for name in row.site.sources}
    found = patch(model, inputs, inputs, [*sources]).logits
    counts = inputs["attention_mask"].bool()
    assert_equal(found[counts], model(**inputs).logits[counts])


def test_patching_all_sources_of_a_site_gives_the_other_mix(model, inputs, other_inputs):
    """What one site makes then is what it makes in the other prompt, and a single source makes a part of it."""

    def total_at(last, prompt):
        totals = []
        with torch.no_grad(), watch(model) as watched:

            def note(place, mix):
                if place == last:
                    totals.append(mix.total())

            with viewing(watched.readers, note):
                model(**prompt, use_cache=False)
        return totals[0]

    sites = [row.site for row in depth_weights(model, inputs)]
    last, site = len(sites) - 1, sites[-1]
    own, other = total_at(last, inputs), total_at(last, other_inputs)
    with patched(model, other_inputs, site.sources, site.target):
        assert_equal(total_at(last, inputs), other)
    # what two parts change adds up to the whole
    with patched(model, other_inputs, site.sources[0], site.target):
        first = total_at(last, inputs)
    with patched(model, other_inputs, site.sources[1:], site.target):
        others = total_at(last, inputs)
    assert_equal(first + others, own + other)
    assert (own - other).abs().max() > 1e-3


def test_patched_value_of_depth_attention(small, inputs, other_inputs):
    """From what layers hand each other and the weights that the model returns, in both prompts."""
    model = small("depth_qwen3", depth_stride=1, num_hidden_layers=4)
    values = {}
    for i in (0, 2):
        model.model.layers[i].register_forward_hook(lambda _, __, out, i=i: values.update({i: out[2]}))

    def seen(prompt):
        weights = model(**prompt, output_depth_weights=True).depth_weights[2]
        return values[2], weights[..., :1] * values[0]

    (own, own_part), (_, other_part) = seen(inputs), seen(other_inputs)
    patch(model, inputs, other_inputs, "layer 0", "layer 2")
    assert_equal(values[2], own - own_part + other_part)
    ablate(model, inputs, "layer 0", "layer 2")
    assert_equal(values[2], own - own_part)


@pytest.mark.parametrize("model_type", ["attnres", "mhc", "denseformer"])
def test_patching_all_of_the_output_gives_the_other_logits(small, inputs, other_inputs, model_type):
    """Where the last mix is all that the head reads."""
    model = small(model_type)
    site = depth_weights(model, inputs)[-1].site
    assert_equal(patch(model, inputs, other_inputs, site.sources, site.target).logits, model(**other_inputs).logits)


def test_contexts_can_be_nested_and_leave_in_any_order(model, inputs):
    site = depth_weights(model, inputs)[-1].site
    expected = ablate(model, inputs, site.sources[:2], site.target).logits
    before = model(**inputs).logits
    outer, inner = (ablated(model, source, site.target) for source in site.sources[:2])
    outer.__enter__()
    inner.__enter__()
    with torch.no_grad():
        assert torch.equal(model(**inputs, use_cache=False).logits, expected)
    # weights are those of the model as it then is
    row = depth_weights(model, inputs)[-1]
    assert not row.weights[..., :2].any()
    outer.__exit__(None, None, None)
    row = depth_weights(model, inputs)[-1]
    assert row.weights[..., 0].any() and not row.weights[..., 1].any()
    inner.__exit__(None, None, None)
    assert torch.equal(model(**inputs).logits, before)
    with pytest.raises(KeyError), ablated(model, site.sources[0]):
        raise KeyError
    assert torch.equal(model(**inputs).logits, before)


@pytest.mark.parametrize(
    ("model_type", "fields", "name"),
    [
        ("depth_qwen3", {"depth_stride": 1}, "depth_weights"),
        ("attnres", {"attnres_block_size": 2}, "depth_weights"),
        ("attnres", {"attnres_block_size": 2, "attnres_routing": "additive"}, "depth_weights"),
        ("moda_qwen3", {"attn_implementation": "eager"}, "attentions"),
    ],
)
def test_outputs_have_weights_as_the_model_computed_them(small, inputs, model_type, fields, name):
    """Up to the first site that is changed, and there, they are those of the whole model."""
    model = small(model_type, **fields)
    option = {f"output_{name}": True}
    expected, site = getattr(model(**inputs, **option), name), depth_weights(model, inputs)[-2].site
    with ablated(model, site.sources[0], site.target):
        found = getattr(model(**inputs, **option, use_cache=False), name)
    assert not torch.equal(found[-1], expected[-1])
    for i in range(site.number + 1):
        assert torch.equal(found[i], expected[i])


def gradients_of(model, inputs):
    loss = next_token_loss(model(**inputs, use_cache=False), inputs)
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))


def test_gradients_flow_through_mixes(model, inputs):
    """With the sum of contributions in place of each mix they are those of the model as it is."""
    expected = gradients_of(model, inputs)
    with watch(model) as watched, viewing(watched.editors, lambda _, mix: mix.replace(0, mix.contribution(0))):
        found = gradients_of(model, inputs)
    for name, gradient in expected.items():
        if gradient is None or found[name] is None:
            assert gradient is None and found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-3, msg=name)


def test_gradients_of_an_ablated_model(small, inputs):
    """They are those of the model with a weight of zero, but for this weight."""
    model = small("denseformer")
    with ablated(model, "layer 0", "layer 2"):
        found = gradients_of(model, inputs)
    with torch.no_grad():
        model.model.layers[2].depth_average.weight[1] = 0
    expected = gradients_of(model, inputs)
    assert found.pop("model.layers.2.depth_average.weight")[1] == 0
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.once
def test_generation_of_an_ablated_model(model, inputs):
    """With a cache it chooses what it chooses without one."""
    source = depth_weights(model, inputs)[-1].site.sources[0]
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    with ablated(model, source):
        cached = model.generate(**inputs, **options)
        plain = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(cached, plain)


@pytest.mark.once
@pytest.mark.triton
@pytest.mark.interpreter
def test_fused_kernels_are_not_used_while_a_tool_is_active(small, inputs, monkeypatch):
    import depthmix.modeling.decoder_layers as decoder_layers

    fields = {"depth_stride": 1}
    expected = ablate(small("depth_qwen3", depth_impl="reference", **fields), inputs, "layer 0").logits
    model, calls = small("depth_qwen3", depth_impl="triton", **fields), []
    original = decoder_layers.norm_rotary_mix
    monkeypatch.setattr(decoder_layers, "norm_rotary_mix", lambda *a, **k: calls.append(1) or original(*a, **k))
    assert torch.equal(ablate(model, inputs, "layer 0").logits, expected) and not calls
    model(**inputs)
    assert calls and model.model.layers[1].self_attn.depth_impl == "triton"


@pytest.mark.once
def test_compiled_models_are_seen_too(small, inputs):
    """Before and after, the compiled forward runs; in between, the one that is written."""
    model = small("denseformer")
    expected, count = ablate(model, inputs, "layer 0").logits, []

    def backend(graph, _):
        def counted(*args):
            count.append(1)
            return graph.forward(*args)

        return counted

    # a part of it is enough, and sooner compiled
    model.model.layers[1].depth_average.compile(backend=backend)
    model(**inputs)
    ran = len(count)
    assert ran and torch.equal(ablate(model, inputs, "layer 0").logits, expected) and len(count) == ran
    # also where another model is looked into at the same time, and for longer or shorter
    other = small("value_residual_qwen3")
    first, second = ablated(other, "own"), ablated(model, "layer 0")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    model(**inputs)
    assert len(count) == ran
    second.__exit__(None, None, None)
    model(**inputs)
    assert len(count) > ran


@pytest.mark.once
@pytest.mark.parametrize(
    ("model_type", "saved"), [("attnres", ["attn_mixer", "mlp_mixer", "output_mixer"]), ("mhc", ["attn_connection"])]
)
def test_adapters(small, inputs, model_type, saved):
    """Weights are those of the modules that an adapter has put in place of the model's."""
    peft = pytest.importorskip("peft")
    model = small(model_type)
    site = depth_weights(model, inputs)[-1].site
    expected = ablate(model, inputs, site.sources[0]).logits
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["v_proj"], modules_to_save=saved))
    assert_equal(ablate(wrapped, inputs, site.sources[0]).logits, expected)
    before = depth_weights(wrapped, inputs)[-1].weights
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "modules_to_save" in name and parameter.ndim == 1 and "norm" not in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    assert (depth_weights(wrapped, inputs)[-1].weights - before).abs().max() > 1e-3


@pytest.mark.once
@pytest.mark.usefixtures("own_remote_code")
def test_models_of_saved_code(small, inputs, tmp_path):
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    model = small("moda_qwen3")
    model.save_pretrained(tmp_path / "saved")
    head = get_class_from_dynamic_module("modeling_moda.MoDAQwen3ForCausalLM", str(tmp_path / "saved"))
    loaded = head.from_pretrained(tmp_path / "saved")
    assert type(loaded) is not type(model)
    assert_equal(ablate(loaded, inputs, "tokens").logits, ablate(model, inputs, "tokens").logits)


def test_importance(small, inputs):
    model = small("attnres", attnres_block_size=2)
    found = importance_map(model, inputs, renormalise=True)
    whole = next_token_loss(model(**inputs), inputs)
    part = next_token_loss(ablate(model, inputs, "block 0", "output", renormalise=True), inputs)
    assert found["output", "block 0"].item() == pytest.approx((part - whole).item(), abs=1e-6)
    # what has a single source cannot do without it
    assert found["layer 0 attention", "embeddings"].isnan()
    sizes = importance_map(model, inputs, measure=lambda output: output.logits.abs().max())
    assert sizes.values.shape == found.values.shape and sizes["layer 0 attention", "embeddings"] != 0


def test_loss_counts_no_padding(inputs):
    logits = torch.randn(2, 7, 61)
    output = type("Output", (), {"logits": logits})
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten(), reduction="none"
    )
    # of the second row the tokens after the first three
    torch.testing.assert_close(next_token_loss(output, inputs), torch.cat([losses[:6], losses[8:]]).mean())


@pytest.mark.once
def test_refuses(small, inputs, other_inputs):
    model = small("denseformer")
    with pytest.raises(ValueError, match="source='layer 7': must be one of embeddings, layer 0, layer 1, layer 2"):
        ablate(model, inputs, "layer 7")
    with pytest.raises(ValueError, match="target='output': must be one of layer 0, layer 1, layer 2"):
        ablate(model, inputs, "layer 0", target="output")
    with pytest.raises(ValueError, match="source='layer 2': is not read by layer 1, whose sources are embeddings, "):
        ablate(model, inputs, "layer 2", target="layer 1")
    for source, target in (([], None), ("layer 0", [])):
        with pytest.raises(ValueError, match="must name at least one"):
            ablate(model, inputs, source, target)
    with pytest.raises(ValueError, match="must be one of none, since the model mixes nothing"):
        ablate(small("depth_qwen3", depth_stride=0), inputs, "own")
    # an average that has nothing else
    with torch.no_grad():
        model.model.layers[0].depth_average.weight.copy_(torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match="at layer 0 the sources besides layer 0 have no weight"):
        ablate(model, inputs, "layer 0", renormalise=True)
    shorter = {"input_ids": other_inputs["input_ids"][:, :5]}
    with pytest.raises(ValueError, match=r"\[2, 1, 5, 32\], and must have \[2, 1, 7, 32\]: as many rows"):
        patch(model, inputs, shorter, "layer 0")
    with pytest.raises(ValueError, match="give a measure"):
        importance_map(small("denseformer", ending="Model"), inputs)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    with (
        pytest.raises(RuntimeError, match="gradient_checkpointing: layers would be computed again"),
        ablated(model.train(), "layer 0"),
    ):
        model(**inputs)
    assert torch.isfinite(ablate(model, inputs, "layer 0").logits).all()
