# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Compiles the Triton kernels for GPUs that are not there. As a script it prints, as JSON, what it has compiled for the
targets that its command line names.
"""

import inspect
import json
import sys
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from depthmix.kernels import norm_rotary_mix_triton


TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.bool: "*i1"}
# head dim, query heads, key-value heads, sources, dtype, norms and rotation, key norm before the rotation, gate
NORM_ROTARY_MIX = (
    (64, 32, 8, 0, torch.bfloat16, True, True, False),
    (64, 32, 8, 2, torch.bfloat16, True, True, False),
    (128, 16, 8, 1, torch.float16, True, False, True),
    (80, 6, 2, 4, torch.float32, True, True, False),
    (64, 8, 8, 15, torch.bfloat16, True, True, True),
    (64, 32, 8, 2, torch.bfloat16, False, True, False),
    (256, 4, 4, 1, torch.float32, False, True, True),
)


class Recorder:
    """Stands for a kernel and keeps the arguments of its launch."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **constants):
        self.arguments, self.constants = arguments, constants


def norm_rotary_mix_launches():
    """`(kernel, arguments, constants, whether loads must be wide)` of forward and backward of each of these."""
    for head_dim, heads, kv_heads, sources, dtype, fused, key_norm_first, gated in NORM_ROTARY_MIX:

        def rows(heads, head_dim=head_dim, dtype=dtype):
            return torch.empty(2, 128, heads, head_dim, dtype=dtype, device="meta").transpose(1, 2)

        query = rows(heads)
        keys, values = ([rows(kv_heads) for _ in range(sources + 1)] for _ in range(2))
        norm = torch.empty(head_dim, dtype=dtype, device="meta") if fused else None
        table = torch.empty(1, 128, head_dim, dtype=dtype, device="meta") if fused else None
        gate = torch.empty(kv_heads, dtype=torch.float32, device="meta") if gated else None
        entries = keys, values if sources else []
        arguments = (query, *entries, norm, norm, gate, table, table, 0.1, 1e-6, key_norm_first)
        outputs = [query, keys[-1]] * fused + values[-1:] * bool(sources)
        for direction, call in (
            ("fwd", lambda a=arguments: norm_rotary_mix_triton.norm_rotary_mix_forward(*a)),
            ("bwd", lambda a=arguments, o=outputs: norm_rotary_mix_triton.norm_rotary_mix_backward(o, *a)),
        ):
            name = f"norm_rotary_mix_{direction}_kernel"
            kernel, recorder = getattr(norm_rotary_mix_triton, name), Recorder()
            with patch.object(norm_rotary_mix_triton, name, recorder):
                call()
            yield kernel, recorder.arguments, recorder.constants, direction == "fwd" and head_dim != 80


def compile_launch(kernel, arguments, constants, target: GPUTarget):
    """What the launch `kernel[grid](*arguments, **constants)` would run on the target, as Triton compiles it."""
    constants = dict(constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
    names = list(inspect.signature(kernel.fn).parameters)
    constexprs, attributes = {}, {}

    def describe(value, path):
        if isinstance(value, tuple):
            return tuple(describe(item, (*path, i)) for i, item in enumerate(value))
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return POINTERS[value.dtype]
        if isinstance(value, int) and not isinstance(value, bool) and value != 1:
            if value % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
            return "i64" if value >= 2**31 else "i32"
        if isinstance(value, float):
            return "fp32"
        constexprs[path] = value
        return "constexpr"

    signature = {name: describe(value, (i,)) for i, (name, value) in enumerate(zip(names, arguments, strict=False))}
    for name, value in constants.items():
        signature[name] = "constexpr"
        constexprs[(names.index(name),)] = value
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def compiled_for(target: str, kernel, arguments, constants, /, **described) -> dict:
    """What a launch becomes on a target, to be printed, beside what else describes it."""
    gpu, limit = TARGETS[target]
    if gpu.backend == "hip":
        constants = {name: "ieee" if name == "PRECISION" else value for name, value in constants.items()}
        constants.pop("maxnreg", None)
    result = compile_launch(kernel, arguments, constants, gpu)
    assembly = result.asm.get("ptx") or result.asm["amdgcn"]
    wide_loads = ("ld.global.v", "cp.async.cg", "global_load_dwordx", "buffer_load_dwordx")
    return described | {
        "kernel": kernel.fn.__name__,
        "target": target,
        "shared_memory": result.metadata.shared,
        "shared_memory_limit": limit,
        "wide_loads": any(load in assembly for load in wide_loads),
    }


def main() -> None:
    compiled = []
    for target in sys.argv[1:]:
        gpu, shared_memory = TARGETS[target]
        with patch.object(norm_rotary_mix_triton, "WARP_SIZE", gpu.warp_size):
            launches = list(norm_rotary_mix_launches())
        for kernel, arguments, constants, wide in launches:
            result = compile_launch(kernel, arguments, constants, gpu)
            assembly = result.asm.get("ptx") or result.asm["amdgcn"]
            compiled.append(
                {
                    "kernel": kernel.fn.__name__,
                    "target": target,
                    "constants": constants,
                    "shared_memory": result.metadata.shared,
                    "shared_memory_limit": shared_memory,
                    "wide": wide,
                    "wide_loads": any(load in assembly for load in ("ld.global.v", "load_dwordx")),
                }
            )
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
