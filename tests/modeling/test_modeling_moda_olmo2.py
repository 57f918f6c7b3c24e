# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""MoDAOlmo2 inside transformers: the checks of every causal language model, and what is its own."""

import gc
import weakref

import pytest
import torch
from causal_lm_checks import (
    HOST_CACHE_NAME,
    CausalLMChecks,
    assert_close,
    assert_trains_and_decodes_alike,
    left_padded,
    new_cache,
)
from torch import nn
from transformers import AutoModel, Olmo2Config, Olmo2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthmix import MoDAOlmo2Config, MoDAOlmo2ForCausalLM, MoDAOlmo2ForSequenceClassification, MoDAOlmo2Model


@pytest.fixture
def build(build):
    def build_with_padding(*, model_class=MoDAOlmo2ForCausalLM, **fields):
        model = build(model_class=model_class, **fields)
        # padding starts as zeros, on which every norm multiplies gradients by eps ** -0.5; fp16 does not hold that
        with torch.no_grad():
            model.get_input_embeddings().weight[0].normal_()
        return model

    return build_with_padding


REFUSED = r"attn_implementation='{}': must be one of sdpa, eager with Mixture-of-Depths Attention"


class TestCausalLM(CausalLMChecks):
    variants = {
        "row 4": {},
        "row 5, reader norm": {"moda_attn_depth_proj": True, "moda_depth_key_mode": "reader_norm"},
        "row 3, pre-norm": {"moda_ffn_slots": False, "moda_norm_style": "pre", "num_attention_heads": 6},
        "window, post-norm": {"moda_depth_window": 3, "moda_norm_style": "post"},
    }
    # a rotated query reads keys that are not rotated
    absolute_variants = {"row 5, reader norm"}
    attentions = ("eager", "sdpa")
    sequence_classification_class = MoDAOlmo2ForSequenceClassification

    def num_depth_columns(self, model, layer):
        start, stop = model.config.depth_slots[layer]
        return stop - start

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_continuous_batching(self, model, variant, token_ids, attention):
        """Refused where an implementation of another name would take over, which knows no slots."""
        expected = model(token_ids(2, 5)).logits
        try:
            super().test_continuous_batching(model, variant, token_ids, attention)
        except ValueError as error:
            assert str(error).startswith(f"attn_implementation='paged|{attention}': must be one of sdpa, eager")
        else:
            assert attention == "sdpa" and HOST_CACHE_NAME == "cache"
        assert model.config._attn_implementation == attention
        assert_close(model(token_ids(2, 5)).logits, expected)

    def test_attention_of_a_server(self, model, token_ids, monkeypatch):
        """Refused where it is asked for, and where a server sets it behind the model's back."""
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "server", lambda *args, **kwargs: pytest.fail("no slots"))
        for name in ("server", "flex_attention", "flash_attention_2", "kernels-community/flash-attn2", "sdpa_paged"):
            with pytest.raises(ValueError, match=REFUSED.format(name)):
                AutoModel.from_config(MoDAOlmo2Config(num_hidden_layers=1), attn_implementation=name)
            for each in (model, model.model):
                with pytest.raises(ValueError, match=REFUSED.format(name)):
                    each.set_attn_implementation(name)
        assert model(token_ids(1, 5)).logits.isfinite().all()
        assert not model.is_backend_compatible()
        model.config._attn_implementation = "server"
        for each in (model, model.model):
            with pytest.raises(ValueError, match=REFUSED.format("server")):
                each(token_ids(1, 5))


def spread(fields):
    return " ".join(f"{name}={value}" for name, value in fields.items())


VARIANTS = pytest.mark.parametrize("fields", TestCausalLM.variants.values(), ids=TestCausalLM.variants)
NO_SLOTS = {"moda_attn_slots": False, "moda_ffn_slots": False}


class TestWithoutSlots:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True, "attention_bias": True}], ids=spread)
    def test_is_vanilla(self, build, vanilla_twin, token_ids, fields, attention):
        """Bit for bit: logits, attention weights, losses and gradients."""
        model = build(**NO_SLOTS, **fields, attn_implementation=attention)
        twin = vanilla_twin(model)
        twin.set_attn_implementation(attention)
        ids = token_ids(2, 12)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        packed = {"position_ids": torch.arange(12).remainder(7).expand(2, -1), "use_cache": False}
        weights = {"output_attentions": True} if attention == "eager" else {}
        for given in ({"attention_mask": mask}, packed, {"labels": ids, "num_items_in_batch": 7} | weights):
            ours, stock = model(ids, **given), twin(ids, **given)
            assert torch.equal(ours.logits, stock.logits)
        assert all(torch.equal(*pair) for pair in zip(ours.attentions or (), stock.attentions or (), strict=True))
        ours.loss.backward()
        stock.loss.backward()
        for name, parameter in twin.named_parameters():
            assert torch.equal(model.get_parameter(name).grad, parameter.grad), name
        cache, stock_cache = new_cache(model), new_cache(twin)
        for chunk in ids.split([7, 1, 4], dim=1):
            ours = model(chunk, **{HOST_CACHE_NAME: cache}).logits
            assert torch.equal(ours, twin(chunk, **{HOST_CACHE_NAME: stock_cache}).logits)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_same_seed_same_weights_as_vanilla(self, tiny, token_ids, dtype):
        torch.manual_seed(3)
        model = MoDAOlmo2ForCausalLM(MoDAOlmo2Config(**tiny, **NO_SLOTS)).to(dtype)
        torch.manual_seed(3)
        stock = Olmo2ForCausalLM(Olmo2Config(**tiny)).to(dtype)
        assert model.state_dict().keys() == stock.state_dict().keys()
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in stock.state_dict().items())
        assert torch.equal(model(token_ids(2, 9)).logits, stock(token_ids(2, 9)).logits)

    def test_dropout_is_vanillas(self, build, vanilla_twin, token_ids):
        model = build(**NO_SLOTS, attention_dropout=0.5).train()
        twin = vanilla_twin(model).train()
        twin.set_attn_implementation("sdpa")
        for layer in twin.model.layers:
            layer.self_attn.attention_dropout = 0.5
        logits = []
        for each in (model, twin):
            torch.manual_seed(0)
            logits.append(each(token_ids(2, 9)).logits)
        assert torch.equal(*logits)

    @torch.no_grad()
    def test_first_layer_is_always_vanilla(self, build, vanilla_twin, token_ids):
        model, ids = build(), token_ids(2, 9)
        states = [each(ids, output_hidden_states=True).hidden_states for each in (model, vanilla_twin(model))]
        assert torch.equal(states[0][1], states[1][1])
        assert not torch.equal(states[0][2], states[1][2])


class TestSlots:
    @torch.no_grad()
    def test_padding_reads_its_slots_alone(self, build, token_ids):
        """What sees no token has the mean of its depth values, weighted by their scores."""
        ids, mask = left_padded([token_ids(1, 6), token_ids(1, 10, seed=2)])
        outputs = {}
        for attention in ("eager", "sdpa"):
            model = build(attn_implementation=attention)
            seen = []
            for layer in model.model.layers[1:]:
                layer.self_attn.register_forward_hook(
                    lambda _, __, kwargs, output, seen=seen: seen.append((kwargs, output)), with_kwargs=True
                )
            for parameter in model.model.layers[0].self_attn.parameters():
                # the first layer has no slots: what padding reads there depends on the implementation
                parameter.zero_()
            model(ids, attention_mask=mask)
            outputs[attention] = torch.stack([output[0] for _, output in seen])
            for i, (kwargs, (output, *_)) in enumerate(seen, start=1):
                _, values = kwargs["depth_stream"].slots(kwargs["handle"], 0, 2 * i)
                alone = torch.stack([value[0, :4].repeat_interleave(2, dim=1).flatten(1) for value in values])
                layer = model.model.layers[i].self_attn
                low, high = alone.amin(0), alone.amax(0)
                read = torch.linalg.solve(layer.o_proj.weight, output[0, :4].mT).mT
                assert ((read > low - 1e-3) & (read < high + 1e-3)).all()
        assert_close(outputs["eager"], outputs["sdpa"])

    @torch.no_grad()
    @VARIANTS
    def test_of_other_tokens_are_not_read(self, build, token_ids, fields):
        """A token without a sequence to see: whatever the other tokens are, its slots are its own."""
        model, ids = build(**fields), token_ids(1, 6)
        alone = torch.eye(6).bool()[None, None]
        positions = torch.arange(6)[None]
        logits = model(ids, attention_mask=alone, position_ids=positions).logits
        changed = ids.clone()
        changed[0, 2] += 1
        others = [0, 1, 3, 4, 5]
        new_logits = model(changed, attention_mask=alone, position_ids=positions).logits
        assert torch.equal(new_logits[:, others], logits[:, others])
        assert (new_logits[:, 2] - logits[:, 2]).abs().max() > 1e-3

    @VARIANTS
    def test_layer_returns_what_later_layers_read(self, build, token_ids, fields):
        model, calls, made = build(**fields), [], []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _, args, output: calls.append((args, output)))
        model(token_ids(2, 7))
        for args, output in calls:
            assert len(args) - 1 >= len(made[-2 * (model.config.moda_depth_window or len(made)) :])
            for tensor, (returned, size) in zip(reversed(args[1:]), reversed(made), strict=False):
                assert torch.equal(tensor.flatten(2), returned[..., -size:])
            output = output if isinstance(output, tuple) else (output,)
            made += [(tensor, 2 * 16) for tensor in output[1:]]
        assert not isinstance(calls[-1][1], tuple)

    def test_single_layer_can_be_replayed(self, build, token_ids):
        """As calibration of quantisers does: with the arguments that a hook saw."""
        model, calls = build(), []
        layer = model.model.layers[2]
        hook = layer.register_forward_hook(lambda *call: calls.append(call[1:]), with_kwargs=True)
        model(token_ids(2, 7), use_cache=False)
        hook.remove()
        ((args, kwargs, outputs),) = calls
        for again, output in zip(layer(*args, **kwargs), outputs, strict=True):
            assert torch.equal(again, output)

    @torch.no_grad()
    @pytest.mark.parametrize(("window", "kept"), [(None, 10), (3, 3), (50, 10)])
    def test_live_until_the_end_of_the_call(self, build, token_ids, window, kept):
        """In one buffer of no more than a window."""
        model, buffers, shapes = build(num_hidden_layers=6, moda_depth_window=window), set(), set()

        def look(_, args):
            buffers.update(map(weakref.ref, args[1:]))
            shapes.update(tensor.shape for tensor in args[1:])

        for layer in model.model.layers:
            layer.register_forward_pre_hook(look)
        gc.disable()
        try:
            outputs = model(token_ids(2, 7), use_cache=False)
            assert len(buffers) == 2 and all(buffer() is None for buffer in buffers)
        finally:
            gc.enable()
        assert shapes == {(kept, 2, 7, 2, 16)}
        assert outputs.logits.isfinite().all()

    @pytest.mark.parametrize("change", ["skip", "remove", "exchange"])
    def test_layer_that_did_not_run(self, build, token_ids, change):
        class Skipped(nn.Module):
            def forward(self, hidden_states, *handle, **kwargs):
                return hidden_states

        model = build()
        layers = model.model.layers
        if change == "remove":
            del layers[1]
            model.config.num_hidden_layers = 3
        elif change == "exchange":
            layers[1], layers[3] = layers[3], layers[1]
        else:
            layers[2] = Skipped()
        with pytest.raises(RuntimeError, match=r"Layer \d is not the one that the model was built with"):
            model(token_ids(2, 7))

    @VARIANTS
    @torch.no_grad()
    def test_early_exit(self, build, token_ids, fields):
        """transformers changes the number of layers in the configuration for the time of a call."""
        model, ids = build(**fields), token_ids(2, 7)
        short = build(**fields | {"num_hidden_layers": 2})
        state = model.state_dict()
        short.load_state_dict({name: state[name] for name in short.state_dict()})
        model.config.num_hidden_layers = 2
        exited = model(ids).logits
        model.config.num_hidden_layers = 4
        assert torch.equal(exited, short(ids).logits)

    def test_pipelines_are_refused(self, tiny):
        assert Olmo2ForCausalLM._pp_plan and MoDAOlmo2ForCausalLM._pp_plan is None
        assert Olmo2Config.base_model_pp_plan and MoDAOlmo2Config.base_model_pp_plan is None
        config = MoDAOlmo2Config(**tiny)
        config.distributed_config = type("DistributedConfig", (), {"pp_size": 2})()
        with pytest.raises(ValueError, match="pp_size=2: pipeline parallelism is not supported"):
            MoDAOlmo2Model(config)

    def test_plan_of_tensor_parallelism_names_what_there_is(self, build):
        for fields, expected in (
            ({}, {"mlp"}),
            ({"moda_attn_depth_proj": True}, {"mlp", "attn"}),
            ({"moda_ffn_slots": False}, set()),
        ):
            model = build(**fields)
            planned = {
                name.split(".")[-1].split("_")[0] for name in model.config.base_model_tp_plan if "depth" in name
            }
            own = {name.split(".")[3].split("_")[0] for name, _ in model.named_parameters() if "depth" in name}
            assert planned == own == expected


class Doubling(nn.Module):
    """What an adapter may put around a norm."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, hidden_states):
        return 2 * self.norm(hidden_states)


@VARIANTS
@torch.no_grad()
def test_norms_of_keys_are_called(build, token_ids, fields):
    """Hooks and wrappers change the keys of the sequence and the reading of slots alike."""
    ids = token_ids(2, 7)
    plain = build(**fields)
    doubled, hooked, wrapped = (build(**fields) for _ in range(3))
    for model, change in ((doubled, "weight"), (hooked, "hook"), (wrapped, "wrap")):
        for layer in model.model.layers:
            attention = layer.self_attn
            if change == "weight":
                attention.k_norm.weight.mul_(2)
            elif change == "hook":
                attention.k_norm.register_forward_hook(lambda _, __, output: 2 * output)
            else:
                attention.k_norm = Doubling(attention.k_norm)
    logits = doubled(ids).logits
    assert (logits - plain(ids).logits).abs().max() > 1e-3
    assert_close(hooked(ids).logits, logits)
    assert_close(wrapped(ids).logits, logits)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "fields",
    [
        TestCausalLM.variants["row 5, reader norm"],
        pytest.param({"moda_depth_window": 3}, marks=pytest.mark.exhaustive),
    ],
    ids=spread,
)
def test_kernels_in_training_and_decoding(build, token_ids, fields):
    """The shared buffer, its gradients, and the path of a single token."""
    ids = token_ids(2, 9)
    expected, model = (build(**fields, num_hidden_layers=3, depth_impl=impl) for impl in ("reference", "triton"))
    assert_trains_and_decodes_alike(model, expected, ids)


@torch.no_grad()
def test_modes_norm_styles_and_rows_differ(build, token_ids):
    """The same weights, where they are the same, under every option."""
    ids = token_ids(2, 9)
    options = [
        {"moda_depth_key_mode": "sequence"},
        {"moda_depth_key_mode": "reader_norm"},
        {"moda_norm_style": "pre"},
        {"moda_norm_style": "post"},
        {"moda_depth_window": 2},
        {"moda_attn_slots": False},
    ]
    logits = [build(**fields)(ids).logits for fields in options]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert (one - other).abs().max() > 0.05


@torch.no_grad()
def test_depth_weights_are_refused(build, token_ids):
    with pytest.raises(ValueError, match="output_depth_weights=True: .* last columns of the attention weights"):
        build()(token_ids(1, 5), output_depth_weights=True)
    with pytest.raises(ValueError, match="output_depth_weights=True: MoDAOlmo2Config has no such field"):
        build(output_depth_weights=True)
