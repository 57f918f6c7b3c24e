# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Long prompts, a chunk of tokens at a time.

Mixing over depth is for each token by itself, and the KV cache has all that later tokens need of earlier ones, so the
layers can go over a prompt in pieces. What they hand each other besides hidden states then exists for one piece only.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging


if TYPE_CHECKING:
    from .depth_decoder import DepthDecoderModel, DepthModelOutputWithPast


logger = logging.get_logger(__name__)

# what layers may hand each other at once before "auto" cuts a prompt
HANDED_ON_BYTES = 512 * 2**20
LEAST, MOST, STEP = 1024, 16384, 256


def cuts_long_prompts(forward: Callable) -> Callable:
    """
    Lets the forward of a base model run for one chunk of the tokens after the other, by `config.prefill_chunk_tokens`,
    where that gives the same up to rounding. Outputs are put together along the tokens.
    """

    @functools.wraps(forward)
    def wrapper(
        self: "DepthDecoderModel",
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ):
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        # decoding must not pay for it
        if (
            tokens is not None
            and tokens.shape[1] > 1
            and (size := chunk_size(self, tokens.shape[0], tokens.shape[1])) < tokens.shape[1]
        ):
            cached = self.config.use_cache if use_cache is None else use_cache
            cache = DynamicCache(config=self.config) if cached and past_key_values is None else past_key_values
            obstacle = chunk_obstacle(self, attention_mask, position_ids, cache, kwargs)
            if obstacle is None:
                call = functools.partial(forward, self, use_cache=True, **kwargs)
                return _in_chunks(self, call, size, input_ids, inputs_embeds, attention_mask, position_ids, cache)
            if self.config.prefill_chunk_tokens != "auto" and not torch.is_grad_enabled():
                logger.warning_once(
                    f"prefill_chunk_tokens={self.config.prefill_chunk_tokens}: not followed in this call, {obstacle}."
                )
        return forward(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    return wrapper


def chunk_size(model: "DepthDecoderModel", batch: int, tokens: int) -> int:
    """How many tokens a chunk has; `tokens` where a prompt of so many is not cut."""
    size = model.config.prefill_chunk_tokens
    if size is None or isinstance(size, int):
        return tokens if size is None else size
    per_token = batch * model.handed_on_per_token() * model.embed_tokens.weight.element_size()
    if per_token * tokens <= HANDED_ON_BYTES:
        return tokens
    return min(max(HANDED_ON_BYTES // per_token // STEP * STEP, LEAST), MOST)


def chunk_obstacle(
    model: "DepthDecoderModel",
    attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
    position_ids: torch.Tensor | None,
    cache: Cache | None,
    kwargs: dict[str, Any],
) -> str | None:
    """Why a call cannot run in chunks with the same results; None if it can."""
    if torch.is_grad_enabled():
        return "since gradients are wanted"
    if torch.compiler.is_compiling():
        return "since the model is compiled or exported"
    # a quantised cache returns exact keys the first time only, a static one is attended to at its full length, and
    # what else there is has not been tried
    if type(cache) is not DynamicCache or any(
        type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers
    ):
        return "since the KV cache is no DynamicCache, or none is used"
    if attention_mask is not None and (isinstance(attention_mask, dict) or attention_mask.ndim != 2):
        return "since the attention mask is not one of two dimensions"
    if position_ids is not None and position_ids.ndim != 2:
        return "since the positions do not have two dimensions"
    for name in ("output_attentions", "output_router_logits"):
        asked = kwargs.get(name)
        if getattr(model.config, name, False) if asked is None else asked:
            return f"since {name} is set"
    if kwargs.get("return_dict") is False or any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        return "since it has further tensors, or is to return a tuple"
    if any(hasattr(layer, "_hf_hook") for layer in model.layers):
        return "since weights that are offloaded would be moved for each chunk"
    return None


def _in_chunks(
    model: "DepthDecoderModel",
    call: Callable[..., "DepthModelOutputWithPast"],
    size: int,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cache: Cache,
) -> "DepthModelOutputWithPast":
    tokens = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
    past = cache.get_seq_length()
    unmasked = attends_to_all_before(model, attention_mask)
    outputs = []
    for begin in range(0, tokens, size):
        end = min(begin + size, tokens)
        part = slice(begin, end)
        mask = attention_mask if attention_mask is None else attention_mask[:, : past + end]
        # a mask of all pairs would be large, and keeps torch from its fastest kernels
        if unmasked and past + begin > 0 and end - begin > 1:
            mask = causal_lower_right(end - begin, past + end)
        outputs.append(
            call(
                input_ids=None if input_ids is None else input_ids[:, part],
                inputs_embeds=None if inputs_embeds is None else inputs_embeds[:, part],
                attention_mask=mask,
                position_ids=None if position_ids is None else position_ids[:, part],
                past_key_values=cache,
            )
        )
    last = outputs[-1]
    last.last_hidden_state = torch.cat([each.last_hidden_state for each in outputs], dim=1)
    # of the depth weights it is the last dimension but one that counts tokens
    for name, dim in ("hidden_states", 1), ("depth_weights", -2):
        if name in last:
            parts = zip(*(each[name] for each in outputs), strict=True)
            last[name] = tuple(torch.cat(part, dim=dim) for part in parts)
    return last


def attends_to_all_before(model: "DepthDecoderModel", attention_mask: torch.Tensor | None) -> bool:
    """Whether every token attends to all before it, by torch's attention: no padding, and no windows."""
    config = model.config
    kinds = getattr(config, "layer_types", None)
    return (
        (getattr(config, "sliding_window", None) is None if kinds is None else {*kinds} == {"full_attention"})
        and config._attn_implementation == "sdpa"
        and (attention_mask is None or bool(attention_mask.all()))
    )
