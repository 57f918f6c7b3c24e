# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Compiles the kernel of the linear maps of one token for GPUs that are not there; prints, as JSON, what came out."""

import itertools
import json
import sys
from contextlib import nullcontext
from unittest.mock import patch

import torch
from ahead_of_time import Recorder, compiled_for

from depthmix.kernels import shared_input_linear_triton


# hidden size, dtype
SHAPES = ((1536, torch.bfloat16), (2048, torch.float16), (7168, torch.float32))


def launch(size: int, dtype: torch.dtype) -> Recorder:
    recorder = Recorder()
    with (
        patch.object(shared_input_linear_triton, "shared_input_linear_kernel", recorder),
        patch.object(shared_input_linear_triton, "device_of", lambda tensor: nullcontext()),
    ):
        weights = [torch.empty(rows, size, dtype=dtype, device="meta") for rows in (size, size // 4, 100)]
        shared_input_linear_triton.shared_input_linear_forward(weights[0][:1], weights)
    return recorder


def main() -> None:
    kernel = shared_input_linear_triton.shared_input_linear_kernel
    compiled = []
    for target, shape in itertools.product(sys.argv[1:], SHAPES):
        recorder = launch(*shape)
        compiled.append(compiled_for(target, kernel, recorder.arguments, recorder.constants, size=shape[0]))
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
