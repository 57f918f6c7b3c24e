# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Pipeline parallelism over gloo: what stages send each other, and that all together train as one process does."""

import copy
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_models import AWAKE_FIELDS, ids_of, new_model, wake
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from depthmix import AttnResForCausalLM, DepthQwen3Config, DepthQwen3ForCausalLM
from depthmix.families import FAMILIES
from depthmix.pipeline import PipelinePart, Plan, RankStore, next_token_loss, pipeline_stages


WORKER = Path(__file__).with_name("pipeline_worker.py")
SIZE = {"num_hidden_layers": 8, "tie_word_embeddings": False, "attn_implementation": "sdpa"}
MODELS = {
    "depth_attention": (DepthQwen3ForCausalLM, {"depth_stride": 2}),
    "attnres": (AttnResForCausalLM, {"attnres_block_size": 4}),
    # blocks that end within a layer
    "attnres_odd": (AttnResForCausalLM, {"attnres_block_size": 3}),
    "attnres_full": (AttnResForCausalLM, {"attnres_variant": "full"}),
    "cumulative": (AttnResForCausalLM, {"attnres_variant": "cumulative", "attnres_block_size": 4}),
    "gated": (DepthQwen3ForCausalLM, {"depth_stride": 3, "depth_gate": True}),
}
# ranks, and models with schedules
CASES = {
    "two ranks": (
        2,
        [
            ("depth_attention", "Schedule1F1B"),
            ("attnres", "ScheduleInterleavedZeroBubble"),
            ("attnres_odd", "ScheduleInterleaved1F1B"),
            ("attnres_full", "ScheduleGPipe"),
            ("gated", "ScheduleInterleaved1F1B"),
        ],
    ),
    "two ranks, all schedules": (
        2,
        [
            ("depth_attention", "ScheduleInterleaved1F1B"),
            ("depth_attention", "ScheduleInterleavedZeroBubble"),
            ("attnres", "Schedule1F1B"),
            ("attnres", "ScheduleInterleaved1F1B"),
            ("cumulative", "ScheduleInterleaved1F1B"),
        ],
    ),
    "four ranks": (4, [*itertools.product(MODELS, ("Schedule1F1B", "ScheduleInterleaved1F1B"))]),
}


@pytest.fixture
def awake(build):
    def awake(name: str, **fields):
        model_class, own = MODELS[name]
        model = build(model_class=model_class, **SIZE | own | fields)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "depth_gate" in parameter_name:
                    parameter.fill_(0.6)
        return model

    return awake


@pytest.mark.long
@pytest.mark.once
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "two ranks" else [pytest.mark.exhaustive]) for kind in CASES]
)
def test_trains_as_one_process_does(kind, awake, tmp_path):
    ranks, chosen = CASES[kind]
    cases = {}
    # every second one with padding
    for number, (name, schedule) in enumerate(chosen):
        if not (tmp_path / name).exists():
            awake(name).save_pretrained(tmp_path / name)
        stages = 2 * ranks if "Interleaved" in schedule else ranks
        cases[f"{name} {schedule}"] = (name, schedule, stages, number % 2 == 1)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    logs = [tmp_path / f"rank{rank}.log" for rank in range(ranks)]
    workers = []
    try:
        for rank in range(ranks):
            command = [sys.executable, WORKER, str(rank), str(ranks), tmp_path / "rendezvous", tmp_path]
            with open(logs[rank], "w") as log:
                workers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        codes = [worker.wait(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-3000:] for log in logs)
    results = [json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(ranks)]
    for case, (name, *_) in cases.items():
        found = [result[case] for result in results]
        assert all(each["gradients"] < 1e-10 and each["saved"] < 1e-12 for each in found), (case, found)
        last = next(each for each in found if "loss" in each)
        # the logits are those after two large steps, which magnify what rounding has left
        assert last["loss"] < 1e-12 and last["logits"] < 1e-7, case
        names = [parameter for each in found for parameter in each["names"]]
        assert sorted(names) == sorted(parameter for parameter, _ in awake(name).named_parameters())


def brute_force(plan: Plan) -> list[set[int]]:
    """What each hop has to carry, by sending item after item to each rank that will read it and does not have it."""
    hops = [set() for _ in range(plan.num_stages - 1)]
    for item, (made, readers) in plan.items.items():
        maker = plan.stage_of(made)
        having = {maker % plan.num_ranks}
        for reader in sorted({plan.stage_of(layer) for layer in readers if plan.stage_of(layer) > maker}):
            if reader % plan.num_ranks not in having:
                for hop in range(maker, reader):
                    hops[hop].add(item)
                    having.add((hop + 1) % plan.num_ranks)
    return hops


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks, stages", [(1, 4), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8), (3, 6)])
def test_nothing_is_sent_that_a_rank_has(name, ranks, stages, awake):
    items = awake(name).model.handed_on()
    plan = Plan(8, stages, ranks, items)
    assert [layer for stage in range(stages) for layer in plan.layers(stage)] == [*range(8)]
    assert [set(plan.sent(stage)) for stage in range(stages)] == [*brute_force(plan), set()]
    for stage in range(stages):
        read = {item for item in items if stage in plan.readers(item)}
        got, taken = set(plan.received(stage)), set(plan.taken(stage))
        assert read <= got | taken and not got & taken
        for item in taken:
            assert item in plan.kept(plan.first_on_rank(item, stage)) and plan.first_on_rank(item, stage) < stage


def test_numbers_of_the_design(awake):
    """4 stages on 2 ranks, 8 layers: blocks that a rank has had are not sent again."""
    items = awake("attnres").model.handed_on()
    everything = [len(Plan(8, 4, 4, items).sent(stage)) for stage in range(3)]
    once = [len(Plan(8, 4, 2, items).sent(stage)) for stage in range(3)]
    assert everything == [1, 2, 3] and once == [1, 1, 1]


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("pair", [name for name, f in FAMILIES.items() if f.method in ("depth_attention", "attnres")])
def test_every_backbone(pair, one_process):
    """All stages in one process, which keeps what layers hand each other; some backbones have no size of heads."""
    family, fields = FAMILIES[pair], {"tie_word_embeddings": False, "output_router_logits": False}
    model = wake(new_model(family, **AWAKE_FIELDS[family.method] | fields)).double()
    if family.backbone.has_experts:
        # the default has no fp64
        model.set_experts_implementation("eager")
    whole, ids, losses = copy.deepcopy(model), ids_of(4, 9), []
    schedule = ScheduleInterleaved1F1B(pipeline_stages(model, 4, "cpu"), n_microbatches=2, loss_fn=next_token_loss)
    schedule.step(ids, target=ids, losses=losses)
    expected = next_token_loss(whole(ids).logits, ids)
    expected.backward()
    tolerance = 1e-4 if family.backbone.model_type == "kimi_linear" else 1e-10
    assert sum(losses).item() / 2 == pytest.approx(expected.item(), abs=tolerance)
    grads = {name: parameter.grad for name, parameter in whole.named_parameters()}
    largest = max(grad.norm() for grad in grads.values())
    for name, parameter in model.named_parameters():
        norm = grads[name].norm().clamp(min=1e-3 * largest)
        assert (parameter.grad - grads[name]).norm() < tolerance * norm, name


@pytest.mark.parametrize("name", ["depth_attention", "attnres"])
@pytest.mark.parametrize("schedule_class", [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble])
@pytest.mark.parametrize("kind", ["frozen", "checkpointing"])
def test_frozen_parameters_and_checkpointing(kind, name, schedule_class, awake, one_process):
    model = awake(name, num_hidden_layers=4).double()
    if kind == "frozen":
        # whole stages at the start have nothing to train, and the last has nothing but a layer
        model.requires_grad_(False).model.layers[-1].requires_grad_(True)
    else:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        model.train()
    whole, ids, losses = copy.deepcopy(model), ids_of(4, 9), []
    schedule = schedule_class(pipeline_stages(model, 4, "cpu"), n_microbatches=2, loss_fn=next_token_loss)
    schedule.step(ids, target=ids, losses=losses)
    expected = next_token_loss(whole(ids).logits, ids)
    expected.backward()
    assert sum(losses).item() / 2 == pytest.approx(expected.item(), abs=1e-10)
    for (parameter_name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), parameter_name
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("rows, length", [(2, 5), (1, 9)])
def test_shapes_that_ranks_do_not_expect(rows, length, awake):
    """A shorter microbatch would reach the next rank in a buffer whose rest is that of the one before."""
    model = awake("attnres").double()
    part = PipelinePart(model, Plan(8, 2, 2, model.model.handed_on()), 0, RankStore())
    part(ids_of(2, 9))
    part.microbatch = 1
    part(ids_of(2, 9))
    with pytest.raises(ValueError, match=re.escape(f"shape [{rows}, {length}]: must be [2, 9]")):
        part(ids_of(rows, length))


def test_schedules_that_deal_stages_otherwise(awake, one_process):
    stages = pipeline_stages(awake("attnres"), 2, "cpu")
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=next_token_loss)
    stages[1].stage_index_to_group_rank = {0: 0, 1: 1}
    with pytest.raises(ValueError, match="Stage 1 is on rank 0, and its schedule looks on rank 1"):
        schedule.step(ids_of(2, 9), target=ids_of(2, 9))


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True: must be False"),
        ({"num_loops": 2}, "num_loops=2: must be 1"),
    ],
)
def test_what_cannot_be_split(fields, error, awake, one_process):
    with pytest.raises(ValueError, match=error):
        pipeline_stages(awake("depth_attention", **fields), 2, "cpu")


def test_bad_arguments(awake, build, one_process):
    with pytest.raises(ValueError, match="num_stages=9: must be a multiple of the 1 ranks and at most the 8 layers"):
        pipeline_stages(awake("attnres"), 9, "cpu")
    with pytest.raises(ValueError, match='cannot be split into stages: attnres_routing="additive"'):
        pipeline_stages(awake("attnres", attnres_routing="additive", attnres_scale="sum"), 2, "cpu")
    with pytest.raises(TypeError, match="must be a causal language model of depthmix, not a DepthQwen3Config"):
        pipeline_stages(DepthQwen3Config(), 2, "cpu")
