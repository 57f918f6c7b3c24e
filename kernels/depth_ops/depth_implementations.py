# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The implementations that an operation can be asked for by its argument `impl`, and what the Triton ones need."""

import contextlib
import re
from collections.abc import Iterable
from functools import lru_cache

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
# Triton's interpreter runs kernels anywhere; it must be chosen before they are defined
INTERPRETED = triton is not None and triton.knobs.runtime.interpret


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
    Whether `impl` means the kernel for tensors to which there is this `obstacle`, or None. `"auto"` never means the
    interpreter.

    Raises:
        `ValueError`: if there is no implementation of that name.
        `RuntimeError`: if it is `"triton"` and the kernel cannot run.
    """
    check_implementation(impl, operation)
    if impl == "triton" and obstacle is not None:
        raise RuntimeError(f"impl='triton': the kernel of {operation} {obstacle}.")
    return impl == "triton" or (impl == "auto" and obstacle is None and not INTERPRETED)


def in_compiled_decoding(hidden_states: Tensor) -> bool:
    """Whether a compiler sees decoding with one token `[..., 1, D]` for each sequence."""
    return (
        torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and hidden_states.ndim > 1
        and hidden_states.shape[-2] == 1
    )


def left_to_compiler(impl: str, hidden_states: Tensor) -> bool:
    """
    Whether `"auto"` means plain PyTorch here, for a compiler to fuse with what is around it: decoding, where each
    kernel costs its launch.
    """
    return impl == "auto" and in_compiled_decoding(hidden_states)


def triton_obstacle(tensors: Iterable[Tensor]) -> str | None:
    """Why kernels cannot work on these tensors, as the end of a sentence about the kernel; None if they can."""
    if triton is None:
        return "needs the package triton, which is not installed"
    if (obstacle := plain_tensor_obstacle(tensors)) is not None:
        return obstacle
    for tensor in tensors:
        if tensor.dtype not in KERNEL_DTYPES:
            return f"supports {', '.join(map(str, KERNEL_DTYPES))}, not {tensor.dtype}"
    # of all tensors, as has been seen
    device = tensor.device
    if device.type != "cuda" and not INTERPRETED:
        return f"needs a GPU, and the tensors are on {device}"
    return None


def plain_tensor_obstacle(tensors: Iterable[Tensor]) -> str | None:
    """The same, as far as it holds for any typed operation, whatever runs in it."""
    if not torch.compiler.is_compiling():
        if is_transformed():
            return "does not work under transforms of torch.func or forward-mode differentiation"
        for tensor in tensors:
            if type(tensor) not in PLAIN_TENSORS and is_traceable_wrapper_subclass(tensor):
                return f"works on plain tensors, not on {type(tensor).__name__}"
    if len(devices := {tensor.device for tensor in tensors}) > 1:
        return f"needs all tensors on one device, not on {', '.join(sorted(map(str, devices)))}"
    return None


def is_transformed() -> bool:
    """Whether there is more to differentiate than autograd does."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def operation_namespace(module_name: str) -> str:
    """
    A namespace for the operations of one module: a name belongs to one version of the code. Loading two saved models
    loads two copies of it, and the later one would take a common name from the earlier.
    """
    return re.sub(r"\W", "_", module_name)


def is_recorded() -> bool:
    """Whether something looks at the operations that run, which would not see a kernel launched outside of one."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager:
    """The context in which kernels for this tensor are launched: Triton launches on the current device."""
    index = tensor.get_device()
    if index < 0 or index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(index)


def divide_up(dividend: int, divisor: int) -> int:
    """As Triton's `cdiv`, whose call from the host costs a microsecond."""
    return -(-dividend // divisor)


def power_of_2_from(size: int) -> int:
    """The least power of two that is not less than this, as Triton's `next_power_of_2`."""
    return 1 << max(size - 1, 0).bit_length()


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many of them the device has; some small number if kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


# asked once, since older compilers cannot trace the question
AUTOCAST_DEVICES = frozenset(
    device for device in ("cpu", "cuda", "xpu", "mps", "hpu") if torch.amp.is_autocast_available(device)
)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """To which autocast brings the inputs of an attention; None if it is off or leaves this tensor alone."""
    device = tensor.device.type
    if tensor.dtype is torch.float64 or device not in AUTOCAST_DEVICES:
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    """The context in which matrix products keep the dtype of their inputs."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if device in AUTOCAST_DEVICES else contextlib.nullcontext()
