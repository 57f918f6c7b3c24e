# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The depth slots that the layers of one call of a model write and read."""

import torch
from torch import Tensor

from .depth_implementations import check_implementation
from .moda_attention import attend


class DepthStream:
    """
    The slots of one call of a model, for [`moda_attention_over_stream`]. Whoever runs the layers makes one, writes a
    layer's slots after its call, and hands `handle`, what `write` last returned, to each layer, as tensors of its own:

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

    Raises:
        `ValueError`: if `impl` is unknown.
        `RuntimeError`: if `impl="triton"` and Triton is not installed.
    """

    def __init__(self, slots: int, *, impl: str = "auto"):
        check_implementation(impl, "DepthStream")
        self.capacity, self.impl, self.written = slots, impl, 0

    @property
    def handle(self) -> tuple[Tensor, ...]:
        """The handle before anything is written."""
        return ()

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
        """
        if key.ndim != 4 or key.shape != value.shape:
            raise ValueError(
                f"key has shape {list(key.shape)}, value {list(value.shape)}: must be [B, T, Hkv, d], both the same."
            )
        if self.written == self.capacity:
            raise ValueError(f"slots={self.capacity}: all have been written.")
        self.written += 1
        return (*handle, key, value)


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
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """
    [`moda_attention`] over the slots `start` to `stop - 1` of a stream.

    Args:
        query, key, value, depth_query, scaling, attention_mask, is_causal, return_lse: as in [`moda_attention`].
        stream ([`DepthStream`]), handle (tuple of `torch.Tensor`):
            The stream, and what the last write into it returned.
        start, stop (`int`):
            Which slots.

    Returns:
        As [`moda_attention`].

    Raises:
        `ValueError`: if shapes or dtypes do not fit together, or a slot has not been written.
        `RuntimeError`: if the stream's `impl` is `"triton"` and cannot run.
    """
    if not 0 <= start <= stop <= stream.written:
        raise ValueError(f"start={start}, stop={stop}: must be within the {stream.written} slots written.")
    keys, values = ([slot.unsqueeze(0) for slot in handle[2 * start + i : 2 * stop : 2]] for i in range(2))
    return attend(
        *(query, key, value, keys, values, depth_query, scaling),
        *(attention_mask, is_causal, return_lse, stream.impl),
    )
