# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`python -m benchmarks.run train_step prefill_32k --size 3b` measures cases on this machine's GPU."""

import argparse
import traceback
from pathlib import Path

from . import models, operations
from .harness import DEVICE, environment, release_memory, write_results


# operations are those of a GPU
CASES = models.CASES | (operations.CASES if DEVICE == "cuda" else {})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="case", help=f"any of: {', '.join(CASES)}")
    parser.add_argument("--size", nargs="+", choices=models.SIZES, default=["1.5b", "3b"])
    parser.add_argument("--models", nargs="+", choices=models.MODELS, default=models.SELECTED, metavar="model")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the CSV file")
    parser.add_argument("--name", default="models", help="name of the CSV file")
    arguments = parser.parse_args()
    models.SELECTED[:] = arguments.models
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")

    for size in arguments.size if set(arguments.cases) & set(models.CASES) else ():
        models.check_function(size)
        release_memory()
    print(*(f"{name} {value}" for name, value in environment().items()), sep=", ", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    measurements, failed = [], []
    for size in arguments.size:
        for name in arguments.cases:
            if name in operations.UNSIZED_CASES and size != arguments.size[0]:
                continue
            try:
                for m in CASES[name](name, size):
                    measurements.append(m)
                    print(
                        f"{m.case:42} {m.size:5} {m.model:16} {m.milliseconds:9.3f} ms ({m.low:.3f} to {m.high:.3f})"
                        f" {m.ratio:6.3f}x  {m.gib:.2f} GiB",
                        flush=True,
                    )
                    # written after every number: a later case may not finish
                    write_results(arguments.output / f"{arguments.name}.csv", measurements)
            except Exception:
                traceback.print_exc()
                failed.append(f"{name} at {size}")
                release_memory()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
