# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""DenseFormer inside transformers: the checks of every causal language model, and what is its own."""

import functools
import gc
import weakref

import pytest
import torch
from causal_lm_checks import CausalLMChecks
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from depthmix import DenseFormerConfig, DenseFormerForCausalLM, DenseFormerForSequenceClassification
from depthmix.modeling.modeling_denseformer import DepthAverage


LLAMA = {"use_qk_norm": False, "attention_bias": True, "mlp_bias": True}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}


@pytest.fixture
def build(build):
    # less of the wide initialisation, since averages of few states that are normalised again amplify rounding
    return functools.partial(build, model_class=DenseFormerForCausalLM, initializer_range=0.08)


class TestCausalLM(CausalLMChecks):
    variants = {"spaced": SLIDING | {"dwa_dilation": 2, "num_key_value_heads": 1}}
    sequence_classification_class = DenseFormerForSequenceClassification


SPACINGS = pytest.mark.parametrize("fields", [{}, {"dwa_dilation": 2}, {"dwa_dilation": 2, "dwa_period": 2}])
# five layers, of which two are followed by an average
SPACED = {"num_hidden_layers": 5, "dwa_dilation": 3, "dwa_period": 2}


class TestStart:
    @pytest.mark.parametrize("backbone", [{}, {"use_qk_norm": False}, LLAMA, SLIDING | {"tie_word_embeddings": True}])
    @pytest.mark.parametrize("spacing", [{}, {"dwa_dilation": 2, "dwa_period": 3}])
    def test_is_vanilla_bit_for_bit(self, build, vanilla_twin, token_ids, assert_awake, backbone, spacing):
        model = build(**backbone, **spacing)
        assert_awake(model)
        for module in model.modules():
            if isinstance(module, DepthAverage):
                with torch.no_grad():
                    module.weight.copy_(module.identity(len(module.weight)))
        twin, ids = vanilla_twin(model), token_ids(2, 12)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        for given in ({}, {"attention_mask": mask}, {"labels": ids}):
            ours, stock = model(ids, **given), twin(ids, **given)
            assert torch.equal(ours.logits, stock.logits)
        ours.loss.backward()
        stock.loss.backward()
        for name, parameter in twin.named_parameters():
            gradient = model.get_parameter(name).grad
            assert (gradient - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name

    def test_parameters(self, tiny):
        torch.manual_seed(3)
        model = DenseFormerForCausalLM(DenseFormerConfig(**tiny, dwa_dilation=2))
        torch.manual_seed(3)
        stock = Qwen3ForCausalLM(Qwen3Config(**tiny)).state_dict()
        state = model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in stock.items())
        assert {name: tensor.tolist() for name, tensor in state.items() if name not in stock} == {
            f"model.layers.{i}.depth_average.weight": weights
            for i, weights in enumerate([[1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0, 1.0]])
        }


class TestSources:
    @torch.no_grad()
    def test_live_until_their_last_reader(self, build, token_ids):
        model, own, alive_at = build(**SPACED), {}, []

        def remember(i):
            return lambda _, __, output: own.update({i: weakref.ref(output[-1] if type(output) is tuple else output)})

        for i, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(
                lambda *_: alive_at.append({i for i, state in own.items() if state() is not None})
            )
            layer.register_forward_hook(remember(i + 1))
        gc.disable()
        try:
            model(token_ids(2, 7), use_cache=False)
        finally:
            gc.enable()
        # there are averages after layers 2 and 4, of 2 alone and of 1 and 4; a layer also reads what came before it
        assert alive_at == [set(), {1}, {1, 2}, {1, 3}, {4}]

    @SPACINGS
    def test_layer_gets_what_its_average_reads(self, build, token_ids, fields):
        model, calls = build(**fields), []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _, args, output: calls.append((args, output)))
        model(token_ids(2, 7))
        own = [calls[0][0][0], *(output[-1] if isinstance(output, tuple) else output for _, output in calls)]
        reads = model.config.average_sources
        for (args, output), read in zip(calls, reads, strict=True):
            assert all(given is own[i] for given, i in zip(args[1:], read[:-1], strict=True))
            assert isinstance(output, tuple) == bool(read and any(read[-1] in later[:-1] for later in reads))

    def test_single_layer_can_be_replayed(self, build, token_ids):
        """As calibration of quantisers does: with the arguments that a hook saw."""
        model, calls = build(), []
        layer = model.model.layers[2]
        hook = layer.register_forward_hook(lambda *call: calls.append(call[1:]), with_kwargs=True)
        model(token_ids(2, 7), use_cache=False)
        hook.remove()
        ((args, kwargs, output),) = calls
        assert all(torch.equal(*pair) for pair in zip(layer(*args, **kwargs), output, strict=True))

    @pytest.mark.parametrize("change", ["skip", "skip the last", "remove", "exchange"])
    @SPACINGS
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
            layers[5 if change == "skip the last" else 2] = Skipped()
        with pytest.raises(RuntimeError, match=r"Layer \d is not the one that the model was built with"):
            model(token_ids(2, 7))

    @torch.no_grad()
    def test_early_exit(self, build, token_ids):
        """transformers changes the number of layers in the configuration for the time of a call."""
        model, ids = build(), token_ids(2, 7)
        states = model(ids, output_hidden_states=True).hidden_states
        model.config.num_hidden_layers = 2
        exited = model(ids).logits
        model.config.num_hidden_layers = 4
        torch.testing.assert_close(exited, model.lm_head(model.model.norm(states[2])))

    def test_depth_weights_are_refused(self, build, token_ids):
        model = build()
        with pytest.raises(ValueError, match="output_depth_weights=True: DenseFormerConfig has none to return"):
            model(token_ids(2, 7), output_depth_weights=True)
        with pytest.raises(ValueError, match="output_depth_weights=True: DenseFormerConfig has no such field"):
            build(output_depth_weights=True)
        assert model(token_ids(2, 7), output_depth_weights=False).depth_weights is None
