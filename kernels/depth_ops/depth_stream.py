# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Placeholder until the operation's branch is merged."""
import torch
from .depth_implementations import use_triton


class DepthStream:
    def __init__(self, slots, *, impl="auto", window=None, shared_buffer=True):
        self.window = window
        self.capacity = slots
        self.handle = ()
        self.written = 0

    def write(self, handle, key, value):
        handle = (*handle, key, value)
        return handle if self.window is None else handle[-2 * self.window :]

    def slots(self, handle, start, stop):
        count = stop - start
        return list(handle[0::2][-count:]), list(handle[1::2][-count:])


def moda_attention_over_stream(query, key, value, stream, handle, *, start, stop, depth_query=None, scaling=None, attention_mask=None, is_causal=True):
    keys, values = stream.slots(handle, start, stop)
    B, H, T, d = query.shape
    G = H // key.shape[1]
    S = key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    k, v = key.to(wide).repeat_interleave(G, 1), value.to(wide).repeat_interleave(G, 1)
    scores = query.to(wide) @ k.transpose(-1, -2) * scaling
    if attention_mask is None:
        if is_causal:
            seen = torch.ones(T, S, dtype=torch.bool, device=query.device).tril(S - T)
            scores = scores.masked_fill(~seen, -torch.inf)
    elif attention_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    else:
        scores = scores + attention_mask
    kd, vd = (torch.stack(x, 3).to(wide).permute(0, 2, 1, 3, 4).repeat_interleave(G, 1) for x in (keys, values))
    dscores = (kd @ depth_query.to(wide).unsqueeze(-1)).squeeze(-1) * scaling
    p = torch.cat([scores, dscores], -1).softmax(-1)
    out = p[..., :S] @ v + (p[..., None, S:] @ vd).squeeze(-2)
    return out.to(query.dtype)
