# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Models for quantisation: every matrix has whole groups of 64 numbers, and no layer a window."""

import torch
from family_models import fields_of, ids_of


def wide(pair):
    """The fields that make a model of a pair so wide."""
    fields = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "use_sliding_window": False}
    known = fields_of(pair)
    return {name: value for name, value in fields.items() if name in known} | (
        {"layer_types": None} if "layer_types" in known else {}
    )


def new_wide_vanilla(pair):
    """The vanilla model of the pair's backbone, from the seed of `new_model`."""
    torch.manual_seed(0)
    head = pair.backbone.stock_class("ForCausalLM")
    return head(head.config_class(**fields_of(pair) | wide(pair))).eval()


def relative_error(model, quantised):
    """Of the logits, as a part of their spread."""
    ids = ids_of(4, 48)
    with torch.no_grad():
        expected = model(ids).logits
        return ((quantised(ids).logits - expected).square().mean().sqrt() / expected.std()).item()
