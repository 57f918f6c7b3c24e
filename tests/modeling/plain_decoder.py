# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
What plain models are made of: without any code of transformers or depthmix, one sequence, one head and one token at a
time, in the dtype of the weights (meant for float64). Differentiable.
"""

import math
from collections.abc import Callable

import torch


def plain_frequencies(fields: dict) -> tuple[torch.Tensor, float]:
    """Radians per position for each pair of features, and the factor of cosine and sine."""
    rope, half = fields["rope_parameters"], fields["head_dim"] // 2
    theta = rope["rope_theta"]
    plain = [theta ** (-j / half) for j in range(half)]
    if rope["rope_type"] == "default":
        return torch.tensor(plain, dtype=torch.float64), 1.0

    assert rope["rope_type"] == "yarn"

    def feature_with(turns):
        """Index of the (fractional) pair of features that turns so often over the original context."""
        return half * math.log(rope["original_max_position_embeddings"] / (2 * math.pi * turns)) / math.log(theta)

    first, last = max(math.floor(feature_with(32)), 0), min(math.ceil(feature_with(1)), 2 * half - 1)
    frequencies = []
    for j, frequency in enumerate(plain):
        slowed = min(max((j - first) / max(last - first, 0.001), 0), 1)
        frequencies.append(frequency * (1 - slowed) + frequency / rope["factor"] * slowed)
    return torch.tensor(frequencies, dtype=torch.float64), 0.1 * math.log(rope["factor"]) + 1


def norm(x, weight, eps):
    return x * weight / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)


def rotate(x, position, frequencies, factor):
    half = len(x) // 2
    turned = torch.complex(x[:half], x[half:]) * torch.polar(
        torch.full_like(frequencies, factor), frequencies * position
    )
    return torch.cat([turned.real, turned.imag])


def softmax(scores):
    odds = [torch.exp(score - max(score.item() for score in scores)) for score in scores]
    return [odd / sum(odds) for odd in odds]


def attend(query, keys, values, seen):
    """What a query reads from the tokens that it sees; padding that sees none reads anything."""
    shares = softmax([query @ keys[s] / math.sqrt(len(query)) for s in seen] or [query[0]])
    return sum(share * values[s] for share, s in zip(shares, seen or [0], strict=True))


def attention_updates(weights, fields, layer, normed, positions, sees):
    """What the attention of a layer gives for each token, from what its norm has given for each."""
    heads, kv_heads, d = fields["num_attention_heads"], fields["num_key_value_heads"], fields["head_dim"]
    eps, frequencies, prefix = fields["rms_norm_eps"], plain_frequencies(fields), f"model.layers.{layer}.self_attn"
    window = fields["sliding_window"] if fields["layer_types"][layer] == "sliding_attention" else None

    def finish(heads_of_token, t, kind, place):
        for step in ("norm", "rope") if place == "before_rope" else ("rope", "norm"):
            if step == "rope":
                heads_of_token = [rotate(head, positions[t], *frequencies) for head in heads_of_token]
            elif fields["use_qk_norm"]:
                heads_of_token = [norm(head, weights[f"{prefix}.{kind}_norm.weight"], eps) for head in heads_of_token]
        return heads_of_token

    queries, keys, values = [], [], []
    for t, x in enumerate(normed):
        query, key, value = (linear(weights, f"{prefix}.{kind}_proj", x).split(d) for kind in "qkv")
        queries.append(finish(query, t, "q", "before_rope"))
        keys.append(finish(key, t, "k", fields["key_norm_position"]))
        values.append(value)
    updates = []
    for t in range(len(normed)):
        seen = [s for s in range(t + 1) if sees(t, s) and (window is None or t - s < window)]
        attended = []
        for head in range(heads):
            kv_head = head * kv_heads // heads
            of_head = ([token[kv_head] for token in entries] for entries in (keys, values))
            attended.append(attend(queries[t][head], *of_head, seen))
        updates.append(linear(weights, f"{prefix}.o_proj", torch.cat(attended)))
    return updates


def mlp_update(weights, layer, x):
    """What the MLP of a layer gives for one token, from what its norm has given."""
    gate, up = (linear(weights, f"model.layers.{layer}.mlp.{name}_proj", x) for name in ("gate", "up"))
    return linear(weights, f"model.layers.{layer}.mlp.down_proj", gate / (1 + torch.exp(-gate)) * up)


def linear(weights, name, x):
    return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", 0)


def plain_logits(
    sequence: Callable,
    weights: dict[str, torch.Tensor],
    fields: dict,
    ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Logits `[B, T, vocabulary]` of a state dict.

    Args:
        sequence: the model for one row: `sequence(weights, fields, ids, positions, sees)` gives its logits, where
            `sees(t, s)` says whether token t may see token s, as far as the mask and the documents go.
        fields: the fields of the configuration, all of them resolved.
        ids, attention_mask, position_ids, documents: `[B, T]`. The mask is 0 for padding; tokens see only tokens of
            the same document. Rows of padding tokens mean nothing.
    """
    rows = []
    for b in range(ids.shape[0]):
        positions = range(ids.shape[1]) if position_ids is None else position_ids[b].tolist()

        def sees(t, s, b=b):
            padding = attention_mask is not None and not attention_mask[b, s]
            return not padding and (documents is None or documents[b, t] == documents[b, s])

        rows.append(sequence(weights, fields, ids[b].tolist(), positions, sees))
    return torch.stack(rows)
