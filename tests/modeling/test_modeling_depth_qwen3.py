# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""DepthQwen3 inside transformers: the checks of every causal language model, and what is its own."""

import copy
import gc
import re
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from causal_lm_checks import HOST_CACHE_NAME, CausalLMChecks, assert_close, new_cache, next_token_loss
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModel, DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthmix import DepthQwen3Config, DepthQwen3ForCausalLM, DepthQwen3ForSequenceClassification
from depthmix.kernels import depth_dispatch
from depthmix.modeling import modeling_depth_attention
from depthmix.modeling.decoder_layers import eager_attention
from depthmix.modeling.lent_weights import DepthRMSNorm


SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
STRIDES = pytest.mark.parametrize(
    "fields",
    [
        {"depth_stride": 2},
        {"depth_stride": 1, "key_norm_position": "after_rope"},
        {"depth_stride": 3, "depth_window": 1},
        {"num_hidden_layers": 9, "depth_stride": 4, "depth_window": 2},
    ],
    ids=lambda fields: " ".join(f"{name}={value}" for name, value in fields.items()),
)


@pytest.fixture
def assert_awake(token_ids):
    """As the shared one, but against the same model without sources: one that norms its keys elsewhere has no twin."""

    def assert_awake(model):
        config = copy.deepcopy(model.config)
        config.depth_stride = 0
        asleep = type(model)(config).eval()
        asleep.load_state_dict(model.state_dict())
        ids = token_ids(2, 12)
        with torch.no_grad():
            assert (model(ids).logits - asleep(ids).logits).abs().max() > 0.05

    return assert_awake


class TestCausalLM(CausalLMChecks):
    variants = {
        "half": {},
        "every layer": {"depth_stride": 1, "key_norm_position": "after_rope", "num_attention_heads": 6},
        "sliding": SLIDING | {"depth_stride": 3, "depth_window": 1},
        "looped": {"num_hidden_layers": 2, "num_loops": 3, "depth_stride": 3}
        | {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
    }
    has_host_variants = True
    looped_variants = {"looped"}
    absolute_variants = {"every layer"}
    sequence_classification_class = DepthQwen3ForSequenceClassification


class TestWithoutSources:
    """Stride 0, and what no stride may change: then it is Qwen3, to the last bit."""

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @pytest.mark.parametrize("changes", [{}, SLIDING, {"tie_word_embeddings": True}], ids=["plain", "sliding", "tied"])
    def test_is_vanilla(self, build, vanilla_twin, token_ids, attention, changes):
        model = build(**changes, depth_stride=0, depth_window=2, attn_implementation=attention)
        twin = vanilla_twin(model)
        twin.set_attn_implementation(attention)
        ids = token_ids(2, 12)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        # packed: only without a cache is it seen, by both
        packed = {"position_ids": torch.arange(12).remainder(7).expand(2, -1)}
        for given in (
            {},
            {"attention_mask": mask},
            packed,
            {**packed, "use_cache": False},
            {"labels": ids, "num_items_in_batch": 7},
        ):
            ours, stock = model(ids, **given), twin(ids, **given)
            assert torch.equal(ours.logits, stock.logits)
        assert torch.equal(ours.loss, stock.loss)
        ours.loss.backward()
        stock.loss.backward()
        for (name, parameter), (stock_name, stock_parameter) in zip(
            model.named_parameters(), twin.named_parameters(), strict=True
        ):
            assert name == stock_name
            assert torch.equal(parameter.grad, stock_parameter.grad), name

    def test_is_vanilla_with_dropout(self, build, vanilla_twin, token_ids):
        model = build(depth_stride=0, attention_dropout=0.5).train()
        twin = vanilla_twin(model).train()
        twin.config.attention_dropout = 0.5
        for layer in twin.model.layers:
            layer.self_attn.attention_dropout = 0.5
        logits = []
        for each in (model, twin, model):
            torch.manual_seed(len(logits) // 2)
            logits.append(each(token_ids(2, 12)).logits)
        assert torch.equal(logits[0], logits[1])
        assert not torch.equal(logits[0], logits[2])

    def test_single_layer_is_vanilla(self, build, vanilla_twin, token_ids):
        model = build(num_hidden_layers=1)
        assert torch.equal(model(token_ids(2, 5)).logits, vanilla_twin(model)(token_ids(2, 5)).logits)

    @pytest.mark.parametrize("stride", [0, 1, 2])
    def test_same_seed_same_initial_weights(self, tiny, stride):
        torch.manual_seed(3)
        model = DepthQwen3ForCausalLM(DepthQwen3Config(**tiny, depth_stride=stride))
        torch.manual_seed(3)
        stock = Qwen3ForCausalLM(Qwen3Config(**tiny))
        ours, expected = model.state_dict(), stock.state_dict()
        assert list(ours) == list(expected)
        assert all(torch.equal(ours[name], expected[name]) for name in ours)

    def test_no_parameters_and_buffers_of_its_own(self, build, vanilla_twin):
        model = build(depth_stride=1)
        twin = vanilla_twin(model)
        for kind in ("named_parameters", "named_buffers", "named_modules"):
            assert [name for name, _ in getattr(model, kind)()] == [name for name, _ in getattr(twin, kind)()]
        assert model.num_parameters() == twin.num_parameters()


LOOPED = {"num_hidden_layers": 3, "num_loops": 2}


class TestLooped:
    @torch.no_grad()
    @pytest.mark.parametrize("fields", [{"depth_stride": 0}, {"depth_stride": 1}, {"depth_stride": 2}, {}])
    def test_is_a_deeper_model_with_repeated_weights(self, build, token_ids, fields):
        model = build(**LOOPED, **fields)
        unrolled = build(num_hidden_layers=6, **{"depth_stride": 3} | fields)
        state = model.state_dict()
        names = {
            name: re.sub(r"layers\.(\d)", lambda m: f"layers.{int(m[1]) % 3}", name) for name in unrolled.state_dict()
        }
        unrolled.load_state_dict({name: state[source] for name, source in names.items()})
        ids = token_ids(2, 9)
        ours, expected = (m(ids, output_hidden_states=True, output_depth_weights=True) for m in (model, unrolled))
        assert torch.equal(ours.logits, expected.logits)
        for kind in ("hidden_states", "depth_weights"):
            assert all(torch.equal(*pair) for pair in zip(ours[kind], expected[kind], strict=True))
        tokens = [m.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None) for m in (model, unrolled)]
        assert torch.equal(*tokens)

    def test_one_pass_more_makes_a_difference(self, build, token_ids):
        logits = [
            build(num_hidden_layers=3, num_loops=loops, depth_stride=0)(token_ids(2, 9)).logits for loops in (1, 2)
        ]
        assert (logits[0] - logits[1]).abs().max() > 0.05

    def test_default_stride_is_half_of_all_layers(self):
        assert DepthQwen3Config(**LOOPED).depth_stride == 3
        assert DepthQwen3Config(num_hidden_layers=4).depth_stride == 2

    def test_configuration_that_caches_get(self):
        config = DepthQwen3Config(**LOOPED)
        unrolled = config.get_text_config(decoder=True)
        assert (unrolled.num_hidden_layers, unrolled.layer_types) == (6, ["full_attention"] * 6)
        assert unrolled.get_text_config(decoder=True) is unrolled
        assert config.get_text_config() is config and config.num_hidden_layers == 3
        plain = DepthQwen3Config()
        assert plain.get_text_config(decoder=True) is plain

    @torch.no_grad()
    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    def test_every_pass_has_its_slots(self, build, token_ids, kind):
        model = build(**LOOPED)
        cache = new_cache(model, kind)
        model(token_ids(2, 9), past_key_values=cache)
        assert len(cache.layers) == 6
        keys = [layer.keys[:, :, :9] for layer in cache.layers]
        assert all((keys[i] - keys[j]).abs().max() > 0.1 for i in range(6) for j in range(i))

    @torch.no_grad()
    def test_early_exit_leaves_in_the_first_pass(self, build, token_ids):
        model, ids = build(**LOOPED), token_ids(2, 7)
        states = model(ids, output_hidden_states=True).hidden_states
        model.config.num_hidden_layers = 2
        exited = model(ids).logits
        model.config.num_hidden_layers = 3
        assert_close(exited, model.lm_head(model.model.norm(states[2])))

    @torch.no_grad()
    def test_a_server_keeps_each_pass(self, build, token_ids, monkeypatch):
        """Token by token, with an attention function that finds keys and values at the module it is called for."""

        def attend(module, query, key, value, attention_mask, **kwargs):
            earlier = getattr(module, "kept", (key[:, :, :0], value[:, :, :0]))
            module.kept = [torch.cat(each, 2) for each in zip(earlier, (key, value), strict=True)]
            return eager_attention(module, query, *module.kept, None, **kwargs)

        model, ids = build(**LOOPED), token_ids(1, 6)
        expected = model(ids).logits
        monkeypatch.setattr(modeling_depth_attention, "SERVER_ATTENTIONS", ("keeps",))
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "keeps", attend)
        model.config._attn_implementation = "keeps"
        options = {"attention_mask": torch.zeros(1, 1, 1, 1), "use_cache": False}
        with pytest.raises(ValueError, match="keep the keys and values of one pass only"):
            model(ids[:, :1], **options)
        for layer in model.model.layers:
            layer.self_attn.later_passes = nn.ModuleList([nn.Module()])
        found = [model(ids[:, [i]], position_ids=torch.tensor([[i]]), **options).logits for i in range(6)]
        assert_close(torch.cat(found, 1), expected)

    def test_other_keepers_of_keys_and_values_are_refused(self, build, token_ids):
        with pytest.raises(ValueError, match="continuous batching and attention functions of servers"):
            build(**LOOPED)(token_ids(1, 7), attention_instances={})
        with pytest.raises(ValueError, match="continuous batching and attention functions of servers"):
            build(**LOOPED).model.layers[0].self_attn(
                torch.zeros(1, 3, 64), None, None, past_key_values=SimpleNamespace()
            )

    @pytest.mark.parametrize("server", ["vllm", "sglang"])
    def test_servers_are_refused(self, build, server, monkeypatch):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, server, lambda *args, **kwargs: pytest.fail("one pass only"))
        config = build(**LOOPED).config
        with pytest.raises(ValueError, match=f"num_loops=2: must be 1 with attn_implementation='{server}'"):
            AutoModel.from_config(config, attn_implementation=server)

    def test_cache_of_one_pass_is_refused(self, build, token_ids):
        model = build(**LOOPED)
        cache = DynamicCache(config=model.config)
        del cache.layers[3:]
        with pytest.raises(ValueError, match="The cache has 3 layers: must have num_loops.* = 6"):
            model(token_ids(1, 7), past_key_values=cache)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_gradients_add_up_over_the_passes(self, build, token_ids, use_reentrant):
        model, ids = build(**LOOPED, depth_stride=1).double().train(), token_ids(2, 7)
        unrolled = build(num_hidden_layers=6, depth_stride=1).double().train()
        state = model.state_dict()
        names = {
            name: re.sub(r"layers\.(\d)", lambda m: f"layers.{int(m[1]) % 3}", name) for name in unrolled.state_dict()
        }
        unrolled.load_state_dict({name: state[source] for name, source in names.items()})
        unrolled(ids, labels=ids).loss.backward()
        expected = dict.fromkeys(state, 0)
        for name, parameter in unrolled.named_parameters():
            expected[names[name]] = expected[names[name]] + parameter.grad
        for checkpointing in (False, True):
            if checkpointing:
                with warnings.catch_warnings(action="ignore", category=FutureWarning):
                    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            for name, parameter in model.named_parameters():
                assert (parameter.grad - expected[name]).norm() <= 1e-10 * expected[name].norm(), name


def layer_tensors(model, ids, **kwargs):
    """For each layer its unmixed value, and the key and mixed value that it keeps in the cache."""
    plain, hooks = [], []
    for layer in model.model.layers:
        projection = layer.self_attn.v_proj
        hooks.append(projection.register_forward_hook(lambda _, __, output: plain.append(output)))
    cache = new_cache(model)
    model(ids, use_cache=True, **{HOST_CACHE_NAME: cache}, **kwargs)
    for hook in hooks:
        hook.remove()
    shape = (*ids.shape, model.config.num_key_value_heads, model.config.head_dim)
    return [
        (value.view(shape).transpose(1, 2), layer.keys, layer.values)
        for value, layer in zip(plain, cache.layers, strict=True)
    ]


class TestDepthWeights:
    @STRIDES
    @torch.no_grad()
    def test_reproduce_the_cached_values(self, build, token_ids, assert_awake, fields):
        model, ids = build(**fields), token_ids(2, 7)
        assert_awake(model)
        all_weights = model(ids, output_depth_weights=True).depth_weights
        layers = layer_tensors(model, ids)
        sources_of = model.config.depth_sources
        assert len(all_weights) == model.config.num_hidden_layers
        for (plain, _, mixed), sources, weights in zip(layers, sources_of, all_weights, strict=True):
            assert weights.shape == (2, 2, 7, len(sources) + 1)
            assert weights.dtype is torch.float32
            assert_close(weights.sum(-1), torch.ones(2, 2, 7), 1e-6)
            entries = torch.stack([*(layers[i][2] for i in sources), plain], dim=-1)
            assert_close((entries * weights.unsqueeze(3)).sum(-1), mixed)
            if sources:
                assert (mixed - plain).abs().max() > 0.05
            else:
                assert torch.equal(mixed, plain)

    @torch.no_grad()
    def test_where_they_are_returned(self, build, token_ids):
        model, ids = build(), token_ids(2, 7)
        plain = model(ids)
        assert plain.depth_weights is None
        asked = model(ids, output_depth_weights=True)
        assert torch.equal(asked.logits, plain.logits)
        base = model.model(ids, output_depth_weights=True)
        assert torch.equal(base.last_hidden_state, model.model(ids).last_hidden_state)
        assert model.model(ids).depth_weights is None
        tuples = [each(ids, output_depth_weights=True, return_dict=False)[-1] for each in (model, model.model)]
        for given in (base.depth_weights, *tuples):
            assert len(given) == 4
            assert all(torch.equal(*pair) for pair in zip(given, asked.depth_weights, strict=True))

    @torch.no_grad()
    def test_default_of_the_configuration(self, build, token_ids):
        model, ids = build(output_depth_weights=True), token_ids(2, 7)
        for each in (model, model.model):
            assert len(each(ids).depth_weights) == 4
            assert each(ids, output_depth_weights=False).depth_weights is None
            # as for what stock models record
            assert each(ids, output_depth_weights=None).depth_weights is None
        expected = build().generate(ids, max_new_tokens=3, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)

    @torch.no_grad()
    def test_together_with_other_outputs(self, build, token_ids):
        model, ids = build(attn_implementation="eager"), token_ids(2, 7)
        outputs = model(ids, output_depth_weights=True, output_hidden_states=True, output_attentions=True)
        assert len(outputs.hidden_states) == 5
        assert [attention.shape[-1] for attention in outputs.attentions] == [7] * 4
        assert [weights.shape[-1] for weights in outputs.depth_weights] == [1, 2, 2, 3]

    @torch.no_grad()
    def test_of_new_tokens_on_top_of_a_cache(self, build, token_ids):
        model, ids = build(depth_stride=1), token_ids(2, 7)
        expected = model(ids, output_depth_weights=True).depth_weights
        cache = new_cache(model)
        model(ids[:, :5], use_cache=True, **{HOST_CACHE_NAME: cache})
        outputs = model(ids[:, 5:], use_cache=True, output_depth_weights=True, **{HOST_CACHE_NAME: cache})
        for weights, full in zip(outputs.depth_weights, expected, strict=True):
            assert_close(weights, full[:, :, 5:])

    @torch.no_grad()
    def test_without_sources_they_are_one(self, build, token_ids):
        for weights in build(depth_stride=0)(token_ids(2, 7), output_depth_weights=True).depth_weights:
            assert torch.equal(weights, torch.ones(2, 2, 7, 1))

    @torch.no_grad()
    def test_are_fp32_in_a_low_precision_model(self, build, token_ids):
        model, ids = build(), token_ids(2, 7)
        exact = model(ids, output_depth_weights=True).depth_weights
        for weights, expected in zip(
            model.bfloat16()(ids, output_depth_weights=True).depth_weights, exact, strict=True
        ):
            assert weights.dtype is torch.float32
            assert_close(weights.sum(-1), torch.ones(2, 2, 7), 1e-6)
            assert_close(weights, expected, 0.1)

    def test_have_gradients(self, build, token_ids):
        """So that a loss on them is possible."""
        model = build()
        model(token_ids(2, 7), output_depth_weights=True).depth_weights[3][..., 0].mean().backward()
        for layer, name in ((3, "q_proj"), (3, "k_proj"), (2, "k_proj"), (0, "k_proj"), (0, "v_proj")):
            assert getattr(model.model.layers[layer].self_attn, name).weight.grad.abs().max() > 0


class TestSources:
    @STRIDES
    @torch.no_grad()
    def test_live_until_their_last_reader(self, build, token_ids, fields):
        """So that memory does not grow with the number of layers. Seen from outside, by hooks."""
        model = build(**fields)
        produced, alive_at = {}, []

        def remember(layer):
            def hook(_, __, output):
                if isinstance(output, tuple):
                    produced[layer] = [weakref.ref(tensor) for tensor in output[1:]]

            return hook

        def look(_, __):
            alive_at.append({i for i, references in produced.items() if any(one() is not None for one in references)})

        for i, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(look)
            layer.register_forward_hook(remember(i))
        gc.disable()
        try:
            outputs = model(token_ids(2, 7), use_cache=False)
        finally:
            gc.enable()
        sources = model.config.depth_sources
        for layer, alive in enumerate(alive_at):
            assert alive == {i for i in range(layer) if any(i in read for read in sources[layer:])}
        assert set(produced) == {i for read in sources for i in read}
        assert all(one() is None for references in produced.values() for one in references)
        assert outputs.logits.isfinite().all()

    @STRIDES
    @torch.no_grad()
    def test_share_the_copy_of_a_cache_that_was_empty(self, build, token_ids, fields):
        """So that a long prompt takes no more memory than it does without mixing."""
        model, ids, handed_on = build(**fields), token_ids(2, 9), {}
        for i, layer in enumerate(model.model.layers):
            layer.register_forward_hook(lambda _, __, output, i=i: handed_on.update({i: output[1:]}))
        cache = DynamicCache(config=model.config)
        model(ids[:, :7], past_key_values=cache)
        for i in {i for read in model.config.depth_sources for i in read}:
            kept = cache.layers[i].keys, cache.layers[i].values
            assert [x.data_ptr() for x in handed_on[i]] == [x.data_ptr() for x in kept]
        logits = model(ids[:, 7:], past_key_values=cache).logits
        assert_close(logits, model(ids, use_cache=False).logits[:, 7:])

    @torch.no_grad()
    def test_other_layers_hand_on_nothing(self, build, token_ids):
        """Nor do they hold their key and value for longer than their attention needs."""
        # with this order of norm and rotation the key norm's output is the key itself
        model, keys, alive = build(depth_stride=3, key_norm_position="after_rope"), [], []
        for i, layer in enumerate(model.model.layers):
            layer.self_attn.k_norm.register_forward_hook(lambda _, __, key: keys.append(weakref.ref(key)))
            layer.mlp.register_forward_pre_hook(lambda _, __, i=i: alive.append(keys[i]() is not None))
        model(token_ids(2, 7), use_cache=False)
        assert alive == [True, False, False, False]

    @STRIDES
    def test_gradients_of_every_layer(self, build, token_ids, fields):
        model, ids = build(**fields), token_ids(2, 7)
        model(ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.abs().sum() > 0, name

    @STRIDES
    def test_layer_returns_what_later_layers_read(self, build, token_ids, fields):
        model, outputs, copies = build(**fields), {}, {}

        def remember(i):
            def hook(_, args, output):
                outputs[i] = (args, output)
                copies[i] = [tensor.clone() for tensor in output] if isinstance(output, tuple) else None

            return hook

        for i, layer in enumerate(model.model.layers):
            layer.register_forward_hook(remember(i))
        model(token_ids(2, 7))
        for i, read in enumerate(model.config.depth_sources):
            args, output = outputs[i]
            sources = [tensor for source in read for tensor in outputs[source][1][1:]]
            # flat positional tensors, the hidden states first
            assert len(args) == 1 + len(sources)
            assert all(given is source for given, source in zip(args[1:], sources, strict=True))
            is_read = any(i in later for later in model.config.depth_sources)
            assert isinstance(output, tuple) == is_read
            # nobody has written into them
            assert not is_read or all(torch.equal(*pair) for pair in zip(output, copies[i], strict=True))

    def test_single_layer_can_be_replayed(self, build, token_ids):
        """As calibration of quantisers does: with the arguments that a hook saw."""
        model, calls = build(depth_stride=1), []
        layer = model.model.layers[3]
        hook = layer.register_forward_hook(lambda *call: calls.append(call[1:]), with_kwargs=True)
        with torch.no_grad():
            model(token_ids(2, 7), use_cache=False)
            hook.remove()
            ((args, kwargs, output),) = calls
            assert len(args) == 7
            assert torch.equal(layer(*args, **kwargs), output)
            # the reader of no source and source of all
            hidden_states, *key_and_value = model.model.layers[0](args[0], **kwargs)
            assert hidden_states.shape == args[0].shape and len(key_and_value) == 2

    def test_layer_that_did_not_run(self, build, token_ids):
        class Skipped(nn.Module):
            def forward(self, hidden_states, *sources, **kwargs):
                return hidden_states

        model = build()
        model.model.layers[0] = Skipped()
        with pytest.raises(RuntimeError, match="Layer 0 is not the one that the model was built with"):
            model(token_ids(2, 7))
        model = build()
        model.model.layers[2] = Skipped()
        with pytest.raises(RuntimeError, match="Layer 2 is not the one that the model was built with"):
            model(token_ids(2, 7))
        # moves a source to where nobody reads it
        model = build()
        del model.model.layers[1]
        with pytest.raises(RuntimeError, match="Layer 1 is not the one that the model was built with"):
            model(token_ids(2, 7))
        # nobody reads this one
        model = build()
        model.model.layers[1] = Skipped()
        model(token_ids(2, 7))

    @torch.no_grad()
    def test_early_exit(self, build, token_ids):
        """transformers changes the number of layers in the configuration for the time of a call."""
        model, ids = build(depth_stride=1), token_ids(2, 7)
        states = model(ids, output_hidden_states=True).hidden_states
        model.config.num_hidden_layers = 2
        exited = model(ids).logits
        model.config.num_hidden_layers = 4
        assert_close(exited, model.lm_head(model.model.norm(states[2])))

    def test_pipeline_plan_is_not_inherited(self):
        assert Qwen3ForCausalLM._pp_plan and DepthQwen3ForCausalLM._pp_plan is None
        assert DepthQwen3ForCausalLM._tp_plan == Qwen3ForCausalLM._tp_plan


class TestImplementations:
    @pytest.mark.interpreter
    def test_explicit_kernel_does_not_fall_back(self, build, token_ids):
        for fields in ({}, {"depth_stride": 0}):
            with pytest.raises(RuntimeError, match="impl='triton': .* not torch.float64"):
                build(depth_impl="triton", **fields).double()(token_ids(2, 7))

    def test_explicit_kernel_needs_triton(self, tiny, monkeypatch):
        monkeypatch.setattr(depth_dispatch, "triton", None)
        with pytest.raises(RuntimeError, match="impl='triton': .* needs the package triton"):
            DepthQwen3ForCausalLM(DepthQwen3Config(**tiny, depth_impl="triton"))

    @pytest.mark.interpreter
    @pytest.mark.parametrize(
        "fields", [{"depth_stride": 2}, {"depth_stride": 1, "key_norm_position": "after_rope"}], ids=["half", "every"]
    )
    def test_kernels_are_the_same_function(self, build, token_ids, fields):
        """Loss, gradients and generated text; without a GPU the kernels are interpreted."""
        ids = token_ids(2, 7)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        results = []
        for impl in ("reference", "triton"):
            model = build(depth_impl=impl, **fields)
            loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
            loss.backward()
            tokens = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None)
            results.append((loss, tokens, {name: p.grad for name, p in model.named_parameters()}))
        (loss, tokens, grads), (kernel_loss, kernel_tokens, kernel_grads) = results
        assert_close(kernel_loss, loss)
        assert torch.equal(kernel_tokens, tokens)
        for name, grad in grads.items():
            assert (kernel_grads[name] - grad).norm() < 1e-4 * grad.norm(), name

    @pytest.mark.interpreter
    def test_kernels_without_mixing(self, build, vanilla_twin, token_ids):
        model, ids = build(depth_impl="triton", depth_stride=0), token_ids(2, 7)
        assert_close(model(ids).logits, vanilla_twin(model)(ids).logits)

    @pytest.mark.interpreter
    def test_autocast_with_kernels(self, build, token_ids):
        ids = token_ids(2, 7)
        exact = build(depth_stride=1)(ids).logits
        errors = []
        for impl in ("reference", "triton"):
            with torch.autocast("cpu", torch.bfloat16):
                errors.append((build(depth_impl=impl, depth_stride=1)(ids).logits.float() - exact).norm())
        assert errors[1] < 1.5 * errors[0]

    @pytest.mark.interpreter
    def test_compiled_with_kernels(self, build, token_ids):
        model, ids = build(depth_impl="triton", depth_stride=1), token_ids(2, 7)
        model(ids, labels=ids).loss.backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        torch.compile(model, fullgraph=True, backend="aot_eager")(ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad - expected[name]).norm() < 1e-4 * expected[name].norm(), name

    @pytest.mark.interpreter
    @torch.no_grad()
    def test_exported_with_kernels(self, build, token_ids):
        model, ids = build(depth_impl="triton", num_hidden_layers=2), token_ids(2, 7)
        program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
        calls = [node for node in program.graph.nodes if "norm_rotary_mix" in str(node.target)]
        assert len(calls) == model.config.num_hidden_layers
        assert_close(program.module()(input_ids=ids, use_cache=False).logits, model(ids).logits)

    @pytest.mark.interpreter
    @torch.no_grad()
    @pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
    @pytest.mark.parametrize(
        "change",
        [
            lambda norm: norm.register_forward_hook(lambda _, __, output: 2 * output),
            pytest.param(
                lambda norm: norm.register_forward_pre_hook(lambda _, args: (args[0] * torch.arange(16),)),
                marks=pytest.mark.exhaustive,
            ),
            lambda norm: setattr(norm, "forward", lambda x: 2 * x),
        ],
        ids=["hook", "pre_hook", "forward"],
    )
    def test_what_hangs_on_a_norm_is_called(self, build, token_ids, norm, change):
        ids, results = token_ids(2, 7), []
        for impl in ("reference", "triton"):
            model = build(depth_impl=impl)
            plain = model(ids).logits
            change(getattr(model.model.layers[1].self_attn, norm))
            results.append(model(ids).logits)
            assert (results[-1] - plain).abs().max() > 1e-2
        assert_close(*results)

    @pytest.mark.interpreter
    @torch.no_grad()
    def test_hooks_on_all_modules_are_called(self, build, token_ids):
        ids, results = token_ids(2, 7), []
        for impl in ("reference", "triton"):
            model = build(depth_impl=impl)
            plain = model(ids).logits
            with register_module_forward_hook(lambda m, _, out: 2 * out if isinstance(m, DepthRMSNorm) else None):
                results.append(model(ids).logits)
            assert (results[-1] - plain).abs().max() > 1e-2
        assert_close(*results)

    @torch.no_grad()
    def test_attention_gets_mixed_values(self, build, token_ids, monkeypatch):
        seen = []

        def attention(module, query, key, value, attention_mask, **kwargs):
            seen.append((key, value))
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

        model, ids = build(depth_stride=1), token_ids(1, 7)
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "server", attention)
        served = AutoModel.from_config(build(depth_stride=1).config, attn_implementation="server").eval()
        served.load_state_dict(model.model.state_dict())
        served(input_ids=ids, position_ids=torch.arange(7)[None], use_cache=False, return_dict=False)
        kept = layer_tensors(model, ids)
        for (key, value), (_, cached_key, mixed) in zip(seen, kept, strict=True):
            assert_close(key, cached_key)
            assert_close(value, mixed)
        assert all(
            (value - plain).abs().max() > 0.05 for (_, value), (plain, _, _) in zip(seen[1:], kept[1:], strict=True)
        )


class TestPositions:
    @torch.no_grad()
    @pytest.mark.parametrize(("key_norm_position", "moves"), [("before_rope", False), ("after_rope", True)])
    def test_shift_of_all_positions(self, build, token_ids, key_norm_position, moves):
        """The norm's weight does not turn with the key, so that after the rotation positions are absolute."""
        model, ids = build(depth_stride=1, key_norm_position=key_norm_position), token_ids(2, 7)
        logits, shifted = (model(ids, position_ids=torch.arange(7)[None] + start).logits for start in (0, 40))
        assert ((logits - shifted).abs().max() > 1e-3) == moves

    def test_padding_gets_no_gradient(self, build, token_ids):
        """A padded token has entries to mix, but they reach no real token."""
        model, ids = build(depth_stride=1), token_ids(2, 8)
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        logits = model(inputs_embeds=embeds, attention_mask=mask).logits
        (next_token_loss(logits[:1, 3:], ids[:1, 3:]) + next_token_loss(logits[1:], ids[1:])).backward()
        assert (embeds.grad[0, :3] == 0).all()
        assert (embeds.grad[0, 3:-1].abs().amax(-1) > 0).all()


@torch.no_grad()
def test_classification_is_awake(build, token_ids):
    classifier, plain = (
        build(model_class=DepthQwen3ForSequenceClassification, num_labels=3, depth_stride=stride) for stride in (1, 0)
    )
    plain.load_state_dict(classifier.state_dict())
    ids = token_ids(4, 7)
    assert (classifier(ids).logits - plain(ids).logits).abs().max() > 0.05
