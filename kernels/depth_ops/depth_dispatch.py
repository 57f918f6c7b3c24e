# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Who does the work of an operation: what its argument `impl` asks for, and what kernels and compilers can do."""

from collections.abc import Iterable
from enum import Enum

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


try:
    import triton
except ImportError:
    triton = None

IMPLEMENTATIONS = ("auto", "triton", "reference")
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Triton's interpreter runs kernels on any device. Triton decides about it when kernels are defined.
INTERPRETED = triton is not None and triton.knobs.runtime.interpret


class Route(Enum):
    """
    The ways in which the work of an operation can be done. `KERNEL` is a fused kernel, `COMPILER` plain PyTorch that a
    compiler fuses with its neighbours although there is a kernel, `STOCK` plain PyTorch that runs as it is written.
    """

    KERNEL = "kernel"
    COMPILER = "compiler"
    STOCK = "stock"


def route(impl: str, operation: str, obstacle: str | None, decoded: Tensor | None = None) -> Route:
    """
    Decides who does the work of an operation. This is the one place that does.

    Args:
        impl (`str`):
            What the user asks for: one of `IMPLEMENTATIONS`.
        operation (`str`):
            Its name, for messages.
        obstacle (`str`, *optional*):
            Why its kernel cannot work on the tensors, as the end of a sentence about the kernel; None if it can.
        decoded (`torch.Tensor` of shape `[..., T, D]`, *optional*):
            Hidden states, if the operation is so small that in decoding its launch costs more than its work.

    Raises:
        `ValueError`: if there is no implementation of that name.
        `RuntimeError`: if it is `"triton"` and the kernel cannot run.
    """
    if not use_triton(impl, operation, obstacle):
        return Route.STOCK
    return Route.COMPILER if decoded is not None and left_to_compiler(impl, decoded) else Route.KERNEL


def check_implementation(impl: str, operation: str) -> None:
    """
    Raises:
        `ValueError`: if there is no implementation of that name.
        `RuntimeError`: if it is `"triton"` and Triton is not installed.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}: must be one of {', '.join(IMPLEMENTATIONS)}.")
    if impl == "triton" and triton is None:
        raise RuntimeError(f"impl='triton': {operation} needs the package triton, which is not installed.")


def use_triton(impl: str, operation: str, obstacle: str | None) -> bool:
    """
    Whether `impl` means the kernel, given what stands in its way. `"auto"` never means the interpreter, which is slow.

    Raises:
        `ValueError`: if there is no implementation of that name.
        `RuntimeError`: if it is `"triton"` and the kernel cannot run.
    """
    check_implementation(impl, operation)
    if impl == "triton" and obstacle is not None:
        raise RuntimeError(f"impl='triton': the kernel of {operation} {obstacle}.")
    return impl == "triton" or (impl == "auto" and obstacle is None and not INTERPRETED)


def left_to_compiler(impl: str, hidden_states: Tensor) -> bool:
    """Whether `"auto"` leaves a small operation to the compiler: in decoding, where each kernel costs its launch."""
    return impl == "auto" and in_compiled_decoding(hidden_states)


def in_compiled_decoding(hidden_states: Tensor) -> bool:
    """Whether a compiler sees the decoding of one token, `[..., 1, D]`, for each sequence."""
    return (
        torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and hidden_states.ndim > 1
        and hidden_states.shape[-2] == 1
    )


def triton_obstacle(tensors: Iterable[Tensor | None]) -> str | None:
    """
    Why no kernel can work on these tensors, of which some may be absent: the end of a sentence about the kernel. None
    if a kernel can.
    """
    if triton is None:
        return "needs the package triton, which is not installed"
    given = [tensor for tensor in tensors if tensor is not None]
    if (obstacle := _obstacle_of(given)) is not None:
        return obstacle
    for tensor in given:
        if tensor.dtype not in KERNEL_DTYPES:
            return f"supports {', '.join(map(str, KERNEL_DTYPES))}, not {tensor.dtype}"
    # By now all tensors are known to be on one device.
    device = given[0].device
    if device.type != "cuda" and not INTERPRETED:
        return f"needs a GPU, and the tensors are on {device}"
    return None


def plain_tensor_obstacle(tensors: Iterable[Tensor | None]) -> str | None:
    """Why no operation with a backward of its own can work on these tensors, whether kernels run in it or not."""
    return _obstacle_of([tensor for tensor in tensors if tensor is not None])


def _obstacle_of(given: list[Tensor]) -> str | None:
    if not torch.compiler.is_compiling():
        if is_transformed():
            return "does not work under transforms of torch.func or forward-mode differentiation"
        for tensor in given:
            if type(tensor) not in PLAIN_TENSORS and is_traceable_wrapper_subclass(tensor):
                return f"works on plain tensors, not on {type(tensor).__name__}"
    if len(devices := {tensor.device for tensor in given}) > 1:
        return f"needs all tensors on one device, not on {', '.join(sorted(map(str, devices)))}"
    return None


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active, beside autograd."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
