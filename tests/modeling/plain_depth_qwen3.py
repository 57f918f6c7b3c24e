# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
DepthQwen3ForCausalLM once more, as plainly as possible and without any code of transformers or depthmix: one
sequence, one head, one token at a time, in the dtype of the weights (meant for float64). Differentiable.
"""

import math

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


def plain_sources(fields: dict, layer: int) -> list[int]:
    stride, window = fields["depth_stride"], fields["depth_window"]
    if stride == 0:
        return []
    strided = set(range(0, layer, stride))
    recent = {layer - back for back in range(1, window + 1) if layer - back >= 0}
    return sorted(strided | recent)


def _norm(x, weight, eps):
    return x * weight / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)


def _rotate(x, position, frequencies, factor):
    half = len(x) // 2
    turned = torch.complex(x[:half], x[half:]) * torch.polar(
        torch.full_like(frequencies, factor), frequencies * position
    )
    return torch.cat([turned.real, turned.imag])


def _softmax(scores):
    odds = [torch.exp(score - max(score.item() for score in scores)) for score in scores]
    return [odd / sum(odds) for odd in odds]


def _sequence(weights, fields, ids, positions, sees):
    heads, kv_heads, d = fields["num_attention_heads"], fields["num_key_value_heads"], fields["head_dim"]
    group, eps, tokens = heads // kv_heads, fields["rms_norm_eps"], range(len(ids))
    frequencies, factor = plain_frequencies(fields)
    hidden = [weights["model.embed_tokens.weight"][i] for i in ids]
    finished = []
    for layer in range(fields["num_hidden_layers"]):

        def weight(name, layer=layer):
            return weights[f"model.layers.{layer}.{name}.weight"]

        def heads_of(x, name, head):
            return weight(f"self_attn.{name}_proj")[head * d : (head + 1) * d] @ x

        window = fields["sliding_window"] if fields["layer_types"][layer] == "sliding_attention" else None
        queries, keys, values = [], [], []
        for t in tokens:
            x = _norm(hidden[t], weight("input_layernorm"), eps)
            queries.append([])
            for head in range(heads):
                query = _norm(heads_of(x, "q", head), weight("self_attn.q_norm"), eps)
                queries[t].append(_rotate(query, positions[t], frequencies, factor))
            keys.append([])
            values.append([])
            for head in range(kv_heads):
                key = heads_of(x, "k", head)
                if fields["key_norm_position"] == "before_rope":
                    key = _rotate(_norm(key, weight("self_attn.k_norm"), eps), positions[t], frequencies, factor)
                else:
                    key = _norm(_rotate(key, positions[t], frequencies, factor), weight("self_attn.k_norm"), eps)
                value = heads_of(x, "v", head)

                entries = [(finished[i][0][t][head], finished[i][1][t][head]) for i in plain_sources(fields, layer)]
                entries.append((key, value))
                asking = sum(queries[t][head * group : (head + 1) * group]) / group
                shares = _softmax([asking @ entry_key / math.sqrt(d) for entry_key, _ in entries])
                keys[t].append(key)
                values[t].append(
                    sum(share * entry_value for share, (_, entry_value) in zip(shares, entries, strict=True))
                )
        finished.append((keys, values))

        for t in tokens:
            seen = [s for s in range(t + 1) if sees(t, s) and (window is None or t - s < window)]
            read = []
            for head in range(heads):
                kv_head = head // group
                shares = _softmax([queries[t][head] @ keys[s][kv_head] / math.sqrt(d) for s in seen] or [hidden[t][0]])
                read.append(sum(share * values[s][kv_head] for share, s in zip(shares, seen or [t], strict=True)))
            hidden[t] = hidden[t] + weight("self_attn.o_proj") @ torch.cat(read)
            x = _norm(hidden[t], weight("post_attention_layernorm"), eps)
            gate = weight("mlp.gate_proj") @ x
            hidden[t] = hidden[t] + weight("mlp.down_proj") @ (
                gate / (1 + torch.exp(-gate)) * (weight("mlp.up_proj") @ x)
            )
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return torch.stack([head @ _norm(h, weights["model.norm.weight"], eps) for h in hidden])


def plain_logits(
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

        rows.append(_sequence(weights, fields, ids[b].tolist(), positions, sees))
    return torch.stack(rows)
