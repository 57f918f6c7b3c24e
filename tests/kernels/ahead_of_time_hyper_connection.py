# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Compiles the kernels of hyper-connections for GPUs that are not there; prints, as JSON, what it has compiled."""

import json
import sys
from contextlib import nullcontext
from unittest.mock import patch

import torch
from ahead_of_time import compiled_for
from ahead_of_time_attn_res import Recorders

from depthmix.kernels import hyper_connection_triton


# streams, hidden size, dtype, dtype of the parameters, the targets with and without the kernels of the maps, which
# take long and see no streams
SHAPES = (
    (4, 2048, torch.bfloat16, torch.bfloat16, ("sm_90", "gfx942"), ()),
    (2, 2304, torch.bfloat16, torch.float32, ("sm_80", "sm_100"), ("sm_90",)),
    (4, 1536, torch.float32, torch.float32, (), ("sm_90",)),
)


def launches_of(num_streams, size, dtype, parameter_dtype):
    """`(kernel, arguments, constants)` of a forward and a backward of both operations."""
    k, launches, entries = hyper_connection_triton, [], num_streams * (num_streams + 2)

    def new(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype)

    streams, update = new(256, num_streams, size, dtype=dtype), new(256, size, dtype=dtype)
    parameters = [
        new(num_streams * size, dtype=parameter_dtype),
        new(entries, num_streams * size, dtype=parameter_dtype),
        [new(1, dtype=parameter_dtype) for _ in range(3)],
        [new(*shape, dtype=parameter_dtype) for shape in ((num_streams,), (num_streams,), (num_streams,) * 2)],
    ]
    with (
        patch.multiple(
            k, **{name: Recorders(kernel, launches) for name, kernel in vars(k).items() if name.endswith("_kernel")}
        ),
        patch.multiple(k, device_of=lambda tensor: nullcontext(), multiprocessors=lambda device: 132),
    ):
        mixed, residual, post, scalars = k.hyper_connection_read_forward(streams, *parameters, 1e-6, 20, True, True)
        k.hyper_connection_read_backward(
            *(mixed, residual, post, streams, streams, *parameters, scalars), iterations=20, columns_first=True
        )
        k.hyper_connection_write_forward(streams, update, residual, post, True)
        k.hyper_connection_write_backward(streams, streams, update, residual, post)
    return launches


def main() -> None:
    compiled = [
        compiled_for(
            *(target, kernel, arguments, constants),
            shape=str(shape),
            wide=not any(name in kernel.fn.__name__ for name in ("maps", "parameter")),
        )
        for *shape, with_maps, without_maps in SHAPES
        for target in sys.argv[1:]
        if target in (*with_maps, *without_maps)
        for kernel, arguments, constants in launches_of(*shape)
        if target in with_maps or "maps" not in kernel.fn.__name__
    ]
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
