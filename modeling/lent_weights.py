# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
When a fused operation may take the weights of a module instead of calling it, and what is then done in its place.

This is the only place that decides it. Calling a module can do more than its forward: hooks, adapters, sharding,
quantisation, offloading and replaced forwards all act through the call, so each of them keeps the module from lending
its weights.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from depthmix.kernels.depth_dispatch import (
    PLAIN_TENSORS,
    in_compiled_decoding,
    triton_obstacle,
    use_triton,
)
from depthmix.kernels.depth_precision import autocast_dtype
from depthmix.kernels.shared_input_linear_op import shared_input_linear


M = TypeVar("M", bound=nn.Module)


class DepthRMSNorm(nn.Module):
    """
    An RMS norm over the last dimension, as the stock decoders have it, in fp32 and rounded to the dtype of its input.

    It is a class of this package, so that replacing the classes of transformers in a running process changes nothing
    here. `rounds_last` says whether the gain is applied before the rounding, as OLMo's norms do it, or after.
    """

    def __init__(self, size: int, eps: float = 1e-6, rounds_last: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps
        self.rounds_last = rounds_last

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states `[..., size]`, normalised, in their dtype unless the weight has a wider one."""
        normalised = hidden_states.to(torch.float32)
        variance = normalised.pow(2).mean(-1, keepdim=True)
        normalised = normalised * torch.rsqrt(variance + self.variance_epsilon)
        if self.rounds_last:
            return (self.weight * normalised).to(hidden_states.dtype)
        return self.weight * normalised.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class DepthMLP(nn.Module):
    """The gated feed-forward network of the stock decoders. A class of this package for the reason above."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: nn.Module, bias: bool):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act_fn = activation

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The update `[B, T, hidden]` by hidden states of this shape."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than its forward."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or nn.modules.module._has_any_global_hook()
    )


def is_exactly(module: object, *classes: type) -> bool:
    """
    Whether the object is an instance of one of these classes and of no class derived from them.

    It does not compare `type(module)`: a compiler would then guard the types of all modules, in Python, before each
    call.
    """
    return any(isinstance(module, each) and issubclass(each, type(module)) for each in classes)


def has_its_forward(module: nn.Module) -> bool:
    """Whether the module has the forward of its class, and not one that was put on the instance."""
    # a compiler guards attributes that are looked up, but not the keys of `__dict__`: without `hasattr` a compiled
    # model would miss a forward that is replaced later
    return "forward" not in module.__dict__ and hasattr(module, "forward")


def calls_its_forward(module: nn.Module, *classes: type) -> bool:
    """Whether calling this module is nothing but the forward of one of these classes."""
    return is_exactly(module, *classes) and has_its_forward(module) and not has_hooks(module)


def has_local_weight(module: nn.Module) -> bool:
    # fake ones stand for parameters when a model is exported
    return type(module.weight) in (*PLAIN_TENSORS, FakeTensor)


def runs_plainly(norm: nn.Module) -> TypeGuard[DepthRMSNorm]:
    """
    Whether calling this RMS norm is nothing but its class's forward with a local weight. If so a fused operation may
    take the weight and do its work; hooks, adapters, sharding, quantization and replaced forwards must be called.
    """
    return calls_its_forward(norm, DepthRMSNorm) and has_local_weight(norm)


def apply_norm(norm: nn.Module, hidden_states: torch.Tensor, impl: str) -> torch.Tensor:
    """
    The norm of hidden states `[B, T, hidden]`, as one kernel of torch's on a GPU, unless `impl` is `"reference"`. The
    module's own forward rounds twice there, takes six kernels and keeps fp32 copies of its input for the backward.
    """
    if (
        impl != "reference"
        and hidden_states.is_cuda
        and runs_plainly(norm)
        # for a weight of another dtype torch has no such kernel, and returns a dtype that the module does not
        and hidden_states.dtype is norm.weight.dtype
    ):
        return nn.functional.rms_norm(hidden_states, norm.weight.shape, norm.weight, norm.variance_epsilon)
    return norm(hidden_states)


def apply_linears(linears: Sequence[nn.Module], hidden_states: torch.Tensor, impl: str) -> list[torch.Tensor]:
    """
    These linear maps of the same hidden states `[B, T, hidden]`. In compiled decoding of one sequence they are one
    kernel where kernels are wanted and can work, and the modules do nothing else.
    """
    if (
        linears
        and impl != "reference"
        and in_compiled_decoding(hidden_states)
        and hidden_states.shape[0] == 1
        and autocast_dtype(hidden_states) is None
        and all(
            calls_its_forward(linear, nn.Linear)
            and linear.bias is None
            and has_local_weight(linear)
            and linear.weight.dtype is hidden_states.dtype
            for linear in linears
        )
    ):
        weights: list[Any] = [linear.weight for linear in linears]
        if use_triton(impl, "shared_input_linear", triton_obstacle((hidden_states, *weights))):
            return shared_input_linear(hidden_states, weights, impl=impl)
    return [linear(hidden_states) for linear in linears]


def apply_mlp(
    mlp: nn.Module, hidden_states: torch.Tensor, impl: str, beside: Sequence[nn.Module] = ()
) -> tuple[torch.Tensor, ...]:
    """The gated network's output `[B, T, hidden]`, and linear maps of its input, which are computed beside its own."""
    if in_compiled_decoding(hidden_states) and isinstance(mlp, DepthMLP) and calls_its_forward(mlp, DepthMLP):
        gate, up, *others = apply_linears((mlp.gate_proj, mlp.up_proj, *beside), hidden_states, impl)
        return *apply_linears((mlp.down_proj,), mlp.act_fn(gate) * up, impl), *others
    return mlp(hidden_states), *apply_linears(beside, hidden_states, impl)


def is_bare(module: nn.Module, module_class: type[M], *parameters: str) -> TypeGuard[M]:
    """
    Whether reading these parameters of a module, all it has, is as good as calling it. It is not where something has
    wrapped it (adapters, checkpointing), changed its class (FSDP2) or its forward (offloading), or partitioned its
    parameters, or where a hook sets them first (pruning) or changes what the module gets.
    """
    return (
        is_exactly(module, module_class)
        and has_its_forward(module)
        and not module._forward_pre_hooks
        and all(
            p is None or (type(p) in PLAIN_TENSORS and p.numel())
            for p in (getattr(module, name) for name in parameters)
        )
    )
