# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""MHCForCausalLM once more, as plainly as possible and without any code of transformers or depthmix."""

import functools

import torch
from plain_decoder import attention_updates, mlp_update, norm, plain_logits, softmax


def plain_sinkhorn(logits, iterations, order):
    """A matrix, as a list of rows of numbers."""
    rows = [[torch.exp(entry) for entry in row] for row in logits]

    def normalise(lists):
        return [[entry / sum(numbers) for entry in numbers] for numbers in lists]

    def transpose(lists):
        return [list(column) for column in zip(*lists, strict=True)]

    for _ in range(iterations):
        if order == "rows_first":
            rows = transpose(normalise(transpose(normalise(rows))))
        else:
            rows = normalise(transpose(normalise(transpose(rows))))
    return rows


def plain_maps(streams, connection, eps, iterations, order):
    """The weights for reading, the matrix and the weights for writing."""
    n = len(streams)
    z = connection["projection"] @ norm(torch.cat(streams), connection["norm_weight"], eps)
    logistic = [1 / (1 + torch.exp(-(connection["alpha_pre"] * z[i] + connection["pre_logits"][i]))) for i in range(n)]
    post = [
        2 / (1 + torch.exp(-(connection["alpha_post"] * z[n + i] + connection["post_logits"][i]))) for i in range(n)
    ]
    entries = [
        [connection["alpha_residual"] * z[2 * n + n * i + j] + connection["residual_logits"][i, j] for j in range(n)]
        for i in range(n)
    ]
    return logistic, plain_sinkhorn(entries, iterations, order), post


def _sequence(weights, fields, ids, positions, sees):
    eps, tokens, n = fields["rms_norm_eps"], range(len(ids)), fields["mhc_num_streams"]
    streams = [[weights["model.embed_tokens.weight"][i]] * n for i in ids]

    def read(t, connection, norm_name):
        prefix = f"{connection}."
        own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        pre, residual, post = plain_maps(
            streams[t], own, eps, fields["mhc_sinkhorn_iters"], fields["mhc_sinkhorn_order"]
        )
        mixed = sum(share * stream for share, stream in zip(pre, streams[t], strict=True))
        return norm(mixed, weights[f"{norm_name}.weight"], eps), residual, post

    def write(t, residual, post, update):
        streams[t] = [sum(residual[i][j] * streams[t][j] for j in range(n)) + post[i] * update for i in range(n)]

    for layer in range(fields["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        read_by_all = [read(t, f"{prefix}.attn_connection", f"{prefix}.input_layernorm") for t in tokens]
        normed = [x for x, _, _ in read_by_all]
        for t, update in enumerate(attention_updates(weights, fields, layer, normed, positions, sees)):
            write(t, *read_by_all[t][1:], update)
            x, residual, post = read(t, f"{prefix}.mlp_connection", f"{prefix}.post_attention_layernorm")
            write(t, residual, post, mlp_update(weights, layer, x))
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    shares = softmax(list(weights["model.stream_readout.logits"]))
    states = [sum(share * stream for share, stream in zip(shares, streams[t], strict=True)) for t in tokens]
    return torch.stack([head @ norm(state, weights["model.norm.weight"], eps) for state in states])


plain_mhc_logits = functools.partial(plain_logits, _sequence)
