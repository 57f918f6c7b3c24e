# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Attention over a sequence that also gives its log-sum-exp, and its backward, which takes output and log-sum-exp as
arguments: given those of a softmax over more columns, it gives the exact gradients of this part of that softmax.

PyTorch's own kernels do it, by default the fastest that supports the case; any one's backward can follow any one's
forward. The log-sum-exp is natural, and -inf for a row that sees nothing.

Legend: B batch, H query heads, K key-value heads, G = H / K, T tokens, S columns, D head dim.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .depth_precision import accumulation_dtype
from .moda_attention_reference import causal_mask


aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
# These are values of the argument custom_mask_type of _efficient_attention_forward.
NOT_CAUSAL, CAUSAL_BOTTOM_RIGHT = 0, 2


def sequence_backend(query: Tensor, key: Tensor, attention_mask: Tensor | None, is_causal: bool) -> str:
    """The fastest that supports the case: cudnn, flash, efficient, cpu, or math, which is not a single kernel."""
    tokens, head_dim = query.shape[2:]
    if query.numel() == 0 or key.numel() == 0:
        return "math"
    if query.device.type == "cpu":
        return "cpu"
    # the other kernels have been run on GPUs of NVIDIA only
    if query.device.type != "cuda" or torch.version.hip:
        return "math"
    square = attention_mask is not None or not is_causal or tokens in (1, key.shape[2])
    if query.dtype in HALF and head_dim % 8 == 0 and head_dim <= 256:
        if (
            square
            and tokens > 1
            and head_dim <= 128
            and torch.backends.cuda.cudnn_sdp_enabled()
            and torch.backends.cudnn.is_available()
            and torch.cuda.get_device_capability(query.device) >= (9, 0)
        ):
            return "cudnn"
        if attention_mask is None and torch.cuda.get_device_capability(query.device) >= (8, 0):
            return "flash"
    if query.dtype in (*HALF, torch.float32) and head_dim % (8 if query.dtype in HALF else 4) == 0:
        return "efficient"
    return "math"


def sequence_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    is_causal: bool,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, D]` and log-sum-exp `[B, H, T]` in fp32 (fp64 for fp64 inputs)."""
    backend = backend or sequence_backend(query, key, attention_mask, is_causal)
    mask, is_causal = _mask(query, key, attention_mask, is_causal, backend)
    if backend == "math":
        return _math_forward(query, key, value, mask, scaling)
    if backend == "cpu":
        query, key, value = map(_with_neighbouring_columns, (query, key, value))
        output, log_sum_exp = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scaling
        )
    elif backend == "cudnn":
        query, key, value = map(_aligned, (query, key, value))
        output, log_sum_exp, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, True, 0.0, is_causal, False, scale=scaling
        )
        log_sum_exp = log_sum_exp.view(query.shape[:3])
    elif backend == "flash":
        query, key, value = map(_aligned, (query, key, value))
        output, log_sum_exp, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scaling
        )
    else:
        query, key, value = _ungrouped(query, key, value)
        output, log_sum_exp, *_ = aten._efficient_attention_forward(
            *(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask),
            *(None, None, None, None, 0.0, CAUSAL_BOTTOM_RIGHT if is_causal else NOT_CAUSAL, True),
            scale=scaling,
        )
        output, log_sum_exp = output.transpose(1, 2), log_sum_exp[..., : query.shape[2]]
    if mask is not None:
        # A row that the mask hides everything from: each kernel gives something else for it.
        empty = mask.isneginf().all(-1)
        output = output.masked_fill(empty.unsqueeze(-1), 0.0)
        log_sum_exp = log_sum_exp.masked_fill(empty, float("-inf"))
    return output, log_sum_exp


def sequence_attention_backward(
    output_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    is_causal: bool,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    backend = backend or sequence_backend(query, key, attention_mask, is_causal)
    mask, is_causal = _mask(query, key, attention_mask, is_causal, backend)
    if mask is not None:
        # The weights of a row that sees nothing are exp(-inf - inf), which is the zero that they should be.
        log_sum_exp = log_sum_exp.masked_fill(log_sum_exp.isneginf(), float("inf"))
    if backend == "math":
        return _math_backward(output_grad, query, key, value, output, log_sum_exp, mask, scaling)
    if backend == "cpu":
        tensors = map(_with_neighbouring_columns, (output_grad, query, key, value, output))
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, log_sum_exp, 0.0, is_causal, attn_mask=mask, scale=scaling
        )
    # The efficient kernel assumes this order of the output, and cuDNN assumes that the gradient is laid out like it.
    output_grad, output = in_token_order(output_grad), in_token_order(output)
    # The kernels take the random state of a dropout, of which there is none here.
    unused = query.new_empty(2, dtype=torch.int64)
    tokens, length = query.shape[2], key.shape[2]
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention_backward(
            *map(_aligned, (output_grad, query, key, value, output)),
            *(log_sum_exp.unsqueeze(-1), unused[0], unused[1], mask, None, None),
            *(tokens, length, 0.0, is_causal),
            scale=scaling,
        )
    if backend == "flash":
        return aten._scaled_dot_product_flash_attention_backward(
            *map(_aligned, (output_grad, query, key, value, output)),
            *(log_sum_exp, None, None, tokens, length, 0.0, is_causal, unused, unused[0]),
            scale=scaling,
        )
    query, wide_key, wide_value = _ungrouped(query, key, value)
    # The kernel needs the rows of each head to start at a multiple of 32.
    padded = F.pad(log_sum_exp, (0, -tokens % 32), value=float("inf"))
    rows = (x.transpose(1, 2) for x in (_aligned(output_grad), query, wide_key, wide_value))
    query_grad, *grads, _ = aten._efficient_attention_backward(
        *(*rows, mask, output.transpose(1, 2), None, None, tokens, length, padded, 0.0, unused[0], unused[1]),
        *(CAUSAL_BOTTOM_RIGHT if is_causal else NOT_CAUSAL, False),
        scale=scaling,
    )
    key_grad, value_grad = (
        grad.transpose(1, 2).unflatten(1, (key.shape[1], -1)).sum(2)
        if wide_key.shape != key.shape
        else grad.transpose(1, 2)
        for grad in grads
    )
    return query_grad.transpose(1, 2), key_grad, value_grad


def _mask(
    query: Tensor, key: Tensor, attention_mask: Tensor | None, is_causal: bool, backend: str
) -> tuple[Tensor | None, bool]:
    """What is to be added to the scores, and whether the kernel shall mask what comes later by itself."""
    batch, heads, tokens, _ = query.shape
    length = key.shape[2]
    if attention_mask is None:
        if not is_causal or tokens == 1:
            return None, False
        if backend in ("flash", "efficient") or (tokens == length and backend != "math"):
            return None, True
        attention_mask = causal_mask(tokens, length, query.device)
    if attention_mask.dtype is torch.bool:
        zeros = torch.zeros_like(attention_mask, dtype=query.dtype)
        attention_mask = zeros.masked_fill(~attention_mask, float("-inf"))
    mask = attention_mask.to(query.dtype)
    if backend in ("cudnn", "efficient"):
        # The kernel reads rows that are aligned to 16 elements.
        mask = F.pad(mask, (0, -length % 16))[..., :length]
    # cuDNN takes one mask for all heads.
    return mask.expand(batch, -1 if backend == "cudnn" else heads, tokens, length), False


def in_token_order(tensor: Tensor) -> Tensor:
    """The tensor `[B, H, T, D]` in the memory order of a projection, `[B, T, H, D]`, copied only if need be."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _with_neighbouring_columns(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied if a kernel could not read it 16 bytes at a time."""
    elements = 16 // tensor.element_size()
    *strides, last = tensor.stride()
    if last == 1 and all(stride > 0 and stride % elements == 0 for stride in strides) and tensor.data_ptr() % 16 == 0:
        return tensor
    return (
        torch.empty_like(tensor.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2).copy_(tensor)
    )


def _ungrouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, with key and value repeated for every query head."""
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return _aligned(query), _aligned(key), _aligned(value)


def _grouped(tensor: Tensor, kv_heads: int) -> Tensor:
    return tensor.to(accumulation_dtype(tensor)).unflatten(1, (kv_heads, -1))


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    query_BKGTD = _grouped(query, key.shape[1])
    scores_BHTS = torch.einsum("bkgtd,bksd->bkgts", query_BKGTD, key.to(query_BKGTD.dtype)).flatten(1, 2) * scaling
    return scores_BHTS if mask is None else scores_BHTS + mask


def _math_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    scores_BHTS = _scores(query, key, mask, scaling)
    log_sum_exp_BHT = scores_BHTS.logsumexp(-1)
    shift_BHT1 = log_sum_exp_BHT.masked_fill(log_sum_exp_BHT.isneginf(), 0.0).unsqueeze(-1)
    weights_BKGTS = (scores_BHTS - shift_BHT1).exp().unflatten(1, (key.shape[1], -1))
    output_BKGTD = torch.einsum("bkgts,bksd->bkgtd", weights_BKGTS, value.to(weights_BKGTS.dtype))
    return output_BKGTD.flatten(1, 2).to(query.dtype), log_sum_exp_BHT


def _math_backward(
    output_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    mask: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = key.shape[1]
    weights_BKGTS = (_scores(query, key, mask, scaling) - log_sum_exp.unsqueeze(-1)).exp().unflatten(1, (kv_heads, -1))
    grad_BKGTD, query_BKGTD, output_BKGTD = (_grouped(x, kv_heads) for x in (output_grad, query, output))
    wide_key, wide_value = key.to(weights_BKGTS.dtype), value.to(weights_BKGTS.dtype)
    products_BKGTS = torch.einsum("bkgtd,bksd->bkgts", grad_BKGTD, wide_value)
    delta_BKGT1 = (grad_BKGTD * output_BKGTD).sum(-1, keepdim=True)
    score_grads_BKGTS = weights_BKGTS * (products_BKGTS - delta_BKGT1) * scaling
    query_grad = torch.einsum("bkgts,bksd->bkgtd", score_grads_BKGTS, wide_key).flatten(1, 2)
    key_grad = torch.einsum("bkgts,bkgtd->bksd", score_grads_BKGTS, query_BKGTD)
    value_grad = torch.einsum("bkgts,bkgtd->bksd", weights_BKGTS, grad_BKGTD)
    return query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype)
