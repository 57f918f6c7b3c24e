# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Pipeline parallelism for training, over the schedules of `torch.distributed.pipelining`.

A stage needs more of earlier stages than the hidden states: finished blocks (Attention Residuals), keys and values of
source layers (Depth-Attention). [`Plan`] says from the configuration alone which of these items each hop carries, so
that all ranks agree without asking. Nothing is sent to a rank twice: where a rank has several stages, the first that
has an item keeps it for the later ones, whose gradients for it come back on the same way.

```python
stages = pipeline_stages(model, num_stages=4, device=device)   # those of this rank
schedule = ScheduleInterleaved1F1B(stages, n_microbatches=8, loss_fn=next_token_loss)
schedule.step(input_ids)                                       # on rank 0; others pass no tokens
losses = []
schedule.step(target=input_ids, losses=losses)                 # on the rank of the last stage
```
"""

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import cross_entropy
from transformers.modeling_utils import PreTrainedModel

from depthmix.kernels.depth_precision import accumulation_dtype
from depthmix.modeling.depth_decoder import DepthDecoderModel
from depthmix.modeling.transformers_versions import HOST_CACHE_NAME


@dataclass(frozen=True)
class Plan:
    """
    What each stage runs, receives, sends and keeps.

    Args:
        num_layers (`int`), num_stages (`int`), num_ranks (`int`):
            Stage `s` is on rank `s % num_ranks`, and the first stages have a layer more where they do not divide.
        items (`dict[int, tuple[int, frozenset[int]]]`):
            What layers hand each other: by number, the layer that makes it and the layers that read it, of which
            `num_layers` is the final norm.
    """

    num_layers: int
    num_stages: int
    num_ranks: int
    items: dict[int, tuple[int, frozenset[int]]]

    def layers(self, stage: int) -> range:
        """The layers of a stage."""
        size, larger = divmod(self.num_layers, self.num_stages)
        first = stage * size + min(stage, larger)
        return range(first, first + size + (stage < larger))

    def stage_of(self, layer: int) -> int:
        """Where a layer is; the final norm is in the last stage."""
        return next((s for s in range(self.num_stages) if layer in self.layers(s)), self.num_stages - 1)

    def maker(self, item: int) -> int:
        """The stage that makes an item."""
        return self.stage_of(self.items[item][0])

    def readers(self, item: int) -> set[int]:
        """The stages that read it, but for the one that makes it."""
        return {self.stage_of(layer) for layer in self.items[item][1]} - {self.maker(item)}

    def first_on_rank(self, item: int, stage: int) -> int:
        """The first stage on this one's rank that comes to have an item, in the order in which it travels."""
        return next(s for s in range(self.maker(item), self.num_stages) if (s - stage) % self.num_ranks == 0)

    def sent(self, stage: int) -> tuple[int, ...]:
        """The items that a stage sends to the next: those that a rank will need which none of its stages has had."""
        return tuple(
            item
            for item in self.items
            if self.maker(item) <= stage
            and any(reader > stage and self.first_on_rank(item, reader) > stage for reader in self.readers(item))
        )

    def received(self, stage: int) -> tuple[int, ...]:
        """The items that a stage gets from the one before."""
        return self.sent(stage - 1) if stage else ()

    def taken(self, stage: int) -> tuple[int, ...]:
        """The items that a stage reads and an earlier stage of its rank has kept."""
        received = self.received(stage)
        return tuple(item for item in self.items if stage in self.readers(item) and item not in received)

    def kept(self, stage: int) -> tuple[int, ...]:
        """The items that a stage keeps for later stages of its rank."""
        return tuple(
            item
            for item in self.items
            if any(
                item in self.taken(later) and self.first_on_rank(item, later) == stage
                for later in range(stage + self.num_ranks, self.num_stages, self.num_ranks)
            )
        )


class RankStore:
    """What the stages of one rank keep for each other: values, and the gradients that come back for them."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self.grads: dict[tuple[int, int], list[Tensor | None]] = {}

    def add_grad(self, key: tuple[int, int], place: int, grad: Tensor | None) -> None:
        """Adds to the gradient of one of an item's tensors."""
        grads = self.grads.setdefault(key, [None] * len(self.values[key]))
        grads[place] = added(grads[place], grad)

    def clear(self) -> None:
        self.values.clear()
        self.grads.clear()

    def is_empty(self) -> bool:
        return not self.values and not self.grads


def added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be missing."""
    if total is None or grad is None:
        return grad if total is None else total
    return total + grad


class _Keep(torch.autograd.Function):
    """
    Passes hidden states and items on, and keeps the items; the backward adds the gradients that have come back for
    them. The hidden states go through it, so that its backward runs whatever becomes of the items.
    """

    @staticmethod
    def forward(ctx, store: RankStore, keys: Sequence[tuple[int, int]], size: int, hidden_states, *tensors):
        ctx.store, ctx.keys, ctx.size = store, keys, size
        ctx.set_materialize_grads(False)
        for key, first in zip(keys, range(0, len(tensors), size), strict=True):
            store.values[key] = tuple(tensor.detach() for tensor in tensors[first : first + size])
        return hidden_states, *tensors

    @staticmethod
    def backward(ctx, hidden_grad, *tensor_grads):
        later = []
        for key in ctx.keys:
            ctx.store.values.pop(key, None)
            later += ctx.store.grads.pop(key, [None] * ctx.size)
        return None, None, None, hidden_grad, *map(added, tensor_grads, later)


class _Receive(torch.autograd.Function):
    """Passes a tensor on, and makes its gradient contiguous, as what is sent has to be."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous()


def sendable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy: only what is contiguous can be sent, and schedules detach it in place, unlike a view."""
    if tensor.is_contiguous() and not tensor._is_view():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class PipelinePart(nn.Module):
    """
    The layers of one stage of a causal language model; in the first stage also its embeddings, in the last the final
    norm and the head. Parameters are those of the model, under the same names.
    """

    def __init__(self, model: PreTrainedModel, plan: Plan, stage: int, store: RankStore):
        super().__init__()
        self.plan, self.stage, self.store = plan, stage, store
        # not anew for each microbatch, since the plan looks at all items and stages
        self.received, self.taken = plan.received(stage), plan.taken(stage)
        self.kept, self.sent = plan.kept(stage), plan.sent(stage)
        later = range(stage + plan.num_ranks, plan.num_stages, plan.num_ranks)
        self.taken_again = {item for other in later for item in plan.taken(other)}
        self.is_first, self.is_last = stage == 0, stage == plan.num_stages - 1
        # schedules tell a module nothing of the microbatch that it runs; None while they find out shapes
        self.microbatch: int | None = None
        # that of the microbatch from which schedules have found out how much ranks send each other
        self.expected: torch.Size | None = None
        base = copy.copy(model.model)
        base._modules = dict(base._modules)
        layers = plan.layers(stage)
        base.layers = nn.ModuleList(layer if i in layers else nn.Module() for i, layer in enumerate(base.layers))
        everywhere = {"layers", "rotary_emb"}
        for name in set(base._modules) - everywhere:
            if not (self.is_first if name == "embed_tokens" else self.is_last):
                base._modules[name] = None
        self.model = base
        if self.is_last:
            self.lm_head = model.lm_head
        self.config = model.config

    def forward(
        self,
        hidden_states: Tensor,
        *received: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        taken: Sequence[Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `[B, T]` or `[B, T, hidden]`):
                Tokens in the first stage, hidden states in others.
            received (`torch.Tensor` of shape `[B, T, ..]`):
                The items that the stage before sends.
            attention_mask, position_ids (`torch.Tensor` of shape `[B, T]`, *optional*):
                As for the model; every rank has to pass them to its schedule.
            taken (sequence of `torch.Tensor`, *optional*):
                The items that an earlier stage of this rank has kept; left out, they are zeros.

        Returns:
            The hidden states and the items for the next stage, or, in the last one, the logits `[B, T, vocab_size]`.

        Raises:
            `ValueError`: in the first stage, for a microbatch of another shape than the ranks are ready to receive.
        """
        shape = hidden_states.shape
        if self.microbatch is None:
            self.expected = shape
        # a shorter one would arrive in buffers whose rest is of the microbatch before
        elif self.is_first and self.plan.num_ranks > 1 and shape != self.expected:
            raise ValueError(
                f"Microbatch {self.microbatch} has tokens of shape {list(shape)}: must be {list(self.expected or ())} "
                "as when the schedule set up what ranks send each other. Pad the batch, or make another schedule for "
                "this shape."
            )
        if self.is_first:
            hidden_states = self.model.embed_tokens(hidden_states)
            # schedules go back through every stage, also where all parameters up to there are frozen
            if torch.is_grad_enabled() and not hidden_states.requires_grad:
                hidden_states.requires_grad_()
        else:
            hidden_states, *others = (_Receive.apply(tensor) for tensor in (hidden_states, *received))
            received = tuple(others)
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(0)
        options: dict[str, Any] = {"position_ids": position_ids, "use_cache": False, HOST_CACHE_NAME: None}
        self.model.check_call(options)
        ledger = self.model.open_ledger(hidden_states, options)
        widths = self.model.item_widths()
        if taken is None:
            taken = [hidden_states.new_zeros(*hidden_states.shape[:2], w) for _ in self.taken for w in widths]
        tensors = iter([*received, *taken])
        ledger.take({item: next_of(tensors, widths) for item in (*self.received, *self.taken)})
        layers = self.plan.layers(self.stage)
        self.model.run_layers(ledger, self.model.layers, layers, hidden_states, attention_mask, options)
        if self.is_last:
            hidden_states, _ = ledger.close()
            return self.lm_head(hidden_states)
        items = {item: ledger.give(item) for item in {*self.kept, *self.sent}}
        hidden_states = ledger.hidden_states
        if self.kept and self.microbatch is not None:
            keys = [(self.microbatch, item) for item in self.kept]
            flat = [tensor for item in self.kept for tensor in items[item]]
            hidden_states, *flat = _Keep.apply(self.store, keys, len(widths), hidden_states, *flat)
            tensors = iter(flat)
            items |= {item: next_of(tensors, widths) for item in self.kept}
        return tuple(map(sendable, (hidden_states, *(tensor for item in self.sent for tensor in items[item]))))


def next_of(tensors: Iterator[Tensor], like: Sequence) -> tuple[Tensor, ...]:
    """As many of the tensors as the other has elements."""
    return tuple(itertools.islice(tensors, len(like)))


class DepthPipelineStage(PipelineStage):
    """A stage for the schedules of PyTorch that hands on what layers of other stages read; see [`pipeline_stages`]."""

    def __init__(self, part: PipelinePart, device: torch.device, group: dist.ProcessGroup | None = None):
        super().__init__(part, part.stage, part.plan.num_stages, device, group=group)
        self.part = part
        # what was taken from the store, by the identity of the leaf in the graph of this stage
        self.leaves: dict[int, tuple[tuple[int, int], int]] = {}

    def take(self, microbatch: int) -> tuple[Tensor, ...]:
        """The items that an earlier stage of this rank has kept, as leaves whose gradients go back to it."""
        store, taken = self.part.store, []
        has_backward = self.has_backward and torch.is_grad_enabled()
        for item in self.part.taken:
            key = (microbatch, item)
            for place, value in enumerate(store.values[key]):
                leaf = value.detach().requires_grad_(has_backward)
                if has_backward:
                    self.leaves[id(leaf)] = key, place
                taken.append(leaf)
            # else the backward of the stage that has kept it forgets it
            if not has_backward and item not in self.part.taken_again:
                del store.values[key]
        return tuple(taken)

    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, **options):
        # as a keyword, since only arguments of the module get gradients where a schedule splits the backward
        kwargs = (kwargs or {}) | {"taken": self.take(fwd_chunk_id)}
        self.part.microbatch = fwd_chunk_id
        try:
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, **options)
        finally:
            self.part.microbatch = None

    def backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward=False):
        # a graph that a split backward goes through again has nothing new for these
        inputs = [*bwd_kwargs["input_values"]] if self.leaves and "input_values" in bwd_kwargs else []
        grads, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        for value, grad in zip(inputs, grads or [None] * len(inputs), strict=False):
            if (leaf := self.leaves.pop(id(value), None)) is not None:
                self.part.store.add_grad(*leaf, grad)
        return grads, groups

    def clear_runtime_states(self) -> None:
        # a schedule has said by now where it takes each stage to be
        if (rank := self.stage_index_to_group_rank[self.stage_index]) != self.group_rank:
            raise ValueError(
                f"Stage {self.stage_index} is on rank {self.group_rank}, and its schedule looks on rank {rank}: "
                "must be one that deals stages in turn, not in the shape of a V."
            )
        super().clear_runtime_states()
        # something is left only where the step before has failed
        self.leaves.clear()
        self.part.store.clear()


def pipeline_stages(
    model: PreTrainedModel, num_stages: int, device: torch.device | str, group: dist.ProcessGroup | None = None
) -> list[DepthPipelineStage]:
    """
    The stages of this rank, for a schedule of `torch.distributed.pipelining`: one for `ScheduleGPipe` and
    `Schedule1F1B`, several for `ScheduleInterleaved1F1B` and `ScheduleInterleavedZeroBubble`.

    The first stage takes tokens `[B, T]` and the last returns logits `[B, T, vocab_size]`. An `attention_mask` or
    `position_ids` of `[B, T]` is a keyword of `schedule.step` on every rank. Parameters are those of `model`, under
    the same names, and are moved to `device`; the model itself can be deleted, with those of other ranks.

    Args:
        model (`PreTrainedModel`):
            A causal language model with Depth-Attention or Attention Residuals, the same on all ranks.
        num_stages (`int`):
            A multiple of the ranks of the group, at most the number of layers.
        device (`torch.device`):
            That of this rank.
        group (`torch.distributed.ProcessGroup`, *optional*):
            The ranks of the pipeline; left out, all.

    Raises:
        `TypeError`: if it is not a causal language model of depthmix.
        `ValueError`: for a number of stages that does not fit, and for models that cannot be split: other methods,
            loops, tied embeddings, and an auxiliary loss of experts.
    """
    base = getattr(model, "model", None)
    if not isinstance(base, DepthDecoderModel) or not hasattr(model, "lm_head"):
        raise TypeError(f"model: must be a causal language model of depthmix, not a {type(model).__name__}.")
    config, ranks = model.config, dist.get_world_size(group)
    layers = len(base.layers)
    if num_stages % ranks or not 0 < num_stages <= layers:
        raise ValueError(
            f"num_stages={num_stages}: must be a multiple of the {ranks} ranks and at most the {layers} layers."
        )
    if base.num_loops > 1:
        raise ValueError(f"num_loops={base.num_loops}: must be 1, since a loop goes through all stages again.")
    if config.tie_word_embeddings and num_stages > 1:
        raise ValueError("tie_word_embeddings=True: must be False, since embeddings and head are in different stages.")
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits=True: must be False, since no stage has the router logits of all layers."
        )
    try:
        plan = Plan(layers, num_stages, ranks, base.handed_on())
    except NotImplementedError as error:
        raise ValueError(f"{type(model).__name__} cannot be split into stages: {error}") from error
    store, device = RankStore(), torch.device(device)
    own = range(dist.get_rank(group), num_stages, ranks)
    return [DepthPipelineStage(PipelinePart(model, plan, stage, store).to(device), device, group) for stage in own]


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """
    The mean cross-entropy of `logits` `[B, T, vocab_size]` for `labels` `[B, T]`, which are shifted here; -100 counts
    nothing. A schedule averages microbatches, however many labels each has.
    """
    predictions = logits[:, :-1].flatten(0, 1)
    return cross_entropy(predictions.to(accumulation_dtype(predictions)), labels[:, 1:].flatten())
