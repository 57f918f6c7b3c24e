# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
AttnResForCausalLM once more, as plainly as possible and without any code of transformers or depthmix: every mix is one
softmax over a list of sources that is made anew from all earlier outputs.
"""

import functools

import torch
from plain_decoder import attend, norm, plain_frequencies, plain_logits, rotate, softmax


def plain_mix(sources, query, gain, eps, *, bias=0.0, scale="mean"):
    """The mix of a list of vectors, and the weights."""
    logits = [query @ norm(source, gain, eps) for source in sources]
    logits[-1] = logits[-1] + bias
    shares = softmax(logits)
    factor = len(sources) if scale == "sum" else 1
    return factor * sum(share * source for share, source in zip(shares, sources, strict=True)), shares


def plain_sources(variant, size, embedding, outputs):
    """What there is to mix after these outputs of sub-layers, oldest first."""
    if variant == "full":
        return [embedding, *outputs]
    if variant == "block":
        blocks = [outputs[start : start + size] for start in range(0, len(outputs), size)]
        return [embedding, *(sum(block) for block in blocks)]
    stream = [embedding]
    for output in outputs:
        stream.append(stream[-1] + output)
    return [*stream[::size], stream[-1]]


def _sequence(weights, fields, ids, positions, sees):
    heads, kv_heads, d = fields["num_attention_heads"], fields["num_key_value_heads"], fields["head_dim"]
    eps, tokens, frequencies = fields["rms_norm_eps"], range(len(ids)), plain_frequencies(fields)
    embeddings = [weights["model.embed_tokens.weight"][i] for i in ids]
    outputs = [[] for _ in tokens]

    def linear(name, x):
        return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", 0)

    def read(t, mixer, norm_name):
        sources = plain_sources(fields["attnres_variant"], fields["attnres_block_size"], embeddings[t], outputs[t])
        query, gain = weights[f"{mixer}.pseudo_query"], weights[f"{mixer}.norm.weight"]
        bias = weights.get(f"{mixer}.recency_bias", 0)
        mixed, _ = plain_mix(sources, query, gain, eps, bias=bias, scale=fields["attnres_scale"])
        return norm(mixed, weights[f"{norm_name}.weight"], eps)

    for layer in range(fields["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        window = fields["sliding_window"] if fields["layer_types"][layer] == "sliding_attention" else None

        def finish(heads_of_token, t, kind, place, prefix=prefix):
            for step in ("norm", "rope") if place == "before_rope" else ("rope", "norm"):
                if step == "rope":
                    heads_of_token = [rotate(head, positions[t], *frequencies) for head in heads_of_token]
                elif fields["use_qk_norm"]:
                    weight = weights[f"{prefix}.self_attn.{kind}_norm.weight"]
                    heads_of_token = [norm(head, weight, eps) for head in heads_of_token]
            return heads_of_token

        queries, keys, values = [], [], []
        for t in tokens:
            x = read(t, f"{prefix}.attn_mixer", f"{prefix}.input_layernorm")
            query, key, value = (linear(f"{prefix}.self_attn.{kind}_proj", x).split(d) for kind in "qkv")
            queries.append(finish(query, t, "q", "before_rope"))
            keys.append(finish(key, t, "k", fields["key_norm_position"]))
            values.append(value)
        for t in tokens:
            seen = [s for s in range(t + 1) if sees(t, s) and (window is None or t - s < window)]
            attended = []
            for head in range(heads):
                kv_head = head * kv_heads // heads
                of_head = ([token[kv_head] for token in entries] for entries in (keys, values))
                attended.append(attend(queries[t][head], *of_head, seen))
            outputs[t].append(linear(f"{prefix}.self_attn.o_proj", torch.cat(attended)))
            x = read(t, f"{prefix}.mlp_mixer", f"{prefix}.post_attention_layernorm")
            gate = linear(f"{prefix}.mlp.gate_proj", x)
            gated = gate / (1 + torch.exp(-gate)) * linear(f"{prefix}.mlp.up_proj", x)
            outputs[t].append(linear(f"{prefix}.mlp.down_proj", gated))
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return torch.stack([head @ read(t, "model.output_mixer", "model.norm") for t in tokens])


plain_attnres_logits = functools.partial(plain_logits, _sequence)
