# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Compiles the kernels of Mixture-of-Depths Attention for GPUs that are not there; prints, as JSON, what it did."""

import itertools
import json
import sys
from contextlib import nullcontext
from unittest.mock import patch

import torch
from ahead_of_time import compiled_for
from ahead_of_time_attn_res import Recorders

from depthmix.kernels import moda_attention_triton


# head dim, query heads, key-value heads, dtype, whether gradients of slots are added to earlier ones
SLOTS = (
    (64, 64, 8, torch.bfloat16, True),
    (64, 6, 2, torch.float16, False),
    (64, 256, 8, torch.bfloat16, True),
    (128, 16, 16, torch.bfloat16, True),
    (80, 40, 8, torch.bfloat16, True),
    (256, 8, 4, torch.bfloat16, False),
    (96, 56, 8, torch.float32, True),
)
# head dim, query heads, key-value heads, dtype, dtype of a mask
DECODED = (
    (64, 16, 8, torch.bfloat16, None),
    (128, 16, 16, torch.float16, torch.bool),
    (80, 6, 2, torch.float32, torch.float32),
)


def new(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def launches():
    """`(kernel, arguments, constants, whether loads must be wide)` of every kernel for each of these."""
    k, launched = moda_attention_triton, []
    names = [name for name in vars(k) if name.endswith("_kernel")]
    with (
        patch.multiple(k, **{name: Recorders(getattr(k, name), launched) for name in names}),
        patch.multiple(k, device_of=lambda tensor: nullcontext(), multiprocessors=lambda device: 132),
    ):
        for head_dim, heads, kv_heads, dtype, add in SLOTS:
            query = new(1, 256, heads, head_dim, dtype=dtype).transpose(1, 2)
            slots, log_sum_exp = (
                new(48, 1, 256, kv_heads, head_dim, dtype=dtype),
                new(1, heads, 256, dtype=torch.float32),
            )
            for gate in (None, new(heads, dtype=torch.float32)):
                k.depth_merge_forward(query, slots, slots, query, log_sum_exp, gate, 0.1, True)
                grads = (query, True, slots, slots, 0 if add else 48)
                k.depth_merge_backward(query, query, slots, slots, query, log_sum_exp, gate, 0.1, *grads)
            k.ungated(query, gate, query, log_sum_exp, query, log_sum_exp)
        for head_dim, heads, kv_heads, dtype, mask_dtype in DECODED:
            query = new(2, 1, heads, head_dim, dtype=dtype).transpose(1, 2)
            key, slots = new(2, kv_heads, 4096, head_dim, dtype=dtype), new(48, 2, 1, kv_heads, head_dim, dtype=dtype)
            mask = None if mask_dtype is None else new(2, 1, 1, 4096, dtype=mask_dtype)
            gate = new(heads, dtype=torch.float32) if mask is None else None
            k.decode_forward(query, key, key, slots, slots, None, mask, gate, 0.1, True)
    for kernel, arguments, constants in launched:
        yield (
            kernel,
            arguments,
            constants,
            constants["HEAD_DIM"] % 64 == 0 and "merge_kernel" not in kernel.fn.__name__,
        )


def main() -> None:
    compiled = [
        compiled_for(target, kernel, arguments, constants, constants=constants, wide=wide)
        for target, (kernel, arguments, constants, wide) in itertools.product(sys.argv[1:], list(launches()))
    ]
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
