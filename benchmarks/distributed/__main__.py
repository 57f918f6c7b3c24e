# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`python -m benchmarks.distributed correctness` compares loss and gradients of every family in every arrangement of
several GPUs with those of one process. `python -m benchmarks.distributed speed` measures train steps and decoding on
several GPUs beside one, and what a pipeline sends.

A process has a GPU of its own and they talk over NCCL. Without a GPU they talk over gloo, which shows that everything
runs; `speed` then takes the size tiny, whose numbers mean nothing.
"""

import argparse
from pathlib import Path

from depthmix.families import FAMILIES

from ..harness import DEVICE, environment
from .correctness import correctness
from .processes import missing_gpus
from .speed import speed


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distributed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the CSV files")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("correctness", parents=[shared], help="exits with 1 where something differs")
    check.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="processes; models have four layers")
    check.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES], metavar="MODEL_TYPE")
    measure = commands.add_parser("speed", parents=[shared], help="exits with 1 where something cannot be measured")
    measure.add_argument(
        "--ranks", type=int, choices=(2, 4, 8), default=2, help="from 4 on also FSDP2 x tensor parallel"
    )
    measure.add_argument("--size", choices=("3b", "1.5b", "tiny"), default="3b" if DEVICE == "cuda" else "tiny")
    measure.add_argument("--steps", type=int, default=8, help="train steps that are measured")
    arguments = parser.parse_args(argv)
    if reason := missing_gpus(arguments.ranks):
        parser.error(reason)
    arguments.output.mkdir(parents=True, exist_ok=True)
    print(*(f"{name} {value}" for name, value in environment().items()), sep=", ", flush=True)
    if arguments.command == "correctness":
        succeeded = correctness(arguments.families, arguments.ranks, arguments.output)
    else:
        if arguments.size != "tiny" and DEVICE == "cpu":
            parser.error(f"--size {arguments.size} needs GPUs; tiny tries the command out")
        succeeded = speed(arguments.size, arguments.ranks, arguments.steps, arguments.output)
    raise SystemExit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
