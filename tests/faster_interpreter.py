# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Makes Triton's interpreter quicker, and changes nothing of what it computes.

With every launch and every call of a jit function within it, of the standard library too, the interpreter goes through
all members of `triton.language` to replace the builtins, and with every operation it builds a table of dtypes. Both
took half the time of the interpreted tests, and always with the same result.
"""

import functools
import inspect

from depthmix.kernels import depth_dispatch


def do_repeated_work_once() -> None:
    """To be called before the first launch, while no member of `triton.language` is replaced yet."""
    if not depth_dispatch.INTERPRETED:
        return
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    language = interpreter.tl
    packages = (language, language.core, language.math, language.tensor, language.core.tensor_descriptor_base)
    builtins = {
        package: [name for name, member in inspect.getmembers(package) if is_builtin(member)] for package in packages
    }

    def patch_builtin(package, builder, scope):
        for name in builtins[package]:
            # a call within a launch leaves what it replaces replaced
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    # names of the modules of which a function has been called in the current launch
    called = set()
    patch_lang, launch, np_dtype = (
        interpreter._patch_lang,
        interpreter.GridExecutor.__call__,
        interpreter._get_np_dtype,
    )

    def patch_lang_once(function):
        if function.__module__ in called:
            return interpreter._LangPatchScope()
        called.add(function.__module__)
        return patch_lang(function)

    def launch_anew(self, *args, **kwargs):
        called.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            called.clear()

    np_dtype_of_scalar = functools.cache(np_dtype)

    def get_np_dtype(dtype):
        # types of blocks and pointers cannot be hashed; a block is stored as its elements are
        return np_dtype(dtype) if dtype.scalar.is_ptr() else np_dtype_of_scalar(dtype.scalar)

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang_once
    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._get_np_dtype = get_np_dtype
