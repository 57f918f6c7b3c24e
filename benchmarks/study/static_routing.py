# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Controls whose depth weights are learned numbers, the same for every token and input.

They have the sources, the places and the normalisation of Depth-Attention or of Attention Residuals, but nothing that
looks at the input to choose among the sources. What is left of a gain with them comes from the paths across layers;
what is lost, from the selection. They are plain PyTorch around the modules of the stock Qwen3.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb


class StaticRouting(nn.Module):
    """
    Args:
        config ([`~transformers.Qwen3Config`]):
            The vanilla decoder.
        value_sources (sequence of sequences of `int`, *optional*):
            For each layer, the earlier layers whose values its own is averaged with, per key-value head.
        block_size (`int`, *optional*):
            Sub-layers in a block of Attention Residuals: each sub-layer, and last the final norm, reads an average of
            the embedding, the sums of the finished blocks and the sum so far. Left out, they read the running sum.
    """

    def __init__(
        self, config: Qwen3Config, *, value_sources: Sequence[Sequence[int]] = (), block_size: int | None = None
    ):
        super().__init__()
        # attribute names of the stock model, whose weights fit
        stock = Qwen3ForCausalLM(config)
        self.config, self.model, self.lm_head = config, stock.model, stock.lm_head
        self.value_sources = value_sources or ((),) * config.num_hidden_layers
        self.block_size = block_size
        # zeros weigh all sources alike, as the pseudo-queries do that Attention Residuals start from
        self.value_logits = nn.ParameterDict(
            {
                str(layer): nn.Parameter(torch.zeros(config.num_key_value_heads, len(sources) + 1))
                for layer, sources in enumerate(self.value_sources)
                if sources
            }
        )
        # the first sub-layer has the embedding alone
        sites = range(1, 2 * config.num_hidden_layers + 1) if block_size else ()
        self.site_logits = nn.ParameterDict(
            {str(site): nn.Parameter(torch.zeros(1 + -(-site // block_size))) for site in sites}
        )

    def depth_weights(self) -> list[torch.Tensor]:
        """The weights of the sources, oldest first, in fp32, of each layer or site that has any, in their order."""
        # the dictionaries keep their keys in the order of strings
        logits = [group[key] for group in (self.value_logits, self.site_logits) for key in sorted(group, key=int)]
        return [each.float().softmax(-1) for each in logits]

    def read(self, site: int, finished: list[torch.Tensor], current: torch.Tensor | None) -> torch.Tensor:
        sources = finished if current is None else [*finished, current]
        if len(sources) == 1:
            return sources[0]
        weights = self.site_logits[str(site)].float().softmax(-1)
        return sum(weight * source for weight, source in zip(weights, sources, strict=True))

    def attend(self, index: int, layer: nn.Module, hidden_states: torch.Tensor, rotary, values: dict) -> torch.Tensor:
        attention = layer.self_attn
        shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
        query = attention.q_norm(attention.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(hidden_states).view(shape)).transpose(1, 2)
        value = attention.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        if str(index) in self.value_logits:
            weights = self.value_logits[str(index)].float().softmax(-1)[..., None, None].to(value.dtype)
            sources = [*(values[source] for source in self.value_sources[index]), value]
            value = sum(weights[:, i] * source for i, source in enumerate(sources))
        # what later layers read is the mixed value, as with Depth-Attention
        values[index] = value
        output = functional.scaled_dot_product_attention(
            query, key.to(query.dtype), value.to(query.dtype), is_causal=True, enable_gqa=True
        )
        return attention.o_proj(output.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs) -> SimpleNamespace:
        """Logits, and the mean loss over all but the first token if `labels` are given. No cache, no padding."""
        model = self.model
        embedding = model.embed_tokens(input_ids)
        rotary = model.rotary_emb(embedding, torch.arange(input_ids.shape[1], device=input_ids.device)[None])
        finished, current = ([embedding], None) if self.block_size else ([], embedding)
        values: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(model.layers):
            for site, norm in ((2 * index, layer.input_layernorm), (2 * index + 1, layer.post_attention_layernorm)):
                mixed = norm(self.read(site, finished, current))
                update = layer.mlp(mixed) if site % 2 else self.attend(index, layer, mixed, rotary, values)
                current = update.to(embedding.dtype) if current is None else current + update
                if self.block_size and (site + 1) % self.block_size == 0:
                    finished, current = [*finished, current], None
        last = 2 * len(model.layers)
        logits = self.lm_head(model.norm(self.read(last, finished, current)))
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)
