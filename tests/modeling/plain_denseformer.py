# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""DenseFormerForCausalLM once more, as plainly as possible and without any code of transformers or depthmix."""

import functools

import torch
from plain_decoder import attention_updates, mlp_update, norm, plain_logits


def plain_average(weight, history, dilation):
    """The average of every `dilation`-th state, counted back from the newest; the weights are oldest first."""
    states = history[::-1][::dilation][::-1]
    assert len(weight) == len(states)
    return sum(share * state for share, state in zip(weight, states, strict=True))


def _sequence(weights, fields, ids, positions, sees):
    eps, tokens = fields["rms_norm_eps"], range(len(ids))
    histories = [[weights["model.embed_tokens.weight"][i]] for i in ids]
    hidden = [history[0] for history in histories]
    for layer in range(fields["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        normed = [norm(hidden[t], weights[f"{prefix}.input_layernorm.weight"], eps) for t in tokens]
        for t, update in enumerate(attention_updates(weights, fields, layer, normed, positions, sees)):
            state = hidden[t] + update
            x = norm(state, weights[f"{prefix}.post_attention_layernorm.weight"], eps)
            histories[t].append(state + mlp_update(weights, layer, x))
            hidden[t] = histories[t][-1]
            if (layer + 1) % fields["dwa_period"] == 0:
                hidden[t] = plain_average(
                    weights[f"{prefix}.depth_average.weight"], histories[t], fields["dwa_dilation"]
                )
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return torch.stack([head @ norm(state, weights["model.norm.weight"], eps) for state in hidden])


plain_denseformer_logits = functools.partial(plain_logits, _sequence)
