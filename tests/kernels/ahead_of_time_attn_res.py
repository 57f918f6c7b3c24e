# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Compiles the kernels of Attention Residuals for GPUs that are not there; prints, as JSON, what it has compiled."""

import json
import sys
from contextlib import nullcontext
from unittest.mock import patch

import torch
from ahead_of_time import Recorder, compiled_for

from depthmix.kernels import attn_res_triton


OFTEN = ("sm_90", "gfx942")
# hidden size, sources, sites, dtype, bias and output norm, recomputed
SHAPES = (
    (2048, 4, 8, torch.bfloat16, False, False),
    (2048, 3, 8, torch.bfloat16, True, True),
    (1536, 2, 4, torch.float32, True, False),
    (2304, 1, 3, torch.float16, False, True),
    (7168, 2, 2, torch.bfloat16, True, False),
)


class Recorders(Recorder):
    """Keeps every launch of one kernel."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __call__(self, *arguments, **constants):
        self.launches.append((self.kernel, arguments, constants))


def launches_of(hidden_size, sources, sites, dtype, extras, recomputed):
    """`(kernel, arguments, constants)` of a forward and a backward of each operation."""
    k, launches = attn_res_triton, []

    def new(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype)

    values = [new(256, hidden_size) for _ in range(sources)]
    query, log_sum_exp = new(hidden_size), new(256, dtype=torch.float32)
    one = (query, query, new(1) if extras else None, query if extras else None)
    every = ([query] * sites, [query] * sites)
    with (
        patch.multiple(
            k, **{name: Recorders(kernel, launches) for name, kernel in vars(k).items() if name.endswith("_kernel")}
        ),
        patch.object(k, "device_of", lambda tensor: nullcontext()),
    ):
        _, scalars = k.attn_res_forward(values, *one, 1e-6, 1, True)
        k.attn_res_backward(values[0], values, *one, scalars, 1e-6, 1)
        k.attn_res_phase_1_forward([value[:8] for value in values], *every, 1e-6, True)
        outputs = k.attn_res_phase_1_forward(values, *every, 1e-6, True)
        k.attn_res_phase_1_backward(
            values[:1] * sites, outputs[-1 - sites : -1], values if extras else [], values, *every, outputs[-1]
        )
        phase_2 = (values[0], log_sum_exp, values[0], values[0], *one, [])
        *_, scalars = k.attn_res_phase_2_forward(*phase_2, 1e-6, 1, True)
        kept = (None, log_sum_exp, values) if recomputed else (values[0], log_sum_exp, [])
        k.attn_res_phase_2_backward(values[0], values[0], *kept, values[0], *one, scalars, 1e-6, 1)
    return launches


def main() -> None:
    # what is special to a target shows with the first two shapes
    cases = [(shape, target) for i, shape in enumerate(SHAPES) for target in sys.argv[1:] if i < 2 or target in OFTEN]
    compiled = [
        compiled_for(
            *(target, kernel, arguments, constants),
            shape=str(shape),
            wide=shape[0] % 256 == 0 and "parameter" not in kernel.fn.__name__,
        )
        for shape, target in cases
        for kernel, arguments, constants in launches_of(*shape)
    ]
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
