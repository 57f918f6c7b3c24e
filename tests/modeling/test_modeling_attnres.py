# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""AttnRes inside transformers: the checks of every causal language model, and what is its own."""

import functools
import gc
import warnings
import weakref

import pytest
import torch
from causal_lm_checks import HOST_CACHE_NAME, CausalLMChecks, assert_close, new_cache
from plain_attnres import plain_sources
from torch import nn
from torch.nn.utils import prune
from transformers import Qwen3Config, Qwen3ForCausalLM

from depthmix import AttnResConfig, AttnResForCausalLM, AttnResForSequenceClassification
from depthmix.kernels import attn_res_phase_1
from depthmix.modeling import modeling_attnres
from depthmix.modeling.modeling_attnres import AttnResMixer, AttnResSite


LLAMA = {"use_qk_norm": False, "attention_bias": True, "mlp_bias": True}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}


@pytest.fixture
def build(build):
    # less of the wide initialisation, since small mixes that are normalised again amplify rounding
    return functools.partial(build, model_class=AttnResForCausalLM, initializer_range=0.08)


class TestCausalLM(CausalLMChecks):
    variants = {
        "block": {"attnres_block_size": 4},
        "full": {"attnres_variant": "full", "num_attention_heads": 6},
        "sum": {"attnres_block_size": 3, "attnres_scale": "sum", "attnres_recency_bias": True} | SLIDING,
        "cumulative": {"attnres_variant": "cumulative", "attnres_block_size": 4, "attnres_recency_bias": True} | LLAMA,
        "additive": {"attnres_block_size": 3, "attnres_routing": "additive", "attnres_recency_bias": True} | SLIDING,
    }
    idle_module = "layers.0.attn_mixer"
    sequence_classification_class = AttnResForSequenceClassification


def spread(fields):
    return " ".join(f"{name}={value}" for name, value in fields.items())


# with additive routing nothing is mixed in two phases, and layers return other things
REPLACING = {name: fields for name, fields in TestCausalLM.variants.items() if name != "additive"}
VARIANTS = pytest.mark.parametrize("fields", REPLACING.values(), ids=REPLACING)
# six layers, so that there are several blocks
DEEP = {"num_hidden_layers": 6, "attnres_block_size": 4}


class TestZeroQueries:
    """Where the queries start, the scale "sum" makes it the vanilla model."""

    BACKBONES = {
        "qwen3": {},
        "qwen3 sliding and tied": SLIDING | {"tie_word_embeddings": True},
        "llama": {"use_qk_norm": False},
        "llama with biases": LLAMA,
    }

    @staticmethod
    def put_to_sleep(model):
        with torch.no_grad():
            for mixer in model.modules():
                if isinstance(mixer, AttnResSite):
                    mixer.pseudo_query.zero_()
        return model

    @pytest.mark.parametrize("blocks", [{"attnres_variant": "full"}, {"attnres_block_size": 3}, {}], ids=spread)
    @pytest.mark.parametrize("backbone", BACKBONES)
    def test_sum_is_vanilla(self, build, vanilla_twin, token_ids, assert_awake, backbone, blocks):
        model = build(**self.BACKBONES[backbone], **blocks, attnres_scale="sum")
        assert_awake(model)
        twin = vanilla_twin(self.put_to_sleep(model))
        ids = token_ids(2, 12)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        packed = {"position_ids": torch.arange(12).remainder(7).expand(2, -1), "use_cache": False}
        for given in ({}, {"attention_mask": mask}, packed, {"labels": ids, "num_items_in_batch": 7}):
            ours, stock = model(ids, **given), twin(ids, **given)
            assert_close(ours.logits, stock.logits, 1e-5)
        ours.loss.backward()
        stock.loss.backward()
        for name, parameter in twin.named_parameters():
            gradient = model.get_parameter(name).grad
            assert (gradient - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name

    @pytest.mark.parametrize(
        "blocks",
        [
            {"attnres_variant": "full", "attnres_recency_bias": True},
            {"attnres_block_size": 3, "attnres_scale": "sum"},
            {"attnres_block_size": 4, "use_qk_norm": False},
            {"attnres_variant": "cumulative", "attnres_recency_bias": True},
        ],
        ids=spread,
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_additive_is_vanilla_bit_for_bit(self, build, vanilla_twin, token_ids, assert_awake, blocks, dtype):
        model = build(**blocks, attnres_routing="additive")
        assert_awake(model)
        with torch.no_grad():
            for mixer in model.modules():
                if getattr(mixer, "recency_bias", None) is not None:
                    mixer.recency_bias.zero_()
        twin = vanilla_twin(self.put_to_sleep(model)).to(dtype)
        model, ids = model.to(dtype), token_ids(2, 12)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        ours, stock = model(ids, attention_mask=mask, labels=ids), twin(ids, attention_mask=mask, labels=ids)
        assert torch.equal(ours.logits, stock.logits)
        ours.loss.backward()
        queries = {n: p.grad for n, p in model.named_parameters() if n.endswith("pseudo_query")}
        # the first attention has nothing to mix, and nothing is mixed before the final norm
        assert len(queries) == 7 and all(grad.any() for grad in queries.values())

    @torch.no_grad()
    def test_mean_is_vanilla_up_to_the_epsilon(self, build, vanilla_twin, token_ids):
        ids = token_ids(2, 12)
        differences = []
        for eps in (1e-4, 1e-6):
            model = self.put_to_sleep(build(attnres_variant="full", rms_norm_eps=eps))
            differences.append((model(ids).logits - vanilla_twin(model)(ids).logits).abs().max())
        assert 1e-4 < differences[1] < 0.1 * differences[0]

    def test_start_values(self, tiny):
        model = AttnResForCausalLM(AttnResConfig(**tiny, attnres_recency_bias=True, attnres_recency_bias_init=0.5))
        mixers = {name: module for name, module in model.named_modules() if isinstance(module, AttnResMixer)}
        sites = [f"layers.{i}.{site}_mixer" for i in range(4) for site in ("attn", "mlp")]
        assert list(mixers) == [f"model.{site}" for site in (*sites, "output_mixer")]
        for mixer in mixers.values():
            assert {name: tensor.tolist() for name, tensor in mixer.state_dict().items()} == {
                "pseudo_query": [0.0] * 64,
                "norm.weight": [1.0] * 64,
                "recency_bias": [0.5],
            }

    def test_recency_biases_that_a_checkpoint_does_not_have(self, tiny, tmp_path):
        """What a constructor puts into a parameter is gone by the time the checkpoint has been read."""
        Qwen3ForCausalLM(Qwen3Config(**tiny)).save_pretrained(tmp_path)
        fields = {"attnres_recency_bias": True, "attnres_recency_bias_init": 0.5}
        state = AttnResForCausalLM.from_pretrained(tmp_path, **fields).state_dict()
        biases = [tensor.tolist() for name, tensor in state.items() if name.endswith("recency_bias")]
        assert biases == [[0.5]] * 9

    def test_same_seed_same_weights_as_vanilla(self, tiny):
        torch.manual_seed(3)
        model = AttnResForCausalLM(AttnResConfig(**tiny, attnres_recency_bias=True))
        torch.manual_seed(3)
        stock = Qwen3ForCausalLM(Qwen3Config(**tiny)).state_dict()
        state = model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in stock.items())
        assert all("_mixer." in name for name in state.keys() - stock.keys())

    def test_queries_learn_from_there(self, tiny, token_ids):
        model = AttnResForCausalLM(AttnResConfig(**tiny))
        model(token_ids(2, 9), labels=token_ids(2, 9)).loss.backward()
        for name, module in model.named_modules():
            if isinstance(module, AttnResMixer):
                assert (module.pseudo_query.grad.abs().max() > 0) == ("layers.0.attn" not in name), name


class TestDepthWeights:
    @VARIANTS
    @torch.no_grad()
    def test_give_the_mixes(self, build, token_ids, fields):
        """The weighted sources, normalised, are what the sub-layers read."""
        model, ids = build(**fields), token_ids(2, 7)
        read, outputs = [], []
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda _, __, kwargs: read.append(kwargs["hidden_states"]), with_kwargs=True
            )
            layer.self_attn.register_forward_hook(lambda _, __, output: outputs.append(output[0]))
            layer.mlp.register_forward_pre_hook(lambda _, args: read.append(args[0]))
            layer.mlp.register_forward_hook(lambda _, __, output: outputs.append(output))
        result = model.model(ids, output_depth_weights=True)
        norms = [norm for each in model.model.layers for norm in (each.input_layernorm, each.post_attention_layernorm)]
        config, embedding = model.config, model.model.embed_tokens(ids)
        assert len(result.depth_weights) == 9
        for site, (norm, mixed, weights) in enumerate(
            zip([*norms, model.model.norm], [*read, result.last_hidden_state], result.depth_weights, strict=True)
        ):
            sources = plain_sources(config.attnres_variant, config.attnres_block_size, embedding, outputs[:site])
            assert weights.shape == (2, 7, len(sources)) and weights.dtype is torch.float32
            assert_close(weights.sum(-1), torch.ones(2, 7), 1e-6)
            expected = (torch.stack(sources, dim=-1) * weights.unsqueeze(2)).sum(-1)
            expected = expected * (len(sources) if config.attnres_scale == "sum" else 1)
            assert_close(mixed, norm(expected))

    @torch.no_grad()
    def test_where_they_are_returned(self, build, token_ids):
        model, ids = build(**DEEP), token_ids(2, 7)
        plain = model(ids)
        assert plain.depth_weights is None
        asked = model(ids, output_depth_weights=True)
        assert torch.equal(asked.logits, plain.logits)
        base = model.model(ids, output_depth_weights=True)
        tuples = [each(ids, output_depth_weights=True, return_dict=False)[-1] for each in (model, model.model)]
        for given in (base.depth_weights, *tuples):
            assert [weights.shape[-1] for weights in given] == [1, *[2] * 4, *[3] * 4, *[4] * 4]
            assert all(torch.equal(*pair) for pair in zip(given, asked.depth_weights, strict=True))

    @torch.no_grad()
    def test_default_of_the_configuration(self, build, token_ids):
        model, ids = build(output_depth_weights=True), token_ids(2, 7)
        for each in (model, model.model):
            assert len(each(ids).depth_weights) == 9
            assert each(ids, output_depth_weights=False).depth_weights is None
            assert each(ids, output_depth_weights=None).depth_weights is None
        expected = build().generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)

    @torch.no_grad()
    def test_together_with_other_outputs(self, build, token_ids):
        model, ids = build(attn_implementation="eager"), token_ids(2, 7)
        outputs = model(ids, output_depth_weights=True, output_hidden_states=True, output_attentions=True)
        assert len(outputs.hidden_states) == 5
        assert [attention.shape[-1] for attention in outputs.attentions] == [7] * 4
        assert len(outputs.depth_weights) == 9

    @torch.no_grad()
    def test_of_new_tokens_on_top_of_a_cache(self, build, token_ids):
        model, ids = build(**DEEP), token_ids(2, 7)
        expected = model(ids, output_depth_weights=True).depth_weights
        cache = new_cache(model)
        model(ids[:, :6], use_cache=True, **{HOST_CACHE_NAME: cache})
        outputs = model(ids[:, 6:], use_cache=True, output_depth_weights=True, **{HOST_CACHE_NAME: cache})
        for weights, full in zip(outputs.depth_weights, expected, strict=True):
            assert_close(weights, full[:, 6:])

    def test_are_equal_at_the_start(self, tiny, token_ids):
        model = AttnResForCausalLM(AttnResConfig(**tiny, attnres_block_size=4))
        for weights in model(token_ids(2, 7), output_depth_weights=True).depth_weights:
            assert_close(weights, torch.full_like(weights, 1 / weights.shape[-1]), 1e-6)

    @pytest.mark.parametrize("use_reentrant", [None, False, True])
    def test_have_gradients(self, build, token_ids, use_reentrant):
        """So that a loss on them is possible."""
        model = build(**DEEP).train()
        if use_reentrant is not None:
            with warnings.catch_warnings(action="ignore", category=FutureWarning):
                model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model(token_ids(2, 7), output_depth_weights=True).depth_weights[7][..., 0].mean().backward()
        for name in ("0.self_attn.v_proj.weight", "1.mlp.up_proj.weight", "3.mlp_mixer.pseudo_query"):
            assert model.get_parameter(f"model.layers.{name}").grad.abs().max() > 0


@pytest.fixture
def phase_1_calls(monkeypatch):
    """The numbers of sources and of sites of every phase 1."""
    calls = []

    def counting(sources, pseudo_queries, *args, **kwargs):
        calls.append((len(sources), len(pseudo_queries)))
        return attn_res_phase_1(sources, pseudo_queries, *args, **kwargs)

    monkeypatch.setattr(modeling_attnres, "attn_res_phase_1", counting)
    return calls


class Wrapped(nn.Module):
    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped

    def forward(self, *args, **kwargs):
        return self.wrapped(*args, **kwargs)


class TestPhases:
    # by the model for every block, the mix before the final norm included
    BY_BLOCK = [(1, 4), (2, 4), (3, 4)]
    # by each layer; the layers that a block ends in front of have two kinds of sources
    BY_LAYER = [(1, 1), (1, 2), (1, 1), (2, 1), (2, 2), (2, 1), (3, 1), (3, 2), (3, 1)]

    def test_one_read_per_block(self, build, token_ids, phase_1_calls):
        model = build(**DEEP)
        model(token_ids(2, 7))
        assert phase_1_calls == self.BY_BLOCK
        phase_1_calls.clear()
        with torch.no_grad():
            # decoding
            model(token_ids(2, 1))
        assert phase_1_calls == self.BY_BLOCK

    def test_one_read_per_layer(self, build, token_ids, phase_1_calls):
        """Where the results of a block would be kept for longer than they are needed."""
        model = build(**DEEP)
        expected = model(token_ids(2, 7)).logits
        phase_1_calls.clear()
        with torch.no_grad():
            assert torch.equal(model(token_ids(2, 7)).logits, expected)
        assert phase_1_calls == self.BY_LAYER
        phase_1_calls.clear()
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
        assert torch.equal(model(token_ids(2, 7)).logits, expected)
        assert phase_1_calls == self.BY_LAYER

    @pytest.mark.parametrize("wrapped", ["layers.3", "layers.3.mlp_mixer", "layers.5.attn_mixer.norm", "output_mixer"])
    @VARIANTS
    def test_wrapped_modules_are_called(self, build, token_ids, fields, wrapped):
        """Whatever an adapter or a sharder puts around a module must not be bypassed."""
        model, ids = build(**fields | {"num_hidden_layers": 6, "layer_types": None}), token_ids(2, 7)
        expected = model(ids).logits
        parent, name = f"model.{wrapped}".rsplit(".", 1)
        module = Wrapped(model.get_submodule(f"model.{wrapped}"))
        setattr(model.get_submodule(parent), name, module)
        calls = []
        module.register_forward_hook(lambda *_: calls.append(0))
        assert torch.equal(model(ids).logits, expected)
        assert calls == [0]

    def test_norms_with_hooks_are_called(self, build, token_ids):
        model, ids, seen = build(**DEEP), token_ids(2, 7), []
        expected = model(ids).logits
        norms = [module for module in model.modules() if type(module).__name__ == "DepthRMSNorm"]
        norms = [norm for norm in norms if norm.weight.numel() == 64]
        for norm in norms:
            norm.register_forward_hook(lambda *_: seen.append(0))
        assert torch.equal(model(ids).logits, expected)
        assert len(seen) == len(norms) == 13

    def test_norms_have_an_epsilon_of_their_own(self, build, token_ids):
        model, ids = build(**DEEP), token_ids(2, 7)
        plain, norm = model.model(ids).last_hidden_state, model.model.norm
        norm.variance_epsilon = 10.0
        changed = model.model(ids).last_hidden_state
        with norm.register_forward_hook(lambda *_: None):
            assert torch.equal(model.model(ids).last_hidden_state, changed)
        assert changed.norm() < 0.9 * plain.norm()

    @VARIANTS
    def test_key_norms_with_hooks_are_called(self, build, token_ids, fields):
        """What a hook gives is used in both phases."""
        model, ids = build(**fields), token_ids(2, 7)
        plain = model(ids).logits
        norm = model.model.layers[2].mlp_mixer.norm
        with norm.register_forward_hook(lambda _, __, gain: 2 * gain):
            hooked = model(ids).logits
        with torch.no_grad():
            norm.weight.mul_(2)
        assert torch.equal(hooked, model(ids).logits)
        assert (hooked - plain).abs().max() > 1e-3

    def test_hooks_may_set_parameters(self, build, token_ids):
        """As those of pruning do, before each call of a mixer."""
        model, ids = build(**DEEP).train(), token_ids(2, 7)
        mixer = model.model.layers[3].mlp_mixer
        prune.l1_unstructured(mixer, "pseudo_query", amount=0.5)
        with torch.no_grad():
            mixer.pseudo_query_orig.mul_(3)
        losses = [model(ids, labels=ids).loss for _ in range(2)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        assert mixer.pseudo_query_orig.grad.abs().max() > 0

    @pytest.mark.parametrize("layer", range(1, 4))
    @VARIANTS
    def test_hooks_may_change_what_a_layer_gets(self, build, token_ids, fields, layer):
        """The same with gradients, where the model mixes for a block, and without, where the layer does."""
        model, ids = build(**fields), token_ids(2, 7)
        plain = model(ids).logits
        model.model.layers[layer].register_forward_pre_hook(lambda _, args: (args[0] + 1, *args[1:]))
        changed = model(ids).logits
        with torch.no_grad():
            assert torch.equal(model(ids).logits, changed)
        assert (changed - plain).abs().max() > 1e-3

    def test_idle_mixer_has_a_gradient_without_a_fused_norm_too(self, build, token_ids):
        """DDP waits for a gradient of every parameter."""
        model, ids = build(**DEEP, attnres_recency_bias=True), token_ids(2, 7)
        expected = model(ids).logits
        model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: None)
        outputs = model(ids, labels=ids)
        assert torch.equal(outputs.logits, expected)
        outputs.loss.backward()
        for name, parameter in model.model.layers[0].attn_mixer.named_parameters():
            assert parameter.grad.abs().max() == 0, name

    @VARIANTS
    def test_sums_stay_wide_under_autocast(self, build, token_ids, fields):
        """As in a vanilla model, whose residual stream is fp32 then."""
        model, seen = build(**fields), []
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda _, args: seen.extend(args))
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            model(token_ids(2, 7))
        assert {tensor.dtype for tensor in seen} == {torch.float32}


class TestSources:
    @torch.no_grad()
    def test_live_until_the_end_of_the_call(self, build, token_ids):
        """Only the finished ones, so that memory does not grow with the number of layers."""
        model, states, alive_at = build(num_hidden_layers=8, attnres_block_size=4), [], []

        def look(_, __):
            alive_at.append([i for i, state in enumerate(states) if state() is not None])

        for layer in model.model.layers:
            layer.register_forward_pre_hook(look)
            layer.register_forward_hook(
                lambda _, __, output: states.append(weakref.ref(output[0] if isinstance(output, tuple) else output))
            )
        gc.disable()
        try:
            outputs = model(token_ids(2, 7), use_cache=False)
        finally:
            gc.enable()
        # blocks end after layers 1, 3, 5 and 7, and every layer reads what the one before it has returned
        finished = (1, 3, 5, 7)
        assert alive_at == [[k for k in range(i) if k in finished or k == i - 1] for i in range(8)]
        assert all(state() is None for state in states)
        assert outputs.logits.isfinite().all()

    @VARIANTS
    def test_layer_returns_what_later_layers_read(self, build, token_ids, fields):
        model, calls = build(**fields), []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _, args, output: calls.append((args, output)))
        model(token_ids(2, 7))
        counts = model.config.num_finished_sources
        for i, (args, output) in enumerate(calls):
            # flat positional tensors: the running sum, the finished sources, two results for each mixer that has some
            sources = args[1 : 1 + counts[2 * i]]
            assert len(args) == 1 + len(sources) + 2 * bool(sources) + 2
            if i + 1 < len(calls):
                state, *finished = output if isinstance(output, tuple) else (output,)
                next_args = calls[i + 1][0]
                assert next_args[0] is state
                given = next_args[1 : 1 + counts[2 * i + 2]]
                assert all(a is b for a, b in zip(reversed(given), reversed(finished), strict=False))
                assert all(kept is source for kept, source in zip(next_args[1:], sources, strict=False))

    @pytest.mark.parametrize("fields", [{"attnres_block_size": 1}, {"attnres_block_size": 2}])
    def test_hook_changes_what_later_layers_read(self, build, token_ids, fields):
        """A block that ends with the input of a layer is what hooks have made of it."""
        model = build(num_hidden_layers=4, **fields)
        layers, seen = model.model.layers, []
        layers[1].register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))
        layers[1].register_forward_hook(lambda _, args, __: seen.append(args[0]))
        layers[3].register_forward_hook(lambda _, args, __: seen.append(args))
        model(token_ids(2, 7))
        assert any(torch.equal(source, seen[0]) for source in seen[1][1:])

    def test_single_layer_can_be_replayed(self, build, token_ids):
        """As calibration of quantisers does: with the arguments that a hook saw."""
        model, calls = build(**DEEP), []
        layer = model.model.layers[3]
        hook = layer.register_forward_hook(lambda *call: calls.append(call[1:]), with_kwargs=True)
        for context in (torch.no_grad(), torch.enable_grad()):
            with context:
                model(token_ids(2, 7), use_cache=False)
        hook.remove()
        for args, kwargs, output in calls:
            assert torch.equal(layer(*args, **kwargs), output)
        (without, _, output), (given, kwargs, _) = calls
        assert (len(without), len(given)) == (3, 7)
        assert torch.equal(layer(*given[:3], **kwargs), output)

    @pytest.mark.parametrize("change", ["skip", "skip at the start of a block", "remove", "exchange"])
    @VARIANTS
    def test_layer_that_did_not_run(self, build, token_ids, change, fields):
        class Skipped(nn.Module):
            def forward(self, hidden_states, *sources, **kwargs):
                return hidden_states

        model = build(**fields | {"num_hidden_layers": 6, "layer_types": None})
        layers = model.model.layers
        if change == "remove":
            del layers[1]
            model.config.num_hidden_layers = 5
        elif change == "exchange":
            layers[2], layers[3] = layers[3], layers[2]
        else:
            layers[3 if change == "skip" else 2] = Skipped()
        with pytest.raises(RuntimeError, match=r"Layer \d is not the one that the model was built with"):
            model(token_ids(2, 7))

    @VARIANTS
    @torch.no_grad()
    def test_early_exit(self, build, token_ids, fields):
        """transformers changes the number of layers in the configuration for the time of a call."""
        model, ids = build(**fields), token_ids(2, 7)
        kept = {"attnres_block_size": model.config.attnres_block_size, "layer_types": model.config.layer_types[:2]}
        short = build(**fields | kept | {"num_hidden_layers": 2})
        state = model.state_dict()
        short.load_state_dict({name: state[name] for name in short.state_dict()})
        model.config.num_hidden_layers = 2
        exited = [model(ids).logits, model(ids[:, :1]).logits]
        model.config.num_hidden_layers = 4
        assert torch.equal(exited[0], short(ids).logits)
        assert torch.equal(exited[1], short(ids[:, :1]).logits)

    def test_pipeline_plan_is_not_inherited(self):
        assert Qwen3ForCausalLM._pp_plan and AttnResForCausalLM._pp_plan is None
        assert AttnResForCausalLM._tp_plan == Qwen3ForCausalLM._tp_plan


class TestImplementations:
    @torch.no_grad()
    def test_reference_and_auto(self, build, token_ids):
        ids = token_ids(2, 7)
        assert_close(build(depth_impl="reference")(ids).logits, build(depth_impl="auto")(ids).logits)

    def test_attention_gets_what_it_is_configured_for(self, build):
        attention = build(attention_bias=True, attention_output_bias=False).model.layers[0].self_attn
        assert attention.q_proj.bias is not None and attention.o_proj.bias is None
        attention = build(use_qk_norm=False).model.layers[0].self_attn
        assert not hasattr(attention, "q_norm") and not hasattr(attention, "k_norm")


@torch.no_grad()
def test_classification_is_awake(build, token_ids):
    classifier = build(model_class=AttnResForSequenceClassification, num_labels=3, **DEEP)
    ids = token_ids(4, 7)
    awake = classifier(ids).logits
    assert (awake - TestZeroQueries.put_to_sleep(classifier)(ids).logits).abs().max() > 0.05
