# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Compiles the kernels of the depth-weighted average for GPUs that are not there; prints, as JSON, what came out."""

import json
import sys
from contextlib import nullcontext
from unittest.mock import patch

import torch
from ahead_of_time import TARGETS, Recorder, compile_launch

from depthmix.kernels import depth_average_triton


# as many sources as after the last of 48 layers
SOURCES = 49


def launches():
    """`(kernel, arguments, constants)` of forward and backward."""
    sources = [torch.empty(256, 2048, dtype=torch.bfloat16) for _ in range(SOURCES)]
    weight = torch.empty(SOURCES, dtype=torch.bfloat16)
    for name, run in (
        ("depth_average_fwd_kernel", lambda: depth_average_triton.depth_average_forward(sources, weight)),
        ("depth_average_bwd_kernel", lambda: depth_average_triton.depth_average_backward(sources[0], sources, weight)),
    ):
        kernel, recorder = getattr(depth_average_triton, name), Recorder()
        with (
            patch.object(depth_average_triton, name, recorder),
            patch.object(depth_average_triton, "device_of", lambda tensor: nullcontext()),
        ):
            run()
        yield kernel, recorder.arguments, recorder.constants


def main() -> None:
    compiled = []
    for target in sys.argv[1:]:
        gpu, limit = TARGETS[target]
        for kernel, arguments, constants in launches():
            result = compile_launch(kernel, arguments, constants, gpu)
            assembly = result.asm.get("ptx") or result.asm["amdgcn"]
            compiled.append(
                {
                    "kernel": kernel.fn.__name__,
                    "target": target,
                    "shared_memory": result.metadata.shared,
                    "shared_memory_limit": limit,
                    "wide_loads": any(
                        load in assembly for load in ("ld.global.v", "global_load_dwordx", "buffer_load_dwordx")
                    ),
                    "wide_stores": any(
                        store in assembly for store in ("st.global.v", "global_store_dwordx", "buffer_store_dwordx")
                    ),
                }
            )
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
