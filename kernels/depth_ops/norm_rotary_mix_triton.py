# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`norm_rotary_mix` and `depth_value_mix` with Triton: how their kernels, which are the same, are launched, and their
gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .depth_dispatch import triton, triton_obstacle
from .depth_launch import device_of, divide_up, new_heads_like, power_of_2_from, strided
from .typed_operations import DifferentiableOperation, Operation


if triton is not None:
    from .norm_rotary_mix_jit import norm_rotary_mix_bwd_kernel, norm_rotary_mix_fwd_kernel

MAX_HEAD_DIM = 256
FEW_SOURCES = 4
MANY_SOURCES = (8, 16, 32, 64, 96)
# How many elements of a half the 128 threads of a program work on at once: the fastest on an H200.
FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 512, 256
WARP_SIZE = 64 if torch.version.hip else 32


def norm_rotary_mix_obstacle(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], *others: Tensor | None):
    """Why the kernels cannot work on these tensors, as the end of a sentence about the kernel; None if they can."""
    if query.shape[-1] > MAX_HEAD_DIM:
        return f"supports head dims up to {MAX_HEAD_DIM}, not {query.shape[-1]}"
    if query.shape[2] * keys[-1].shape[1] >= 2**31:
        return "supports fewer than 2**31 rows (tokens times key-value heads) in a batch entry"
    sources = len(keys) - 1
    if sources > MANY_SOURCES[-1]:
        return f"supports up to {MANY_SOURCES[-1]} sources, not {sources}"
    if sources > FEW_SOURCES and any(len({t.dtype for t in tensors[:-1]}) > 1 for tensors in (keys, values)):
        return f"needs keys and values each of one dtype if they are of more than {FEW_SOURCES} sources"
    return triton_obstacle((query, *keys, *values, *others))


def norm_rotary_mix_forward(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    gate: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    scaling: float,
    eps: float,
    key_norm_first: bool,
    training: bool = False,
) -> list[Tensor]:
    """
    `keys` and `values` have the layer's own last; without `values` nothing is mixed. Returns, in this order, the
    finished query and key if there are norms or a rotation, and the mixed value if there are values.
    """
    outputs = _new_outputs(query, keys, values, query_norm, key_norm, cos)
    finished = outputs[:2] if len(outputs) > 1 else (None, None)
    mixed = outputs[-1] if values else None
    programs, constants = _launch(query, keys[-1], FORWARD_ELEMENTS)
    if programs:
        with device_of(query):
            norm_rotary_mix_fwd_kernel[(programs,)](
                *_input_arguments(query, keys, values, query_norm, key_norm, gate, cos, sin),
                *finished,
                mixed,
                query.shape[2],
                scaling,
                eps,
                KEY_NORM_FIRST=key_norm_first,
                **constants,
            )
    return outputs


def norm_rotary_mix_backward(
    output_grads: Sequence[Tensor | None],
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    gate: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    scaling: float,
    eps: float,
    key_norm_first: bool,
) -> list[Tensor]:
    """
    Returns the gradients of the query, of each key, of each value, and, if there are norms, those of the weights of
    the query norm and the key norm as one fp32 tensor `[2, D]`, and if there is a gate, its gradient, fp32 `[K]`.
    """
    finished_grads = output_grads[:2] if len(output_grads) > 1 else (None, None)
    mixed_grad = output_grads[-1] if values else None
    input_grads = _new_input_grads(query, keys, values)
    query_grad, key_grads, value_grads = input_grads[0], input_grads[1 : 1 + len(keys)], input_grads[1 + len(keys) :]
    programs, constants = _launch(query, keys[-1], BACKWARD_ELEMENTS)
    has_norms = query_norm is not None or key_norm is not None
    norm_grads = query.new_empty((programs, 2, query.shape[-1]), dtype=torch.float32) if has_norms else None
    batch, kv_heads, tokens, _ = keys[-1].shape
    gate_grads = None if gate is None else query.new_empty((batch * tokens, kv_heads), dtype=torch.float32)
    if programs:
        with device_of(query):
            norm_rotary_mix_bwd_kernel[(programs,)](
                *map(strided, (*finished_grads, mixed_grad)),
                *_input_arguments(query, keys, values, query_norm, key_norm, gate, cos, sin),
                query_grad,
                key_grads[-1],
                value_grads[-1] if values else None,
                _padded(key_grads[:-1]),
                _padded(value_grads[:-1]),
                norm_grads,
                gate_grads,
                query.shape[2],
                scaling,
                eps,
                KEY_NORM_FIRST=key_norm_first,
                **constants,
            )
    return [*input_grads, *(grads.sum(0) for grads in (norm_grads, gate_grads) if grads is not None)]


def _input_arguments(query, keys, values, query_norm, key_norm, gate, cos, sin) -> tuple:
    own = map(strided, (query, keys[-1], values[-1] if values else None))
    parameters = map(strided, (query_norm, key_norm, gate))
    tables = map(_table_argument, (cos, sin))
    return *own, *_source_arguments(keys[:-1], values[:-1]), *parameters, *tables


def _source_arguments(keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple:
    """
    The sources, their common strides and their number. Few of them, as each has strides of its own: kernels for few
    sources are unrolled over them. Many of them, as pointers that a loop runs over.
    """
    if len(keys) <= FEW_SOURCES:
        return tuple(map(strided, keys)), tuple(map(strided, values)), None, len(keys)
    tensors = [_alike(tensors) for tensors in (keys, values)]
    return *map(_padded, tensors), tuple(x[0].stride() for x in tensors), len(keys)


def _alike(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors, copied unless all are aligned and have the same strides, as the keys of a model's layers do."""
    strides = tensors[0].stride()
    if all(tensor.stride() == strides and tensor.data_ptr() % 16 == 0 for tensor in tensors):
        return tensors
    return [new_heads_like(tensor).copy_(tensor) for tensor in tensors]


def _padded(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, the last repeated until a kernel takes so many: there are kernels for a few numbers only."""
    if len(tensors) <= FEW_SOURCES:
        return tuple(tensors)
    return (*tensors, *tensors[-1:] * (next(n for n in MANY_SOURCES if n >= len(tensors)) - len(tensors)))


def _table_argument(table: Tensor | None) -> tuple | None:
    """A table `[B or 1, T, D]` as kernels take it: all heads share it, and all batch entries if it has one."""
    if table is None:
        return None
    batch_stride, token_stride, column_stride = table.stride()
    return table, batch_stride if table.shape[0] > 1 else 0, 0, token_stride, column_stride


def _new_outputs(query, keys, values, query_norm, key_norm, cos) -> list[Tensor]:
    finishes = not (query_norm is None and key_norm is None and cos is None)
    outputs = [query, keys[-1]] if finishes else []
    return [new_heads_like(tensor) for tensor in (*outputs, *values[-1:])]


def _new_input_grads(query, keys, values) -> list[Tensor]:
    return [new_heads_like(tensor) for tensor in (query, *keys, *values)]


def _launch(query: Tensor, key: Tensor, elements: int) -> tuple[int, dict[str, int]]:
    """
    Number of programs, and the constants of a kernel that works on so many elements of a half at once. They are the
    same for any number of tokens, so that a token's result does not depend on how many there are.
    """
    batch, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    block_half = power_of_2_from((head_dim + 1) // 2)
    block_rows = elements // block_half
    constants = {
        "GROUP": heads // kv_heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_ROWS": block_rows,
        "BLOCK_HALF": block_half,
        "num_warps": 128 // WARP_SIZE,
    }
    return batch * divide_up(tokens * kv_heads, block_rows), constants


def _new_all_grads(output_grads, query, keys, values, query_norm, key_norm, gate, *_) -> list[Tensor]:
    grads = _new_input_grads(query, keys, values)
    if not (query_norm is None and key_norm is None):
        grads.append(query.new_empty((2, query.shape[-1]), dtype=torch.float32))
    if gate is not None:
        grads.append(torch.empty_like(gate, dtype=torch.float32, memory_format=torch.contiguous_format))
    return grads


def _save_for_backward(ctx, inputs, output):
    query, keys, values, query_norm, key_norm, gate, cos, sin, *ctx.constants, _ = inputs
    ctx.entries = len(keys), len(values)
    ctx.save_for_backward(query, query_norm, key_norm, gate, cos, sin, *keys, *values)


def _backward(ctx, output_grads):
    query, query_norm, key_norm, gate, cos, sin, *entries = ctx.saved_tensors
    keys, values = entries[: ctx.entries[0]], entries[ctx.entries[0] :]
    parameters = query_norm, key_norm, gate
    grads = _run_backward(list(output_grads), query, keys, values, *parameters, cos, sin, *ctx.constants)
    query_grad, key_grads, value_grads = grads[0], grads[1 : 1 + len(keys)], grads[1 + len(keys) : 1 + len(entries)]
    gate_grad = None if gate is None else grads.pop().to(gate.dtype)
    norm_grads = [
        None if norm is None else grads[-1][i].to(norm.dtype) for i, norm in enumerate((query_norm, key_norm))
    ]
    return query_grad, key_grads, value_grads, *norm_grads, gate_grad, None, None, None, None, None, None


_run_backward = Operation(norm_rotary_mix_backward, _new_all_grads)
run_norm_rotary_mix = DifferentiableOperation(
    norm_rotary_mix_forward,
    lambda query, keys, values, query_norm, key_norm, gate, cos, *_: _new_outputs(
        query, keys, values, query_norm, key_norm, cos
    ),
    _save_for_backward,
    _backward,
)
