# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The implementations that an operation can be asked for by its argument `impl`."""

IMPLEMENTATIONS = ("auto", "triton", "reference")


def check_implementation(impl: str, operation: str) -> None:
    """
    Raises:
        `ValueError`: if there is no implementation of that name.
        `RuntimeError`: if the operation has none of that name in this installation.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}: must be one of {', '.join(IMPLEMENTATIONS)}.")
    if impl == "triton":
        raise RuntimeError(f"impl='triton': this version of depthmix has no Triton kernel for {operation}.")
