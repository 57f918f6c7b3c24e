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
from transformers.activations import SiLUActivation

from depthmix.kernels.depth_dispatch import (
    PLAIN_TENSORS,
    in_compiled_decoding,
    triton_obstacle,
    use_triton,
)
from depthmix.kernels.depth_precision import autocast_dtype
from depthmix.kernels.gated_linear_op import gated_linear, gated_product
from depthmix.kernels.parallel_linear_op import parallel_linear
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
    These linear maps of the same hidden states `[B, T, hidden]`. Where kernels are wanted and can work, and the
    modules do nothing else, they are one kernel in compiled decoding of one sequence, and in training they add the
    gradients of the hidden states up by themselves.
    """
    if len(linears) > 1 and (shared := shared_gradient_weights(linears, hidden_states, impl)) is not None:
        return parallel_linear(hidden_states, shared)
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


def shared_gradient_weights(
    linears: Sequence[nn.Module], hidden_states: torch.Tensor, impl: str
) -> list[torch.Tensor] | None:
    """
    The weights of linear maps whose backward can be one, as in training without autocast, which has every map cast the
    hidden states, and compilers; None elsewhere.
    """
    if (
        impl == "reference"
        or torch.compiler.is_compiling()
        or not (torch.is_grad_enabled() and hidden_states.requires_grad)
        or autocast_dtype(hidden_states) is not None
    ):
        return None
    weights = []
    for linear in linears:
        lent = lent_linear(linear, hidden_states)
        if lent is None or lent[1] is not None:
            return None
        weights.append(lent[0])
    obstacle = triton_obstacle((hidden_states, *weights))
    return weights if use_triton(impl, "parallel_linear", obstacle) else None


def apply_mlp(
    mlp: nn.Module, hidden_states: torch.Tensor, impl: str, beside: Sequence[nn.Module] = ()
) -> tuple[torch.Tensor, ...]:
    """The gated network's output `[B, T, hidden]`, and linear maps of its input, which are computed beside its own."""
    if isinstance(mlp, DepthMLP) and calls_its_forward(mlp, DepthMLP):
        if in_compiled_decoding(hidden_states):
            gate, up, *others = apply_linears((mlp.gate_proj, mlp.up_proj, *beside), hidden_states, impl)
            return *apply_linears((mlp.down_proj,), mlp.act_fn(gate) * up, impl), *others
        if fuses_gate(mlp, hidden_states, impl):
            gate, up, *others = apply_linears((mlp.gate_proj, mlp.up_proj, *beside), hidden_states, impl)
            return gated_update(mlp, gate, up, impl), *others
    return mlp(hidden_states), *apply_linears(beside, hidden_states, impl)


def fuses_gate(mlp: DepthMLP, hidden_states: torch.Tensor, impl: str) -> bool:
    """
    Whether the gated activation of this network is one operation of ours. A compiler fuses it by itself, and for
    single tokens that need no gradient the operation would cost more time on the host than it saves.
    """
    return (
        impl != "reference"
        and not torch.compiler.is_compiling()
        and (hidden_states.shape[-2] > 1 or (torch.is_grad_enabled() and hidden_states.requires_grad))
        and calls_its_forward(mlp.act_fn, nn.SiLU, SiLUActivation)
        and use_triton(impl, "gated_product", triton_obstacle((hidden_states,)))
    )


def gated_update(mlp: DepthMLP, gate: torch.Tensor, up: torch.Tensor, impl: str) -> torch.Tensor:
    """The network's output from what its first two maps have given: the last map is taken along if it lends itself."""
    if gate.dtype is not up.dtype or triton_obstacle((gate, up)) is not None:
        # adapters, quantised maps and sharding return what they like
        return mlp.down_proj(mlp.act_fn(gate) * up)
    weights = lent_linear(mlp.down_proj, gate)
    if weights is None or triton_obstacle((gate, *weights)) is not None:
        return mlp.down_proj(gated_product(gate, up, impl=impl))
    return gated_linear(gate, up, *weights, impl=impl)


def lent_linear(linear: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """
    Weight and bias of a linear map as calling it with these hidden states would use them, cast as autocast casts. None
    if the map must be called: where anything else happens then, where its parameters are sharded or elsewhere, and
    where the call would be an error.
    """
    if not (calls_its_forward(linear, nn.Linear) and has_local_weight(linear)):
        return None
    weight: torch.Tensor = linear.weight  # type: ignore[assignment]
    bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]
    if not weight.numel():
        return None
    if bias is not None and type(bias) not in (*PLAIN_TENSORS, FakeTensor):
        return None
    dtype = autocast_dtype(hidden_states)
    if dtype is not None:
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    dtypes = {x.dtype for x in (hidden_states, weight, bias) if x is not None}
    return (weight, bias) if len(dtypes) == 1 else None


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
