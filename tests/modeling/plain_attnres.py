# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
AttnResForCausalLM once more, as plainly as possible and without any code of transformers or depthmix: every mix is one
softmax over a list of sources that is made anew from all earlier outputs.
"""

import functools

import torch
from plain_decoder import attention_updates, mlp_update, norm, plain_logits, softmax


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
    eps, tokens = fields["rms_norm_eps"], range(len(ids))
    embeddings = [weights["model.embed_tokens.weight"][i] for i in ids]
    outputs = [[] for _ in tokens]
    is_additive = fields.get("attnres_routing") == "additive"

    def read(t, mixer, norm_name):
        if f"{mixer}.pseudo_query" not in weights:
            # with additive routing the first attention and the final norm read the stream
            return norm(embeddings[t] + sum(outputs[t]), weights[f"{norm_name}.weight"], eps)
        sources = plain_sources(fields["attnres_variant"], fields["attnres_block_size"], embeddings[t], outputs[t])
        query, gain = weights[f"{mixer}.pseudo_query"], weights[f"{mixer}.norm.weight"]
        bias = weights.get(f"{mixer}.recency_bias", 0)
        mixed, _ = plain_mix(sources, query, gain, eps, bias=bias, scale=fields["attnres_scale"])
        if is_additive:
            factor = len(sources) if fields["attnres_scale"] == "sum" else 1
            mixed = embeddings[t] + sum(outputs[t]) + mixed - factor * sum(sources) / len(sources)
        return norm(mixed, weights[f"{norm_name}.weight"], eps)

    for layer in range(fields["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        read_by_all = [read(t, f"{prefix}.attn_mixer", f"{prefix}.input_layernorm") for t in tokens]
        for t, update in enumerate(attention_updates(weights, fields, layer, read_by_all, positions, sees)):
            outputs[t].append(update)
            x = read(t, f"{prefix}.mlp_mixer", f"{prefix}.post_attention_layernorm")
            outputs[t].append(mlp_update(weights, layer, x))
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return torch.stack([head @ read(t, "model.output_mixer", "model.norm") for t in tokens])


plain_attnres_logits = functools.partial(plain_logits, _sequence)
