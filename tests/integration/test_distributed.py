# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Two processes over gloo; starting them is what takes the time, so one start serves all checks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
from family_models import AWAKE_FIELDS, new_model, wake
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from depthmix.families import FAMILIES
from depthmix.kernels.depth_dispatch import INTERPRETED
from depthmix.modeling.mixing_modules import MixingModule


pytestmark = [pytest.mark.long, pytest.mark.sampled(2)]

# of a family with many, the one with most in it
PATTERNS = {"depth_qwen3": ["gated"], "attnres": ["block_3"], "moda_olmo2": ["window"]}
WORKER = Path(__file__).with_name("two_process_worker.py")


@pytest.fixture(scope="module")
def run_two_processes(tmp_path_factory):
    """`run_two_processes(folders, checks)` gives the results of both ranks, of all checks or of those named."""
    place = tmp_path_factory.mktemp("two_processes")
    logs = [place / f"rank{rank}.log" for rank in range(2)]
    workers = []

    def run_two_processes(folders: dict[str, Path], checks: list[str] | None = None) -> list[dict]:
        job = {"folders": {name: str(folder) for name, folder in folders.items()}, "checks": checks}
        for worker in workers:
            print(json.dumps(job), file=worker.stdin, flush=True)
        answers = [worker.stdout.readline() for worker in workers]
        assert all(answers), "\n".join(log.read_text() for log in logs)
        return [json.loads(answer) for answer in answers]

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    try:
        for rank in range(2):
            command = [sys.executable, WORKER, str(rank), place / "rendezvous"]
            with open(logs[rank], "w") as log:
                workers.append(subprocess.Popen(command, stderr=log, **pipes))
        yield run_two_processes
        for worker in workers:
            worker.communicate(timeout=60)
    finally:
        for worker in workers:
            worker.kill()


def test_two_processes(family, build_awake, tmp_path, run_two_processes):
    folders = {name: tmp_path / name for name in PATTERNS.get(family.head.config_class.model_type, family.patterns)}
    for name, folder in folders.items():
        # an even vocabulary, since tensor parallelism splits the head
        build_awake(family, vocab_size=98, **family.patterns[name]).save_pretrained(folder)

    # the loss is in fp32
    exact, in_fp32 = pytest.approx(0, abs=1e-12), pytest.approx(0, abs=1e-5)
    for results in run_two_processes(folders):
        assert [result for result in results.values() if "Traceback" in str(result)] == []
        for name in folders:
            for mode in ("plain", "non_reentrant", "reentrant"):
                for arrangement in ("ddp", "fsdp"):
                    found = results[f"{arrangement} {name} {mode}"]
                    assert found == {"loss": in_fp32, "gradients": exact}, (arrangement, name, mode)
            assert results[f"fsdp_checkpointing_enabled_after_sharding {name}"] < 1e-12

            bf16 = results[f"fsdp_bf16 {name}"]
            assert bf16["loss_error"] < 1e-2
            assert [name for name in bf16["without_gradient"] if not family.is_idle(name)] == []
            assert bf16["sources"] == bf16["bf16_sources"] and (bf16["sources"] > 0) == family.has_sources

            state = results[f"fsdp_full_state_dict {name}"]
            assert state["error"] < 1e-12 < state["moved"]

            # half of the model in each process
            found = {"loss": in_fp32, "logits": exact, "gradients": exact, "held": 0.5}
            assert results[f"tensor_parallel {name}"] == found
            # here the final norm is a unit of its own and so the stock module, which computes in fp32
            assert results[f"native_fsdp {name}"] == {"saved": exact, "gradients": in_fp32, "held": 0.5}

            lean = results[f"lean_loss_of_parts {name}"]
            assert lean == dict.fromkeys(("ddp", "fsdp", "fsdp_size", "tp_size"), in_fp32)

            if INTERPRETED:
                assert max(results[f"kernels {name}"].values()) < 1e-4

            assert "pp_size=2: pipeline parallelism is not supported" in results[f"pipeline {name}"]
        assert [message for message in results["warnings"] if "view" in message] == []


@pytest.mark.exhaustive
@pytest.mark.once
@pytest.mark.parametrize("pair", FAMILIES)
def test_tensor_parallel_gradients(pair, tmp_path, run_two_processes):
    """Of every method on every backbone, as long as no key-value head is split."""
    family = FAMILIES[pair]
    model = wake(new_model(family, **AWAKE_FIELDS[family.method], vocab_size=98))
    model.save_pretrained(tmp_path / "model")
    for results in run_two_processes({"awake": tmp_path / "model"}, ["tensor_parallel"]):
        found = results["tensor_parallel awake"]
        assert "Traceback" not in str(found), found
        # the recurrence of Kimi Linear has gradients in fp32
        tolerance = 1e-4 if family.backbone.model_type == "kimi_linear" else 1e-12
        assert found["logits"] < 1e-12 and found["gradients"] < tolerance


@pytest.mark.once
@pytest.mark.parametrize("pair", FAMILIES)
def test_mixing_within_attention_is_in_the_plan(pair):
    """Where a device has some of the heads only, the gradient of what all heads share is a part of it on each."""
    family = FAMILIES[pair]
    gate = {"depth_attention": {"depth_gate": True}, "moda": {"moda_gate": True}}.get(family.method, {})
    model = new_model(family, **AWAKE_FIELDS[family.method] | gate)
    plan = model.config.base_model_tp_plan or {}
    shared = {
        re.sub(r"\.\d+\.", ".*.", name.removeprefix("model."))
        for name, module in model.named_modules()
        if ".self_attn." in name and isinstance(module, MixingModule)
    }
    assert shared or family.method in ("attnres", "denseformer", "mhc")
    if plan.get("layers.*.self_attn.v_proj") == "colwise":
        assert {plan.get(name) for name in shared} <= {"replicated_with_grad_allreduce"}, shared


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("policy", [True, False], ids=["policy", "units of their own"])
def test_mixing_parameters_move_under_fsdp(family, policy, tiny, token_ids, one_process):
    """As docs/train.md says: fp32 with a policy for bf16, or bf16 with mixing modules that are units of their own."""
    fields = tiny | family.defaults | family.densest | {"num_hidden_layers": 3, "initializer_range": 0.02}
    model = family.head(family.head.config_class(**fields))
    mixing = {name: module for name, module in model.named_modules() if isinstance(module, MixingModule)}
    if not mixing:
        pytest.skip("this family has no mixing parameters")
    options = {}
    if policy:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    else:
        model.bfloat16()
        for name, module in mixing.items():
            if name.rpartition(".")[0] not in mixing:
                fully_shard(module)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    own = {n: p for n, p in model.named_parameters() if n.rpartition(".")[0] in mixing and not family.is_idle(n)}
    before = {name: parameter.full_tensor().clone() for name, parameter in own.items()}
    optimizer = torch.optim.AdamW(own.values(), lr=5e-5, weight_decay=0)
    for step in range(30):
        ids = token_ids(2, 9, seed=step % 4)
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    unmoved = {name: int((own[name].full_tensor() == tensor).sum()) for name, tensor in before.items()}
    assert {n: count for n, count in unmoved.items() if count > 0.01 * before[n].numel()} == {}
