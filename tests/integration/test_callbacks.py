# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The callbacks for the Trainer, beside optimizer groups."""

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from depthmix import AttnResForCausalLM, DepthQwen3ForCausalLM, MoDAOlmo2ForCausalLM, optimizer_groups
from depthmix.callbacks import GateWarmup, MixingLogger, depth_usage, gates_of
from depthmix.inspection import depth_map, source_entropy


@pytest.fixture
def trainer_of(build, tmp_path):
    """`trainer_of(model_class, steps, **fields)` gives a Trainer with groups for a new model, not awake."""

    def trainer_of(model_class, steps=6, **fields):
        model = build(model_class=model_class, **fields)
        with torch.no_grad():
            for _, weight in gates_of(model):
                weight.zero_()
        ids = torch.randint(3, 97, (12, 12), generator=torch.Generator().manual_seed(0))
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            max_steps=steps,
            logging_steps=2,
            report_to="none",
            use_cpu=True,
            save_strategy="no",
        )
        optimizer = torch.optim.AdamW(optimizer_groups(model, 1e-4, 1e-1))
        rows = [{"input_ids": row, "labels": row} for row in ids]
        return Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))

    return trainer_of


class Recorder(TrainerCallback):
    """The largest gate after each step, as later callbacks see it."""

    def __init__(self):
        self.sizes = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.sizes.append(max(weight.abs().max().item() for _, weight in gates_of(model)))


@pytest.mark.parametrize(
    ("model_class", "fields"),
    [(DepthQwen3ForCausalLM, {"depth_gate": True}), (MoDAOlmo2ForCausalLM, {"moda_gate": True})],
)
def test_gate_warmup(trainer_of, model_class, fields):
    trainer, recorder = trainer_of(model_class, **fields), Recorder()
    trainer.add_callback(GateWarmup(steps=4, maximum=0.02))
    trainer.add_callback(recorder)
    trainer.train()
    # the rate moves a gate by 0.1 in a step, much more than the limit
    assert recorder.sizes[:3] == pytest.approx([0.005, 0.01, 0.015])
    assert min(recorder.sizes[3:]) > 0.02


def test_gate_warmup_refuses():
    for steps in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"steps={steps}: must be a positive number of steps"):
            GateWarmup(steps)
    with pytest.raises(ValueError, match="maximum=inf: must be a positive, finite number"):
        GateWarmup(5, maximum=float("inf"))


def test_gate_warmup_needs_gates(trainer_of):
    trainer = trainer_of(AttnResForCausalLM)
    trainer.add_callback(GateWarmup(5))
    with pytest.raises(ValueError, match="must have a model with gates"):
        trainer.train()


def test_what_is_logged(trainer_of, token_ids):
    trainer = trainer_of(DepthQwen3ForCausalLM, depth_gate=True, depth_stride=1)
    trainer.add_callback(MixingLogger(trainer, {"input_ids": token_ids(2, 9)}, every=2, maps=True))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "gate/mean" in log]
    losses = [log["step"] for log in trainer.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == losses == [2, 4, 6]
    gates = torch.cat([weight.detach() for _, weight in gates_of(trainer.model)])
    assert logs[-1]["gate/mean"] == pytest.approx(gates.mean().item())
    assert logs[-1]["gate/highest"] == pytest.approx(gates.max().item()) and logs[-1]["gate/mean_size"] > 0.05
    assert {f"gate/layer_{i}" for i in (1, 2, 3)} <= logs[0].keys()
    # every other time: own weights of the layers with sources, and the entropy
    assert ["depth/entropy" in log for log in logs] == [True, False, True]
    assert ["depth_map/layer_3/layer_1" in log for log in logs] == [True, False, True]
    assert 0 <= logs[0]["depth/entropy"] <= 1 and {f"depth/own_{i}" for i in (1, 2, 3)} <= logs[0].keys()


def test_methods_without_gates_and_models_without_mixing(trainer_of, token_ids):
    trainer = trainer_of(AttnResForCausalLM, attnres_routing="additive")
    trainer.add_callback(MixingLogger(trainer, {"input_ids": token_ids(2, 9)}))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "depth/entropy" in log]
    assert len(logs) == 3 and not any("gate/mean" in log for log in logs)
    trainer = trainer_of(MoDAOlmo2ForCausalLM, steps=2)
    inputs = {"input_ids": token_ids(2, 9)}
    trainer.add_callback(MixingLogger(trainer, inputs))
    trainer.train()
    assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [2]
    # as `depthmix.inspection` has them
    (log,) = [log for log in trainer.state.log_history if "depth/entropy" in log]
    entropies = source_entropy(trainer.model, inputs)
    assert log["depth/entropy"] == pytest.approx(sum(entropies.values()) / 3) and len(entropies) == 3
    newest = depth_map(trainer.model, inputs)["layer 3", "layer 2 mlp"]
    assert log["depth/own_3"] == pytest.approx(newest.item())
    assert trainer.model.training and trainer.model.config._attn_implementation == "sdpa"
    # by the names of the map, without spaces
    maps = {name: value for name, value in depth_usage(trainer.model, inputs, maps=True).items() if "map" in name}
    assert len(maps) == 3 + 5 + 7 and maps["depth_map/layer_3/layer_2_mlp"] == pytest.approx(newest.item())
    with pytest.raises(ValueError, match="maps=True: must have inputs"):
        MixingLogger(trainer, maps=True)
    trainer = trainer_of(DepthQwen3ForCausalLM, steps=2, depth_stride=0)
    trainer.add_callback(MixingLogger(trainer, inputs))
    trainer.train()
    assert not any("depth/entropy" in log for log in trainer.state.log_history)
    with pytest.raises(ValueError, match="every=0: must be a positive number of logs"):
        MixingLogger(trainer, every=0)
