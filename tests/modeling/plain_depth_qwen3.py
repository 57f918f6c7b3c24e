# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
DepthQwen3ForCausalLM once more, as plainly as possible and without any code of transformers or depthmix.
"""

import functools

import torch
from plain_decoder import attend, norm, plain_frequencies, plain_logits, rotate, softmax


def plain_sources(fields: dict, layer: int) -> list[int]:
    stride, window = fields["depth_stride"], fields["depth_window"]
    if stride == 0:
        return []
    strided = set(range(0, layer, stride))
    recent = {layer - back for back in range(1, window + 1) if layer - back >= 0}
    return sorted(strided | recent)


def _sequence(weights, fields, ids, positions, sees):
    heads, kv_heads, d = fields["num_attention_heads"], fields["num_key_value_heads"], fields["head_dim"]
    group, eps, tokens = heads // kv_heads, fields["rms_norm_eps"], range(len(ids))
    frequencies, factor = plain_frequencies(fields)
    hidden = [weights["model.embed_tokens.weight"][i] for i in ids]
    finished = []
    for layer in range(fields["num_loops"] * fields["num_hidden_layers"]):
        of_weights = layer % fields["num_hidden_layers"]

        def weight(name, of_weights=of_weights):
            return weights[f"model.layers.{of_weights}.{name}.weight"]

        def heads_of(x, name, head):
            return weight(f"self_attn.{name}_proj")[head * d : (head + 1) * d] @ x

        window = fields["sliding_window"] if fields["layer_types"][of_weights] == "sliding_attention" else None
        queries, keys, values = [], [], []
        for t in tokens:
            x = norm(hidden[t], weight("input_layernorm"), eps)
            queries.append([])
            for head in range(heads):
                query = norm(heads_of(x, "q", head), weight("self_attn.q_norm"), eps)
                queries[t].append(rotate(query, positions[t], frequencies, factor))
            keys.append([])
            values.append([])
            for head in range(kv_heads):
                key = heads_of(x, "k", head)
                if fields["key_norm_position"] == "before_rope":
                    key = rotate(norm(key, weight("self_attn.k_norm"), eps), positions[t], frequencies, factor)
                else:
                    key = norm(rotate(key, positions[t], frequencies, factor), weight("self_attn.k_norm"), eps)
                value = heads_of(x, "v", head)

                entries = [(finished[i][0][t][head], finished[i][1][t][head]) for i in plain_sources(fields, layer)]
                entries.append((key, value))
                asking = sum(queries[t][head * group : (head + 1) * group]) / group
                shares = softmax([asking @ entry_key / d**0.5 for entry_key, _ in entries])
                keys[t].append(key)
                values[t].append(
                    sum(share * entry_value for share, (_, entry_value) in zip(shares, entries, strict=True))
                )
        finished.append((keys, values))

        for t in tokens:
            seen = [s for s in range(t + 1) if sees(t, s) and (window is None or t - s < window)]
            read = []
            for head in range(heads):
                of_head = ([token[head // group] for token in entries] for entries in (keys, values))
                read.append(attend(queries[t][head], *of_head, seen))
            hidden[t] = hidden[t] + weight("self_attn.o_proj") @ torch.cat(read)
            x = norm(hidden[t], weight("post_attention_layernorm"), eps)
            gate = weight("mlp.gate_proj") @ x
            hidden[t] = hidden[t] + weight("mlp.down_proj") @ (
                gate / (1 + torch.exp(-gate)) * (weight("mlp.up_proj") @ x)
            )
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return torch.stack([head @ norm(h, weights["model.norm.weight"], eps) for h in hidden])


plain_depth_qwen3_logits = functools.partial(plain_logits, _sequence)
