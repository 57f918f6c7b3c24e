# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The depth slots that the layers of one call of a model write and read.

Without gradients, slots lie in one buffer, which is the handle; of a window of recent slots it is a ring.

With gradients, where kernels run, slots lie in one buffer, and so do their gradients, to which the backward of each
reader adds in place. The handle orders autograd: it depends on all writes before, and every reader depends on it, so
the gradient of a slot is complete when its writer's backward takes it. Autograd sees no slots there. It sees a
gradient of the handle, of zero, only where gradients are recorded themselves: that is how second derivatives, which
are an error, find the readers of a slot.

With gradients elsewhere, and where operations are recorded, as by `torch.compile`, the handle is the slots themselves.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .depth_checks import check_gate, default_scaling
from .depth_dispatch import Route, check_implementation, route
from .depth_precision import autocast_dtype
from .moda_attention_joint import joint_backward, moda_attention_forward, run_moda_attention
from .moda_attention_op import attend, check_attention, choose
from .moda_attention_triton import slot_obstacle
from .typed_operations import is_recorded, needs_grad, refuse_batches, without_derivative


class DepthStream:
    """
    The slots of one call of a model, for [`moda_attention_over_stream`]. Whoever runs the layers makes one, writes a
    layer's slots after its call, and hands the handle, what `write` last returned, to each layer, as tensors of its
    own:

        stream = DepthStream(slots)
        handle = stream.handle
        for layer in layers:
            hidden, key, value = layer(hidden, stream, *handle)
            handle = stream.write(handle, key, value)

    So a layer that is computed again for its gradients reads again and writes nothing.

    Args:
        slots (`int`):
            How many will be written at most.
        impl (`str`, *optional*, defaults to `"auto"`):
            As in [`moda_attention`].
        window (`int`, *optional*):
            How many of the most recent slots readers read at most. Without gradients, no more are kept.
        grad_dtype (`torch.dtype`, *optional*):
            In what the gradients of shared slots are added up, the dtype of the slots by default.

    Raises:
        `ValueError`: if `impl` is unknown.
        `RuntimeError`: if `impl="triton"` and Triton is not installed.

    Example:

        >>> import torch
        >>> from depthmix.kernels import DepthStream

        >>> stream = DepthStream(slots=2)
        >>> handle = stream.write(stream.handle, torch.zeros(1, 3, 2, 8), torch.ones(1, 3, 2, 8))
        >>> stream.written, stream.slots(handle, 0, 1)[1][0].shape
        (1, torch.Size([1, 3, 2, 8]))
    """

    def __init__(
        self, slots: int, *, impl: str = "auto", window: int | None = None, grad_dtype: torch.dtype | None = None
    ):
        check_implementation(impl, "DepthStream")
        self.capacity, self.impl, self.grad_dtype = slots, impl, grad_dtype
        self.kept = slots if window is None else min(window, slots)
        self.written = 0
        self._has_buffers = False
        # Where readers share the slots: keys and values `[slots, B, T, K, D]`, and during a backward pass their
        # gradients.
        self._slots: list[Tensor] | None = None
        self._grads: list[Tensor] | None = None
        self._has_grad = [False] * slots
        self._graph_tasks: set[int] = set()

    @property
    def handle(self) -> tuple[Tensor, ...]:
        """The handle before anything is written."""
        return ()

    @property
    def is_shared(self) -> bool:
        """Whether readers share the slots' gradients; not known before the first is written."""
        return self._slots is not None

    def write(self, handle: tuple[Tensor, ...], key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """
        Writes the next slot.

        Args:
            handle (tuple of `torch.Tensor`):
                What the last `write` returned, or `stream.handle`.
            key, value (`torch.Tensor` of shape `[B, T, Hkv, d]`):
                The slot.

        Returns:
            The handle for whoever reads or writes next: tensors to be passed on, whatever they are.

        Raises:
            `ValueError`: if shapes do not fit together, or there is no slot left.
            `RuntimeError`: if `impl="triton"` cannot run.
        """
        if key.ndim != 4 or key.shape != value.shape:
            raise ValueError(
                f"key has shape {list(key.shape)}, value {list(value.shape)}: must be [B, T, Hkv, d], both the same."
            )
        if self.written == self.capacity:
            raise ValueError(f"slots={self.capacity}: all have been written.")
        index = self.written
        if (dtype := autocast_dtype(key)) is not None:
            key, value = key.to(dtype), value.to(dtype)
        if index == 0:
            way = route(self.impl, "DepthStream", slot_obstacle(key, value))
            self._has_buffers = not torch.is_grad_enabled()
            if self._has_buffers:
                handle = tuple(x.new_empty((self.kept, *x.shape)) for x in (key, value))
            elif way is Route.KERNEL and not is_recorded():
                self._slots = [x.new_empty((self.capacity, *x.shape)) for x in (key, value)]
        if buffers := handle if self._has_buffers else self._slots:
            shape, dtype = buffers[0].shape[1:], buffers[0].dtype
            if key.shape != shape or key.dtype is not dtype or value.dtype is not dtype:
                raise ValueError(
                    f"key has shape {list(key.shape)} and dtype {key.dtype}, value {value.dtype}: must be those of "
                    f"the slots before, {list(shape)} and {dtype}."
                )
        self.written += 1
        if self._has_buffers:
            # The layers of a model may be spread over devices. The next ones are where this one is.
            handle = tuple(slots.to(key.device) for slots in handle)
            for slots, tensor in zip(handle, (key, value), strict=True):
                slots[index % self.kept].copy_(tensor)
            return handle
        if self._slots is None:
            return (*handle, key, value)
        if needs_grad((key, value, *handle)):
            return (_Write.apply(self, index, key, value, *handle),)
        self._store(index, key, value)
        return handle or (key.new_zeros(1, dtype=torch.float32),)

    def slots(self, handle: tuple[Tensor, ...], start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        """
        Keys and values of the slots `start` to `stop - 1`, each `[B, T, Hkv, d]`, for attention of one's own.

        Raises:
            `ValueError`: if a slot has not been written, or has been written over.
            `RuntimeError`: if readers share the slots' gradients, which kernels do with gradients.
        """
        self.check_span(start, stop)
        if self.is_shared:
            raise RuntimeError("The slots of this stream are shared by kernels: ask for impl='reference'.")
        if self._has_buffers:
            keys, values = ([slots[i % self.kept] for i in range(start, stop)] for slots in handle)
            return keys, values
        return list(handle[2 * start : 2 * stop : 2]), list(handle[2 * start + 1 : 2 * stop : 2])

    def check_span(self, start: int, stop: int) -> None:
        oldest = max(0, self.written - self.kept) if self._has_buffers else 0
        if start < stop and start < oldest:
            raise ValueError(f"start={start}: only the {self.kept} most recent slots are kept, from {oldest} on.")
        if not 0 <= start <= stop <= self.written:
            raise ValueError(f"start={start}, stop={stop}: must be within the {self.written} slots written.")

    def _groups(self, handle: tuple[Tensor, ...], start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values `[n, B, T, Hkv, d]` in as few tensors as there are, in any order."""
        if not self._has_buffers:
            keys, values = ([slot.unsqueeze(0) for slot in slots] for slots in self.slots(handle, start, stop))
            return keys, values
        first, last = start % self.kept, (stop - 1) % self.kept + 1
        if start == stop:
            spans = []
        elif stop - start == self.kept:
            spans = [(0, self.kept)]
        else:
            spans = [(first, last)] if first < last else [(first, self.kept), (0, last)]
        keys, values = ([slots[a:b] for a, b in spans] for slots in handle)
        return keys, values

    def _store(self, index: int, key: Tensor, value: Tensor) -> None:
        assert self._slots is not None
        for slots, tensor in zip(self._slots, (key, value), strict=True):
            slots[index].copy_(tensor)

    def _read(self, start: int, stop: int, device: torch.device) -> list[Tensor]:
        assert self._slots is not None
        # The layers of a model may be spread over devices.
        return [slots[start:stop].to(device) for slots in self._slots]

    def _grads_of(self, start: int, stop: int) -> tuple[list[Tensor], int]:
        """Where to add the gradients of these slots, and how many of them, the first, hold nothing yet."""
        assert self._slots is not None
        if self._grads is None:
            self._grads = [torch.empty_like(slots, dtype=self.grad_dtype or slots.dtype) for slots in self._slots]
        grads = [grad[start:stop] for grad in self._grads]
        had = self._has_grad[start:stop]
        fresh = had.index(True) if any(had) else len(had)
        for i in range(fresh, len(had)):
            if not had[i]:
                for grad in grads:
                    grad[i].zero_()
        self._has_grad[start:stop] = [True] * len(had)
        return grads, fresh

    def _take_grads(self, index: int) -> list[Tensor | None]:
        """The complete gradients of a slot."""
        if not self._has_grad[index]:
            return [None, None]
        self._has_grad[index] = False
        assert self._grads is not None
        return [grads[index] for grads in self._grads]

    def _join_backward(self) -> None:
        """
        Lets the gradients end with the backward pass that runs, if any: it may not reach every writer. Reentrant
        checkpointing runs passes within passes; a layer's forward is computed again in the outer one.
        """
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self._graph_tasks:
            self._graph_tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._leave_backward, task))

    def _leave_backward(self, task: int) -> None:
        self._graph_tasks.discard(task)
        if not self._graph_tasks:
            self._grads, self._has_grad = None, [False] * self.capacity


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stream, index, key, value, *handle):
        ctx.stream, ctx.index, ctx.device, ctx.dtype = stream, index, key.device, key.dtype
        ctx.set_materialize_grads(False)
        stream._store(index, key, value)
        return key.new_zeros(1, dtype=torch.float32)

    @staticmethod
    def backward(ctx, handle_grad):
        grads = ctx.stream._take_grads(ctx.index)
        if grads[0] is not None:
            # They depend on what their readers have read, which depends on earlier slots too.
            grads = without_derivative(
                lambda: [grad.to(ctx.device, ctx.dtype) for grad in grads],
                [] if handle_grad is None else [handle_grad],
            )
        return None, None, *grads, *(handle_grad,) * (len(ctx.needs_input_grad) - 4)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stream, span, constants, query, key, value, depth_query, attention_mask, gate, *handle):
        ctx.stream, ctx.span, ctx.constants = stream, span, constants
        stream._join_backward()
        keys, values = stream._read(*span, query.device)
        inputs = (query, key, value, [keys], [values], depth_query, attention_mask, gate)
        outputs = moda_attention_forward(*inputs, *constants, True)
        ctx.num_handles = len(handle)
        ctx.mark_non_differentiable(outputs[1])
        ctx.save_for_backward(query, key, value, depth_query, attention_mask, gate, *handle, *outputs)
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx, output_grad, _):
        refuse_batches([output_grad])
        query, key, value, depth_query, attention_mask, gate, *others = ctx.saved_tensors
        handle, outputs = others[: ctx.num_handles], others[ctx.num_handles :]
        stream = ctx.stream
        stream._join_backward()
        # Where gradients are recorded, the handle has one, of zero: it connects those of the slots to their readers.
        handle_grads = [x.new_zeros(1) if torch.is_grad_enabled() else None for x in handle]

        def grads() -> list[Tensor]:
            keys, values = stream._read(*ctx.span, query.device)
            totals, fresh = stream._grads_of(*ctx.span)
            here = totals if keys.device == totals[0].device else [torch.zeros_like(x) for x in (keys, values)]
            read = (query, key, value, keys, values, depth_query, attention_mask, gate)
            scaling, is_causal, implementation = ctx.constants
            query_grads = joint_backward(output_grad, read, outputs, scaling, is_causal, implementation, here, fresh)
            if here is not totals:
                for total, grad in zip(totals, here, strict=True):
                    total[:fresh] = grad[:fresh].to(total)
                    total[fresh:] += grad[fresh:].to(total)
            return [*query_grads, *(grad for grad in handle_grads if grad is not None)]

        inputs = [output_grad, query, key, value, depth_query, gate, *handle]
        query_grad, key_grad, value_grad, *others = without_derivative(grads, inputs)
        depth_query_grad = None if depth_query is None else others.pop(0)
        gate_grad = None if gate is None else others.pop(0).to(gate.dtype)
        own = query_grad, key_grad, value_grad, depth_query_grad, None, gate_grad
        return None, None, None, *own, *(others or handle_grads)


def moda_attention_over_stream(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stream: DepthStream,
    handle: tuple[Tensor, ...],
    *,
    start: int,
    stop: int,
    depth_query: Tensor | None = None,
    scaling: float | None = None,
    attention_mask: Tensor | None = None,
    is_causal: bool = True,
    gate: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """
    [`moda_attention`] over the slots `start` to `stop - 1` of a stream.

    Args:
        query, key, value, depth_query, scaling, attention_mask, is_causal, gate, return_lse: as in [`moda_attention`].
        stream ([`DepthStream`]), handle (tuple of `torch.Tensor`):
            The stream, and what the last write into it returned.
        start, stop (`int`):
            Which slots.

    Returns:
        As [`moda_attention`].

    Raises:
        `ValueError`: if shapes or dtypes do not fit together, or a slot has not been written, or has been written
            over.
        `RuntimeError`: if the stream's `impl` is `"triton"` and cannot run.

    Example:

        >>> import torch
        >>> from depthmix.kernels import DepthStream, moda_attention_over_stream

        >>> stream = DepthStream(slots=2)
        >>> handle = stream.write(stream.handle, torch.ones(1, 3, 2, 8), torch.ones(1, 3, 2, 8))
        >>> query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
        >>> moda_attention_over_stream(query, key, key, stream, handle, start=0, stop=1).shape
        torch.Size([1, 4, 3, 8])
    """
    stream.check_span(start, stop)
    if stream.is_shared and start < stop:
        output, log_sum_exp = _attend_to_shared(
            *(query, key, value, stream, handle, (start, stop), depth_query, scaling, attention_mask, is_causal, gate)
        )
        return (output, log_sum_exp) if return_lse else output
    keys, values = ([], []) if stream.is_shared else stream._groups(handle, start, stop)
    # The layers of a model may be spread over devices.
    keys, values = ([slots.to(query.device) for slots in group] for group in (keys, values))
    return attend(
        *(query, key, value, keys, values, depth_query, scaling),
        *(attention_mask, is_causal, gate, return_lse, stream.impl),
    )


def _never_compiled(function: Callable) -> Callable:
    """`torch.compiler.disable`, which imports the compiler, once there is one: that takes more than a second."""
    disabled: list[Callable] = []

    @functools.wraps(function)
    def call(*arguments):
        if "torch._dynamo" not in sys.modules:
            return function(*arguments)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*arguments)

    return call


# The gradients of slots travel outside of autograd, which a compiler would not notice.
@_never_compiled
def _attend_to_shared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stream: DepthStream,
    handle: tuple[Tensor, ...],
    span: tuple[int, int],
    depth_query: Tensor | None,
    scaling: float | None,
    attention_mask: Tensor | None,
    is_causal: bool,
    gate: Tensor | None,
) -> Sequence[Tensor]:
    """`moda_attention_over_stream` where the slots lie in one buffer."""
    keys, values = stream._read(*span, query.device)
    query, key, value, keys, values, depth_query = check_attention(
        query, key, value, [keys], [values], depth_query, attention_mask, is_causal
    )
    check_gate(gate, query.shape[1])
    inputs = (query, key, value, keys, values, depth_query, attention_mask, gate)
    trained = needs_grad((query, key, value, depth_query, gate, *handle))
    implementation = choose(inputs, trained, stream.impl)
    if implementation == "reference":
        raise RuntimeError(
            "The slots of this stream are shared by kernels, which do not support a mask with a gradient, other "
            "devices, or transforms of torch.func: ask for impl='reference'."
        )
    constants = (default_scaling(query, scaling), is_causal, implementation)
    if not trained:
        stream._join_backward()
        return run_moda_attention(*inputs, *constants)
    return _Read.apply(stream, span, constants, query, key, value, depth_query, attention_mask, gate, *handle)
