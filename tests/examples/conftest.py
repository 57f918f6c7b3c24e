# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The scripts of `examples/`, with their defaults, as modules."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest


EXAMPLES = Path(__file__).parents[2] / "examples"


def pytest_itemcollected(item):
    """What the examples show does not depend on the version of transformers."""
    item.add_marker(pytest.mark.once)


@pytest.fixture(scope="session")
def example():
    """`example(name)` imports a script."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module
    sys.path.remove(str(EXAMPLES))


class Launcher:
    """Runs an example in several processes; starting the first is what takes the time."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        command = [sys.executable, Path(__file__).with_name("launcher.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(folder / "log", "w") as log:
            self.process = subprocess.Popen(command, stderr=log, **pipes)

    def __call__(
        self, processes: int, config: str | None, output: Path, *arguments: str, example: str = "pretrain"
    ) -> list[dict]:
        """What each process found; `config` is the name of a file in `examples/accelerate` without its ending."""
        import torch

        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        config = config and str(EXAMPLES / "accelerate" / f"{config}.yaml")
        job = {"processes": processes, "config": config, "folder": str(folder), "example": example}
        job["arguments"] = ["--output", str(output), *arguments]
        print(json.dumps(job), file=self.process.stdin, flush=True)
        status = self.process.stdout.readline()
        logs = [self.folder / "log", *sorted(folder.glob("log*"))]
        assert status == "0\n", "\n".join(log.read_text()[-5000:] for log in logs)
        return [torch.load(folder / f"rank{rank}.pt") for rank in range(processes)]

    def close(self) -> None:
        try:
            self.process.communicate(timeout=60)
        finally:
            self.process.kill()


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("launcher"))
    yield launcher
    launcher.close()
