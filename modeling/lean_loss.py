# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The loss of a causal language model whose logits are not all in memory at once.

With a vocabulary of 50,000 the logits of a batch, their copy in fp32 and their gradients take more memory than all of
a model's layers save elsewhere. Here the head and the loss go over some rows of hidden states after the other.

A head that lends its weights is taken apart: the gradients are made together with the loss, by liger-kernel on a GPU
where it is installed, else in plain PyTorch. Any other head, with adapters, hooks, sharding or quantisation, is called
for some rows at a time, and once more for them in the backward.

Legend: N rows, D hidden size, V vocabulary, R rows at once.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss

from depthmix.kernels.depth_dispatch import is_transformed, plain_tensor_obstacle
from depthmix.kernels.depth_launch import device_of
from depthmix.kernels.depth_precision import autocast_dtype, without_autocast

from .lent_weights import lent_linear


# Few large pieces are faster than many, and the gradient of the head's weight is rounded once for each. A piece has no
# more logits than ROW_BUDGET, which are 0.8 GiB with those in fp32.
ROWS, CALLED_ROWS, ROW_BUDGET = 2048, 1024, 2**27
# keywords of liger-kernel's loss that change what it computes or returns
NOT_OFFERED = (
    "ce_weight",
    "final_logit_softcapping",
    "lse_square_scale",
    "return_predicted_tokens",
    "return_token_accuracy",
    "return_z_loss",
    "softcap",
    "use_token_scaling",
)


@functools.cache
def liger_function(name: str) -> Callable | None:
    """A function of liger-kernel's, or None where that is not installed."""
    try:
        from liger_kernel.transformers import functional
    except ImportError:
        return None
    return getattr(functional, name)


def skips_logits(asked: bool | None, by_default: bool, has_labels: bool, kwargs: dict) -> bool:
    """
    Whether a call returns no logits, by the rule of liger-kernel.

    Args:
        asked (`bool`, *optional*):
            The argument `skip_logits`.
        by_default (`bool`):
            What holds where it is not given and there are labels.
        has_labels (`bool`):
            Whether the call has labels.
        kwargs (`dict`):
            Other keywords of the call.

    Raises:
        `ValueError`: if logits shall be left out, and there is nothing else to return.
    """
    if has_labels:
        return by_default if asked is None else asked
    # Who counts the labels and keeps them computes the loss from the logits. The Trainer does so for label smoothing
    # and for a loss function of the user's, and asks to leave the logits out all the same.
    if asked and kwargs.get("num_items_in_batch") is None:
        raise ValueError("skip_logits=True: there are neither labels nor shift_labels, so nothing would be computed.")
    return False


def can_be_lean(loss_function: Callable) -> bool:
    """
    Whether the loss can be computed here: not where a loss function of the user's needs logits, a compiler fuses what
    it sees, or a transform of torch.func looks on.
    """
    return (
        loss_function is ForCausalLMLoss
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not is_transformed()
    )


def lean_causal_lm_loss(
    head: nn.Module,
    hidden_states: Tensor,
    labels: Tensor | None,
    *,
    shift_labels: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    accum_dtype: torch.dtype | None = None,
    with_liger: bool = False,
    **kwargs,
) -> Tensor:
    """
    The cross entropy of the next tokens, as `ForCausalLMLoss` gives it from all logits.

    Args:
        head (`nn.Module`):
            Gives logits `[..., V]` for hidden states `[..., D]`.
        hidden_states (`torch.Tensor` of shape `[B, T, D]`):
            The last ones of the model.
        labels (`torch.LongTensor` of shape `[B, T]`), shift_labels (`torch.LongTensor` of shape `[B, T]`, *optional*):
            The tokens, or `ignore_index` where they do not count; the second are shifted already, and are taken
            instead.
        num_items_in_batch (`int` or `torch.Tensor`, *optional*):
            What the sum is divided by; left out, the number of labels that count, or 1 if there are none.
        ignore_index (`int`, *optional*, defaults to -100), label_smoothing (`float`, *optional*, defaults to 0):
            As for `torch.nn.functional.cross_entropy`.
        accum_dtype (`torch.dtype`, *optional*):
            In what the gradient of the head's weight is added up; left out, its own dtype.
        with_liger (`bool`, *optional*, defaults to `False`):
            Whether liger-kernel may do the work.

    Returns:
        The loss, a `torch.Tensor` without dimensions, in fp32. Its gradients exist once: a second backward through it,
        and differentiating them, is an error.

    Raises:
        `ValueError`: for a keyword of liger-kernel's loss that is not offered here, a `label_smoothing` that is not
            between 0 and 1, or labels that do not fit.
    """
    for name in NOT_OFFERED:
        if kwargs.get(name) not in (None, False, 0):
            raise ValueError(f"{name}={kwargs[name]!r}: the loss without logits does not offer it; skip_logits=False.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing}: must be between 0 and 1.")
    tokens = next_tokens(labels, shift_labels, ignore_index)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    targets = tokens.reshape(-1).to(rows.device)
    if len(targets) != len(rows):
        raise ValueError(
            f"labels have shape {list(tokens.shape)}: there must be one for each of the hidden states that the "
            f"loss is computed from, {list(hidden_states.shape[:-1])}."
        )
    # nothing here waits for the device
    if num_items_in_batch is None:
        count = (targets != ignore_index).sum().clamp(min=1)
    elif torch.is_tensor(num_items_in_batch):
        count = num_items_in_batch.to(rows.device)
    else:
        count = torch.full((), num_items_in_batch, dtype=torch.float32, device=rows.device)
    factor = 1.0 / count.float()

    cast = rows.to(autocast_dtype(rows) or rows.dtype)
    lent = lent_linear(head, cast)
    if lent is None or plain_tensor_obstacle((cast, *lent)) is not None:
        return _loss_by_calls(head, rows, targets, ignore_index, label_smoothing) * factor
    tensors = (cast, *lent)
    wanted = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors)
    compute: Callable = _chunked_loss
    early, late = factor, None
    if cast.dtype is torch.float16:
        # Whoever trains in fp16 scales the loss, or gradients would vanish. These are made before that scale is known,
        # so they wait for it as those of a sum; over many rows that does not fit into fp16.
        early, late, accum_dtype = torch.ones_like(factor), factor, accum_dtype or torch.float32
    elif with_liger and cast.is_cuda and liger_function("liger_fused_linear_cross_entropy") is not None:
        compute = _liger_loss
    work = functools.partial(
        compute,
        targets=targets,
        factor=early,
        wanted=wanted,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        accum_dtype=accum_dtype,
    )
    with without_autocast(cast):
        loss = _WithGradients.apply(work, *tensors) if any(wanted) else work(*tensors)[0]
    return loss if late is None else loss * late


def liger_causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs,
) -> Tensor:
    """`ForCausalLMLoss`, from all logits, with the cross entropy of liger-kernel."""
    function = liger_function("liger_cross_entropy")
    assert function is not None
    wide = logits.float().reshape(-1, vocab_size)
    targets = next_tokens(labels, shift_labels, ignore_index).reshape(-1).to(wide.device)
    if num_items_in_batch is None:
        return function(wide, targets, ignore_index=ignore_index, reduction="mean")
    total = function(wide, targets, ignore_index=ignore_index, reduction="sum")
    return total / (num_items_in_batch.to(total.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch)


def next_tokens(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """The labels `[..., T]` of the next tokens."""
    if shift_labels is not None:
        return shift_labels
    assert labels is not None
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are computed with it."""

    @staticmethod
    def forward(ctx, work, *tensors):
        """The loss that `work` computes from these tensors; its gradients are kept."""
        loss, ctx.grads = work(*tensors)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        return loss

    @staticmethod
    def backward(ctx, loss_grad):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "The gradients of a loss without logits cannot be differentiated again: ask for skip_logits=False."
            )
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError(
                "A loss without logits has its gradients once, and they have been used: for a second backward ask for "
                "skip_logits=False."
            )
        pairs = zip(grads, ctx.dtypes, strict=True)
        return None, *(None if grad is None else grad.mul_(loss_grad).to(dtype) for grad, dtype in pairs)


def _chunked_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    *,
    targets: Tensor,
    factor: Tensor,
    wanted: Sequence[bool],
    ignore_index: int,
    label_smoothing: float,
    accum_dtype: torch.dtype | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and the gradients that are wanted, in plain PyTorch."""
    rows, vocabulary = len(hidden_ND), len(weight_VD)
    step = max(1, min(ROWS, ROW_BUDGET // vocabulary, rows))
    logits_RV = hidden_ND.new_empty((step, vocabulary))
    wide_RV = logits_RV if logits_RV.dtype is torch.float32 else torch.empty_like(logits_RV, dtype=torch.float32)
    hidden_grad = torch.empty_like(hidden_ND) if wanted[0] else None
    sums = [
        torch.zeros_like(x, dtype=accum_dtype or x.dtype) if x is not None and is_wanted else None
        for x, is_wanted in zip((weight_VD, bias_V), wanted[1:], strict=True)
    ]
    weight_grad, bias_grad = sums
    counted_N = targets != ignore_index
    target_N1 = targets.masked_fill(~counted_N, 0).unsqueeze(1)
    total = factor.new_zeros(())
    for first in range(0, rows, step):
        piece = slice(first, first + step)
        hidden_RD, counted_R1, target_R1 = hidden_ND[piece], counted_N[piece].unsqueeze(1), target_N1[piece]
        logits, wide = logits_RV[: len(hidden_RD)], wide_RV[: len(hidden_RD)]
        torch.mm(hidden_RD, weight_VD.t(), out=logits)
        if bias_V is not None:
            logits += bias_V
        torch.sub(logits, logits.amax(1, keepdim=True).float(), out=wide)
        own_R1 = wide.gather(1, target_R1)
        expected_R1 = (1 - label_smoothing) * own_R1
        if label_smoothing:
            expected_R1 += label_smoothing * wide.mean(1, keepdim=True)
        sum_R1 = wide.exp_().sum(1, keepdim=True)
        total += torch.where(counted_R1, sum_R1.log() - expected_R1, 0.0).sum()
        if not any(wanted):
            continue
        share_R1 = torch.where(counted_R1, factor, 0.0)
        spread = label_smoothing / vocabulary
        # where the label is, the gradient is a difference, which is taken before the rounding
        own_R1 = (own_R1.exp() / sum_R1 - (1 - label_smoothing) - spread) * share_R1
        if spread:
            wide.div_(sum_R1).sub_(spread)
            torch.mul(wide, share_R1, out=logits)
        else:
            torch.mul(wide, share_R1 / sum_R1, out=logits)
        logits.scatter_(1, target_R1, own_R1.to(logits.dtype))
        if hidden_grad is not None:
            torch.mm(logits, weight_VD, out=hidden_grad[piece])
        if weight_grad is not None:
            if weight_grad.dtype is logits.dtype:
                weight_grad.addmm_(logits.t(), hidden_RD)
            else:
                weight_grad += logits.t() @ hidden_RD
        if bias_grad is not None:
            bias_grad += logits.sum(0, dtype=torch.float32)
    return total * factor, [hidden_grad, weight_grad, bias_grad]


def _liger_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    *,
    targets: Tensor,
    factor: Tensor,
    wanted: Sequence[bool],
    ignore_index: int,
    label_smoothing: float,
    accum_dtype: torch.dtype | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and the gradients that are wanted, by liger-kernel."""
    function = liger_function("liger_fused_linear_cross_entropy")
    assert function is not None
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "accum_dtype": accum_dtype,
    }
    if "chunk_mem_const" in inspect.signature(function).parameters and len(hidden_ND):
        # so that it takes pieces of ROWS rows
        options["chunk_mem_const"] = max(1, math.ceil(len(weight_VD) * ROWS / hidden_ND.numel()))
    # it gives the gradient of a weight only beside that of the hidden states
    leaves = [
        None if x is None else x.detach().requires_grad_(any(wanted) if i == 0 else wanted[i])
        for i, x in enumerate((hidden_ND, weight_VD, bias_V))
    ]
    with torch.set_grad_enabled(any(wanted)), device_of(hidden_ND):
        total = function(leaves[0], leaves[1], targets, leaves[2], reduction="sum", **options)
        if not any(wanted):
            return total * factor, [None] * 3
        # it multiplies its gradients in place, so they get the factor here and not later
        asked = [x for x, is_wanted in zip(leaves, wanted, strict=True) if x is not None and is_wanted]
        found = iter(torch.autograd.grad(total, asked, factor))
    return total.detach() * factor, [next(found) if is_wanted else None for is_wanted in wanted]


def _loss_by_calls(
    head: nn.Module, hidden_ND: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """The sum of the losses; the head is called for some rows at a time, and again in the backward."""

    def loss_of(hidden_RD: Tensor, target_R: Tensor) -> Tensor:
        logits_RV = head(hidden_RD).float()
        counted_R = target_R != ignore_index
        own_R = logits_RV.gather(1, target_R.masked_fill(~counted_R, 0).unsqueeze(1)).squeeze(1)
        expected_R = (1 - label_smoothing) * own_R
        if label_smoothing:
            expected_R = expected_R + label_smoothing * logits_RV.mean(1)
        return torch.where(counted_R, logits_RV.logsumexp(1) - expected_R, 0.0).sum()

    pieces = zip(hidden_ND.split(CALLED_ROWS), targets.split(CALLED_ROWS), strict=True)
    if torch.is_grad_enabled():
        losses = [checkpoint(loss_of, *piece, use_reentrant=False) for piece in pieces]
    else:
        losses = [loss_of(*piece) for piece in pieces]
    return torch.stack(losses).sum()
