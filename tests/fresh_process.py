# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Runs code in processes that have imported nothing of the host library yet, faster than new interpreters would.

Started as a script, this file imports what every such process needs and no test asks about: torch with its compiler,
and what transformers imports of others. It then reads a line of JSON for each program, which a forked process runs.
"""

import json
import os
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path


class FreshPython:
    """A process that forks; `run` is [`subprocess.run`] of `python -c code arguments` with output as text."""

    def __init__(self, place: Path):
        self.place, self.count = place, 0
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__], **pipes)

    def run(self, code: str, *arguments, cwd: Path | None = None, env: dict | None = None):
        self.count += 1
        outputs = [str(self.place / f"{self.count}.{name}") for name in ("stdout", "stderr")]
        job = {
            "code": code,
            "arguments": list(map(str, arguments)),
            "folder": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "outputs": outputs,
        }
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        texts = [Path(output).read_text(encoding="utf-8") for output in outputs]
        return subprocess.CompletedProcess(arguments, status, *texts)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def run_in_child(job: dict) -> int:
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, output in enumerate(job["outputs"], start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    # as `python -c` has them
    sys.argv, sys.path[0] = ["-c", *job["arguments"]], ""
    try:
        exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return 1 if isinstance(end.code, str) else end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve() -> None:
    for name in (
        "huggingface_hub.hf_api",
        "safetensors.torch",
        "tokenizers",
        "torch._dynamo",
        "torch.distributed.tensor",
    ):
        import_module(name)
    import torch

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 1
            try:
                status = run_in_child(json.loads(line))
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers)


if __name__ == "__main__":
    serve()
