# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
MoDAOlmo2 without any code of transformers or depthmix, one sequence, one head and one token at a time, in the dtype of
the weights (meant for float64). Keys of slots are finished as their definition says: rotated in the mode "sequence",
under the gain of each reader in the mode "reader_norm". Differentiable.
"""

import functools
import math

import torch
from plain_decoder import norm, plain_frequencies, plain_logits, rotate, softmax


def plain_moda_olmo2_row(weights, fields, ids, positions, sees, shares=None):
    """
    Logits `[T, vocabulary]`. Appends to the list `shares`, if given, what each layer, token and head gives to the
    tokens that it sees and then to its slots.
    """
    heads, kv_heads, eps = fields["num_attention_heads"], fields["num_key_value_heads"], fields["rms_norm_eps"]
    d = fields["hidden_size"] // heads
    frequencies, tokens = plain_frequencies(fields | {"head_dim": d}), range(len(ids))
    window = fields["moda_depth_window"]
    stream = [weights["model.embed_tokens.weight"][i] for i in ids]
    slots = [[] for _ in tokens]

    for layer in range(fields["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"

        def linear(name, x, prefix=prefix):
            return weights[f"{prefix}.{name}.weight"] @ x + weights.get(f"{prefix}.{name}.bias", 0)

        def normed(name, x, prefix=prefix):
            return norm(x, weights[f"{prefix}.{name}.weight"], eps)

        def sub_layer(name, t, function, normed=normed):
            style = fields["moda_norm_style"]
            given = normed(name, stream[t]) if style == "pre" else stream[t]
            result = function(given)
            if style == "olmo2":
                result = normed(name, result)
            result = stream[t] + result
            return given, normed(name, result) if style == "post" else result

        def rotated(x, t):
            return torch.cat([rotate(head, positions[t], *frequencies) for head in x.split(d)])

        def add_slot(t, key, value, rotated=rotated, normed=normed):
            if fields["moda_depth_key_mode"] == "sequence":
                key = rotated(normed("self_attn.k_norm", key), t)
            else:
                key = key / torch.sqrt(key.square().mean() + eps)
            slots[t].append((key, value))

        attention_inputs = [
            normed("post_attention_layernorm", x) if fields["moda_norm_style"] == "pre" else x for x in stream
        ]
        keys = [
            rotated(normed("self_attn.k_norm", linear("self_attn.k_proj", x)), t)
            for t, x in zip(tokens, attention_inputs, strict=True)
        ]
        values = [linear("self_attn.v_proj", x) for x in attention_inputs]
        for t in tokens:
            read = slots[t] if window is None else slots[t][-window:]
            if fields["moda_depth_key_mode"] == "reader_norm":
                read = [(key * weights[f"{prefix}.self_attn.k_norm.weight"], value) for key, value in read]
            seen = [s for s in range(t + 1) if sees(t, s)]
            entries = [(keys[s], values[s]) for s in seen] + read
            # padding that sees nothing reads anything
            entries = entries or [(keys[0], values[0])]

            def attend(x, t=t, entries=entries, rotated=rotated, linear=linear, normed=normed):
                query = rotated(normed("self_attn.q_norm", linear("self_attn.q_proj", x)), t).split(d)
                outputs = []
                for head in range(heads):
                    part = slice(head * kv_heads // heads * d, (head * kv_heads // heads + 1) * d)
                    share = softmax([query[head] @ key[part] / math.sqrt(d) for key, _ in entries])
                    if shares is not None:
                        shares.append(torch.stack(share))
                    outputs.append(
                        sum(weight * value[part] for weight, (_, value) in zip(share, entries, strict=True))
                    )
                return linear("self_attn.o_proj", torch.cat(outputs))

            given, stream[t] = sub_layer("post_attention_layernorm", t, attend)
            if fields["moda_attn_slots"] and layer + 1 < fields["num_hidden_layers"]:
                if fields["moda_attn_depth_proj"]:
                    add_slot(t, *linear("attn_depth_kv_proj", given).chunk(2))
                else:
                    add_slot(t, linear("self_attn.k_proj", given), values[t])

        for t in tokens:

            def feed_forward(x, linear=linear):
                gate = linear("mlp.gate_proj", x)
                return linear("mlp.down_proj", gate / (1 + torch.exp(-gate)) * linear("mlp.up_proj", x))

            given, stream[t] = sub_layer("post_feedforward_layernorm", t, feed_forward)
            if fields["moda_ffn_slots"] and layer + 1 < fields["num_hidden_layers"]:
                add_slot(t, *linear("mlp_depth_kv_proj", given).chunk(2))

    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return torch.stack([head @ norm(x, weights["model.norm.weight"], eps) for x in stream])


plain_moda_olmo2_logits = functools.partial(plain_logits, plain_moda_olmo2_row)
