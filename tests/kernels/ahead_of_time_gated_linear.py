# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Compiles the kernels of the gated activation for GPUs that are not there; prints, as JSON, what came out."""

import json
import sys
from contextlib import nullcontext
from unittest.mock import patch

import torch
from ahead_of_time import TARGETS, Recorder, compile_launch

from depthmix.kernels import gated_linear_triton


def launches():
    """`(kernel, arguments, constants, whether it writes the product)` of the forward and both backwards."""
    gate, weight = torch.empty(64, 512, dtype=torch.bfloat16), torch.empty(32, 512, dtype=torch.bfloat16)
    grad = torch.empty(64, 32, dtype=torch.bfloat16)
    for name, with_product, run in (
        ("fwd", False, lambda: gated_linear_triton.gated_product_forward(gate, gate)),
        ("bwd", False, lambda: gated_linear_triton.gated_product_backward(gate, gate, gate)),
        ("bwd", True, lambda: gated_linear_triton.gated_linear_backward(grad, gate, gate, weight, True, False)),
    ):
        kernel, recorder = getattr(gated_linear_triton, f"gated_product_{name}_kernel"), Recorder()
        with (
            patch.object(gated_linear_triton, f"gated_product_{name}_kernel", recorder),
            patch.object(gated_linear_triton, "device_of", lambda tensor: nullcontext()),
        ):
            run()
        yield kernel, recorder.arguments, recorder.constants, with_product


def main() -> None:
    compiled = []
    for target in sys.argv[1:]:
        for kernel, arguments, constants, with_product in launches():
            result = compile_launch(kernel, arguments, constants, TARGETS[target][0])
            assembly = result.asm.get("ptx") or result.asm["amdgcn"]
            wide = {
                "wide_loads": ("ld.global.v", "global_load_dwordx", "buffer_load_dwordx"),
                "wide_stores": ("st.global.v", "global_store_dwordx", "buffer_store_dwordx"),
            }
            found = {name: any(each in assembly for each in instructions) for name, instructions in wide.items()}
            entry = {"kernel": kernel.fn.__name__, "target": target, "with_product": with_product}
            compiled.append(entry | found)
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
