# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the comparisons with plain models in float64 share."""

import torch
from hypothesis import strategies as st
from plain_decoder import plain_frequencies
from torch import nn

from depthmix.modeling.lent_weights import DepthRMSNorm


class ExactNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class ExactRotary(nn.Module):
    def __init__(self, fields):
        super().__init__()
        self.frequencies, self.attention_scaling = plain_frequencies(fields)

    def scaling(self, kind):
        return self.attention_scaling

    def forward(self, x, position_ids):
        angles = (position_ids[..., None] * self.frequencies).repeat(1, 1, 2)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def exact(model, kept=()):
    """
    The model in float64 throughout: by themselves, norms and rotations stay in fp32. The norms of the
    names in `kept` stay as they are.
    """
    model.double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, DepthRMSNorm) and name not in kept:
                setattr(module, name, ExactNorm(child))
    model.model.rotary_emb = ExactRotary(model.config.to_dict())
    return model


SMALL = {"hidden_size": 24, "intermediate_size": 20, "head_dim": 6}
HEADS = ((4, 2), (6, 2), (4, 1), (4, 4))


@st.composite
def backbones(draw):
    """Fields of the dense decoder: its size, and every way in which the stock models on it differ."""
    layers = draw(st.integers(1, 4))
    heads, kv_heads = draw(st.sampled_from(HEADS))
    fields = SMALL | {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    fields["key_norm_position"] = draw(st.sampled_from(["before_rope", "after_rope"]))
    switches = ("use_qk_norm", "attention_bias", "attention_output_bias", "mlp_bias", "tie_word_embeddings")
    fields |= {switch: draw(st.booleans()) for switch in switches}
    if draw(st.booleans()):
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        fields |= {"use_sliding_window": True, "sliding_window": draw(st.integers(1, 4))}
        fields["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    return fields


def check_logits(model, plain, given_inputs):
    """The model's logits beside those that the function `plain` gives for the same weights."""
    ids, ours, of_plain = given_inputs
    logits = model(ids, **ours).logits
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = plain(weights, model.config.to_dict(), ids, **of_plain)
    real = ours.get("attention_mask", torch.ones_like(ids)).bool()
    torch.testing.assert_close(logits[real], expected[real], atol=1e-10, rtol=1e-10)
    assert logits.isfinite().all()


def check_gradients(model, plain, ids, is_idle=lambda name: False):
    """The gradients of the loss; those that are `is_idle`, and no others, are zero up to rounding."""
    # the plain model shares the parameters
    weights = dict(model.named_parameters())
    losses = [
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        for logits in (model(ids).logits, plain(weights, model.config.to_dict(), ids))
    ]
    ours, expected = (torch.autograd.grad(loss, list(weights.values())) for loss in losses)
    for name, ours_, expected_ in zip(weights, ours, expected, strict=True):
        assert (expected_.abs().max() > 1e-12) != is_idle(name), name
        torch.testing.assert_close(
            ours_, expected_, atol=1e-12, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


@st.composite
def inputs(draw):
    """Ids with nothing else, with padding on either side, with shifted positions, or with packed documents."""
    batch, length = draw(st.integers(1, 2)), draw(st.integers(1, 7))
    ids = torch.tensor(draw(st.lists(st.integers(0, 96), min_size=batch * length, max_size=batch * length)))
    ids = ids.view(batch, length)
    kind = draw(st.sampled_from(["bare", "left padding", "right padding", "positions", "packed"]))
    if kind == "bare":
        return ids, {}, {}
    if kind == "positions":
        given = {"position_ids": torch.arange(length).expand(batch, -1) + draw(st.integers(0, 300))}
        return ids, given, given
    if kind == "packed":
        # transformers finds the documents where positions restart, without a cache or a mask, in a single row
        ends = sorted(draw(st.sets(st.integers(1, length), max_size=2)) | {0, length})
        lengths = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        given = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
        documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
        return ids[:1], given | {"use_cache": False}, given | {"documents": documents}
    real = torch.tensor([draw(st.integers(1, length)) for _ in range(batch)])
    mask = (torch.arange(length) < real[:, None]).long()
    if kind == "left padding":
        mask = mask.flip(1)
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return ids, given, given
