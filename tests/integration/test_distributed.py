# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Two processes over gloo; starting them is what takes the time, so one start serves all checks of a family."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from depthmix.kernels.depth_dispatch import INTERPRETED


pytestmark = [pytest.mark.long, pytest.mark.sampled(2)]

# of a family with many, the one with most in it
PATTERNS = {"depth_qwen3": ["window"], "attnres": ["block_3"], "moda_olmo2": ["window"]}
WORKER = Path(__file__).with_name("two_process_worker.py")


@pytest.fixture
def run_two_processes(tmp_path):
    """`run_two_processes(folders)` gives the results of both ranks."""

    def run_two_processes(folders: dict[str, Path]) -> list[dict]:
        arguments = [f"{name}={folder}" for name, folder in folders.items()]
        results = [tmp_path / f"rank{rank}.json" for rank in range(2)]
        logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
        workers = []
        try:
            for rank in range(2):
                with open(logs[rank], "w") as log:
                    workers.append(
                        subprocess.Popen(
                            [sys.executable, WORKER, str(rank), tmp_path / "rendezvous", results[rank], *arguments],
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )
            codes = [worker.wait(timeout=200) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
        return [json.loads(path.read_text()) for path in results]

    return run_two_processes


def test_two_processes(family, build_awake, tmp_path, run_two_processes):
    folders = {name: tmp_path / name for name in PATTERNS.get(family.head.config_class.model_type, family.patterns)}
    for name, folder in folders.items():
        # an even vocabulary, since tensor parallelism splits the head
        build_awake(family, vocab_size=98, **family.patterns[name]).save_pretrained(folder)

    for results in run_two_processes(folders):
        assert [result for result in results.values() if "Traceback" in str(result)] == []
        for name in folders:
            for mode in ("plain", "non_reentrant", "reentrant"):
                assert results[f"ddp {name} {mode}"] < 1e-12
                assert results[f"fsdp {name} {mode}"] < 1e-12
            assert results[f"fsdp_checkpointing_enabled_after_sharding {name}"] < 1e-12

            bf16 = results[f"fsdp_bf16 {name}"]
            assert bf16["loss_error"] < 1e-2
            assert [name for name in bf16["without_gradient"] if not family.is_idle(name)] == []
            assert bf16["sources"] == bf16["bf16_sources"] and (bf16["sources"] > 0) == family.has_sources

            state = results[f"fsdp_full_state_dict {name}"]
            assert state["error"] < 1e-12 < state["moved"]

            # half of the model in each process
            exact = pytest.approx(0, abs=1e-12)
            assert results[f"tensor_parallel {name}"] == {"logits": exact, "gradients": exact, "held": 0.5}
            # here the final norm is a unit of its own and so the stock module, which computes in fp32
            gradients = pytest.approx(0, abs=1e-5)
            assert results[f"native_fsdp {name}"] == {"saved": exact, "gradients": gradients, "held": 0.5}

            if INTERPRETED:
                assert results[f"kernels {name}"] < 1e-4

            assert "pp_size=2: pipeline parallelism is not supported" in results[f"pipeline {name}"]
        assert [message for message in results["warnings"] if "view" in message] == []
