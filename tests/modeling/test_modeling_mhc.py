# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""mHC inside transformers: the checks of every causal language model, and what is its own."""

import functools
import math

import pytest
import torch
from causal_lm_checks import CausalLMChecks, assert_close, assert_trains_and_decodes_alike
from float64_checks import exact
from transformers import Qwen3Config, Qwen3ForCausalLM

from depthmix import MHCConfig, MHCForCausalLM, MHCForSequenceClassification
from depthmix.modeling.modeling_mhc import MHCConnection, MHCReadout, start_shares


LLAMA = {"use_qk_norm": False, "attention_bias": True, "mlp_bias": True}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}


@pytest.fixture
def build(build):
    return functools.partial(build, model_class=MHCForCausalLM, initializer_range=0.08)


class TestCausalLM(CausalLMChecks):
    variants = {
        "rows first": {"mhc_num_streams": 3, "mhc_sinkhorn_iters": 3, "mhc_sinkhorn_order": "rows_first"}
        | SLIDING
        | {"num_attention_heads": 6},
    }
    # the streams are equal there
    idle_module = "layers.0.attn_connection"
    sequence_classification_class = MHCForSequenceClassification

    @staticmethod
    def first_state(model, embeddings):
        return embeddings.unsqueeze(-2).expand(-1, -1, model.config.mhc_num_streams, -1)


@torch.no_grad()
def put_to_sleep(model):
    for module in model.modules():
        if isinstance(module, MHCConnection | MHCReadout):
            module.reset()
    return model


class TestStart:
    @pytest.mark.parametrize("backbone", [{}, {"use_qk_norm": False}, LLAMA, SLIDING | {"tie_word_embeddings": True}])
    @pytest.mark.parametrize("streams", [2, 3, 4, 5])
    def test_is_vanilla(self, build, vanilla_twin, token_ids, assert_awake, backbone, streams):
        model = build(**backbone, mhc_num_streams=streams)
        assert_awake(model)
        twin, ids = vanilla_twin(put_to_sleep(model)), token_ids(2, 12)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        for given in ({}, {"attention_mask": mask}, {"labels": ids}):
            ours, stock = model(ids, **given), twin(ids, **given)
            assert_close(ours.logits, stock.logits, 1e-5)
        ours.loss.backward()
        stock.loss.backward()
        for name, parameter in twin.named_parameters():
            gradient = model.get_parameter(name).grad
            assert (gradient - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name

    def test_parameters(self, tiny):
        torch.manual_seed(3)
        model = MHCForCausalLM(MHCConfig(**tiny, mhc_alpha_init=0.5))
        torch.manual_seed(3)
        stock = Qwen3ForCausalLM(Qwen3Config(**tiny)).state_dict()
        state = model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in stock.items())
        start = {
            "norm_weight": torch.ones(256),
            "projection": torch.zeros(24, 256),
            "alpha_pre": torch.tensor([0.5]),
            "alpha_post": torch.tensor([0.5]),
            "alpha_residual": torch.tensor([0.5]),
            "pre_logits": torch.logit(torch.tensor([0.375, 0.375, 0.125, 0.125])),
            "post_logits": torch.tensor([1.0, -1.0, 1.0, -1.0]) * math.log(3),
            "residual_logits": torch.log(0.01 / 3 + (0.99 - 0.01 / 3) * torch.eye(4)),
        }
        connections = [f"model.layers.{i}.{site}_connection" for i in range(4) for site in ("attn", "mlp")]
        expected = {f"{connection}.{name}": value for connection in connections for name, value in start.items()}
        expected["model.stream_readout.logits"] = torch.log(torch.tensor([0.375, 0.375, 0.125, 0.125]))
        assert state.keys() - stock.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, msg=name)

    @pytest.mark.parametrize("streams", range(2, 10))
    def test_shares(self, streams):
        reads, writes = start_shares(streams)
        excess = writes - 1
        for zero in (reads.sum() - 1, excess.sum(), reads @ excess):
            assert zero.abs() < 1e-6
        assert reads.min() > 0 and writes.min() > 0 and writes.max() < 2
        # no two streams are treated alike, but for the reads of a single pair
        assert len(set(zip(reads.tolist(), writes.tolist(), strict=True))) == streams
        assert (len(set(reads.tolist())) > 1) == (streams > 2)

    @pytest.mark.once
    @pytest.mark.parametrize("from_vanilla", [False, True], ids=["new", "from vanilla"])
    @pytest.mark.parametrize("fields", [{}, {"mhc_num_streams": 3, "mhc_sinkhorn_order": "rows_first"}])
    def test_streams_are_put_to_use(self, tiny, tmp_path, token_ids, from_vanilla, fields):
        """In float64, where no rounding hides that a symmetry keeps parameters from moving."""
        fields = fields | {"mhc_sinkhorn_iters": 5}
        tiny |= {"num_hidden_layers": 2}
        if from_vanilla:
            Qwen3ForCausalLM(Qwen3Config(**tiny)).save_pretrained(tmp_path)
            model = MHCForCausalLM.from_pretrained(tmp_path, **fields)
        else:
            model = MHCForCausalLM(MHCConfig(**tiny, **fields))
        model, last_streams = exact(model), []
        own = {n: p for n, p in model.named_parameters() if "_connection." in n or "readout" in n}
        before = {name: parameter.detach().clone() for name, parameter in own.items()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
        model.model.layers[-1].register_forward_hook(lambda module, args, output: last_streams.append(output))
        for step in range(50):
            ids = token_ids(2, 9, seed=step)
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for streams in (last_streams[0], last_streams[-1]):
            spread = streams - streams.mean(-2, keepdim=True)
            assert spread.norm() > 0.05 * streams.norm()
        moved = {name: (parameter - before[name]).abs().max().item() for name, parameter in own.items()}
        # the streams are equal before the first sub-layer, and mixing equal streams changes nothing
        first = "model.layers.0.attn_connection."
        idle = {first + "alpha_residual", first + "residual_logits"}
        if model.config.mhc_sinkhorn_order == "rows_first":
            # up to how far the iterations are from their end
            idle.clear()
        assert {name for name, distance in moved.items() if distance < 1e-6} == idle

    def test_parameters_that_a_checkpoint_does_not_have(self, tiny, tmp_path):
        """What a constructor puts into a parameter is gone by the time the checkpoint has been read."""
        Qwen3ForCausalLM(Qwen3Config(**tiny)).save_pretrained(tmp_path)
        state = MHCForCausalLM.from_pretrained(tmp_path, mhc_num_streams=3, mhc_alpha_init=0.5).state_dict()
        fresh = MHCForCausalLM(MHCConfig(**tiny, mhc_num_streams=3, mhc_alpha_init=0.5)).state_dict()
        own = [name for name in fresh if "_connection." in name or "readout" in name]
        assert len(own) == 8 * 8 + 1
        assert all(torch.equal(state[name], fresh[name]) for name in own)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        {"mhc_num_streams": 3, "mhc_sinkhorn_order": "rows_first"},
    ],
)
def test_kernels_in_training_and_decoding(build, token_ids, fields):
    ids, fields = token_ids(2, 9), {"num_hidden_layers": 2, "mhc_sinkhorn_iters": 3} | fields
    expected, model = (build(**fields, depth_impl=impl) for impl in ("reference", "triton"))
    # rows that sum to one change nothing while the streams are equal
    assert_trains_and_decodes_alike(model, expected, ids, noise=1e-6)


@pytest.mark.triton
def test_explicit_kernel_does_not_fall_back(build, token_ids):
    with pytest.raises(RuntimeError, match="impl='triton': the kernel of hyper_connection_read supports from 1 to 5"):
        build(depth_impl="triton", mhc_num_streams=6)(token_ids(1, 3))
    assert build(mhc_num_streams=6)(token_ids(1, 3)).logits.isfinite().all()


@torch.no_grad()
def test_early_exit(build, token_ids):
    """transformers changes the number of layers in the configuration for the time of a call."""
    model, ids = build(), token_ids(2, 7)
    states = model(ids, output_hidden_states=True).hidden_states
    model.config.num_hidden_layers = 2
    exited = model(ids).logits
    assert_close(exited, model.lm_head(model.model.norm(model.model.stream_readout(states[2]))))


def test_depth_weights_are_refused(build, token_ids):
    with pytest.raises(ValueError, match="output_depth_weights=True: MHCConfig has none to return"):
        build()(token_ids(2, 7), output_depth_weights=True)
    with pytest.raises(ValueError, match="output_depth_weights=True: MHCConfig has no such field"):
        build(output_depth_weights=True)


def test_streams_stay_wide_under_autocast(build, token_ids):
    """As in a vanilla model, whose residual stream is fp32 then."""
    model, seen = build(), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.extend(args))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(token_ids(2, 7))
    assert {tensor.dtype for tensor in seen} == {torch.float32}
