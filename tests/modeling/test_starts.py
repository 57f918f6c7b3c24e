# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
A start that keeps a function can be a symmetry, which no training leaves. In float64, where no rounding hides that:
which gradients are zero at the start of each family, and after a step.
"""

import pytest
import torch
from float64_checks import exact


# Parameters behind a factor that starts at zero, the mixer's query and the connection's projection. They move from
# the second step on.
BEHIND_ZERO = {
    "attnres": ("_mixer.norm.weight",),
    "mhc": ("_connection.norm_weight", "alpha_pre", "alpha_post", "alpha_residual"),
}
# what the first sub-layer mixes are equal streams, or one source: these never move
NEVER = {
    "attnres": ("layers.0.attn_mixer.",),
    "mhc": ("layers.0.attn_connection.alpha_residual", "layers.0.attn_connection.residual_logits"),
}


def matching(names, parts):
    return {name for name in names if any(part in name for part in parts)}


def test_which_gradients_are_zero(pattern, family, tiny, token_ids):
    name = family.head.config_class.model_type
    fields = tiny | {"initializer_range": 0.05, "num_hidden_layers": 3} | family.defaults | pattern
    model = exact(family.head(family.head.config_class(**fields)))
    own = {each: parameter for each, parameter in model.named_parameters() if family.is_own(each)}
    if not own:
        pytest.skip("this family has no parameters of its own")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    zero = []
    for step in range(2):
        optimizer.zero_grad()
        ids = token_ids(2, 12, seed=step)
        model(ids, labels=ids, use_cache=False).loss.backward()
        zero.append({each for each, parameter in own.items() if parameter.grad.abs().max() < 1e-10})
        optimizer.step()
    never = matching(own, NEVER.get(name, ()))
    assert zero[1] == never
    # the projection of the first connection moves with its writes, and those of slots once their gates have moved
    closed = ("_depth_kv_proj.weight",) if pattern.get("moda_gate") else ()
    assert zero[0] == never | matching(own, BEHIND_ZERO.get(name, closed))


def test_entries_of_averages(tiny, token_ids):
    """Of the last average of DenseFormer, the newest entry only scales what the final norm reads."""
    from depthmix import DenseFormerConfig, DenseFormerForCausalLM

    model = exact(DenseFormerForCausalLM(DenseFormerConfig(**tiny | {"rms_norm_eps": 1e-12})))
    model(token_ids(2, 12), labels=token_ids(2, 12)).loss.backward()
    *others, last = (layer.depth_average.weight.grad.abs() for layer in model.model.layers)
    scale = torch.cat([*others, last]).max()
    assert torch.cat([*others, last[:-1]]).min() > 1e-4 * scale
    assert last[-1] < 1e-8 * scale
