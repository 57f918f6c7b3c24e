# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Compiles the Triton kernels for GPUs that are not there. As a script it prints, as JSON, what it has compiled.
"""

import inspect

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}


class Recorder:
    """Stands for a kernel and keeps the arguments of its launch."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **constants):
        self.arguments, self.constants = arguments, constants


def compile_launch(kernel, arguments, constants, target: GPUTarget):
    """What the launch `kernel[grid](*arguments, **constants)` would run on the target, as Triton compiles it."""
    constants = dict(constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
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
