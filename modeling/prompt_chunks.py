# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Long prompts, a chunk of tokens at a time.

Mixing over depth is for each token by itself, and the KV cache has all that later tokens need of earlier ones, so the
layers can go over a prompt in pieces. What they hand each other besides hidden states then exists for one piece only.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging

from depthmix.configuration.configuration_depth_common import check_count


if TYPE_CHECKING:
    from .depth_decoder import DepthDecoderModel, DepthModelOutputWithPast


logger = logging.get_logger(__name__)

# What layers may hand each other for a whole prompt before "auto" cuts it, and then for a chunk. Later chunks attend
# with a slower kernel of torch's, so that a prompt is cut only where it saves much.
WHOLE_BYTES, CHUNK_BYTES = 8 * 2**30, 512 * 2**20
LEAST, MOST, STEP = 1024, 16384, 256


@dataclass(frozen=True)
class Prompt:
    """What a call that can run in chunks gives for its tokens, and the KV cache that takes them."""

    num_tokens: int
    input_ids: torch.Tensor | None
    inputs_embeds: torch.Tensor | None
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    cache: DynamicCache

    def part(self, begin: int, end: int) -> dict[str, torch.Tensor | None]:
        """What a forward of the tokens from `begin` to `end` gets for these tokens only."""
        return {
            name: None if whole is None else whole[:, begin:end]
            for name, whole in (
                ("input_ids", self.input_ids),
                ("inputs_embeds", self.inputs_embeds),
                ("position_ids", self.position_ids),
            )
        }


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
            prompt = prompt_or_obstacle(
                self, tokens.shape[1], input_ids, inputs_embeds, attention_mask, position_ids, cache, kwargs
            )
            if isinstance(prompt, Prompt):
                call = functools.partial(forward, self, use_cache=True, **kwargs)
                return _in_chunks(self, call, size, prompt)
            if self.config.prefill_chunk_tokens != "auto" and not torch.is_grad_enabled():
                logger.warning_once(
                    f"prefill_chunk_tokens={self.config.prefill_chunk_tokens}: not followed in this call, {prompt}."
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
    if size is None:
        return tokens
    if size != "auto":
        # it may have been set after the configuration was checked
        check_count("prefill_chunk_tokens", size)
        return size
    per_token = batch * model.handed_on_per_token() * model.embed_tokens.weight.element_size()
    if per_token * tokens <= WHOLE_BYTES:
        return tokens
    return min(max(CHUNK_BYTES // per_token // STEP * STEP, LEAST), MOST)


def prompt_or_obstacle(
    model: "DepthDecoderModel",
    num_tokens: int,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
    position_ids: torch.Tensor | None,
    cache: Cache | None,
    kwargs: dict[str, Any],
) -> Prompt | str:
    """The prompt of a call that can run in chunks with the same results; why it cannot, if it cannot."""
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
    return Prompt(num_tokens, input_ids, inputs_embeds, attention_mask, position_ids, cache)


def _in_chunks(
    model: "DepthDecoderModel",
    call: Callable[..., "DepthModelOutputWithPast"],
    size: int,
    prompt: Prompt,
) -> "DepthModelOutputWithPast":
    past = prompt.cache.get_seq_length()
    unmasked = attends_to_all_before(model, prompt.attention_mask)
    outputs = []
    for begin in range(0, prompt.num_tokens, size):
        end = min(begin + size, prompt.num_tokens)
        mask = None if prompt.attention_mask is None else prompt.attention_mask[:, : past + end]
        # a mask of all pairs would be large, and keeps torch from its fastest kernels
        if unmasked and past + begin > 0 and end - begin > 1:
            mask = causal_lower_right(end - begin, past + end)
        outputs.append(call(attention_mask=mask, past_key_values=prompt.cache, **prompt.part(begin, end)))
    last = outputs[-1]
    last["last_hidden_state"] = torch.cat([each["last_hidden_state"] for each in outputs], dim=1)
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
