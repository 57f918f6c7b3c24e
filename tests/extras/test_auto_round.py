# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""AutoRound calibrates a layer on the hidden states alone that the one before returned."""

import pytest
from auto_round import AutoRound
from family_models import AWAKE_FIELDS, ids_of, new_model, wake
from wide_models import new_wide_vanilla, relative_error, wide


OPTIONS = {"iters": 2, "nsamples": 4, "batch_size": 2, "seqlen": 32, "group_size": 32, "enable_torch_compile": False}


def quantise(model, tokenizer):
    rows = [ids_of(1, 32, seed) for seed in range(4)]
    return AutoRound(model, tokenizer, scheme="W4A16", dataset=rows, device_map="cpu", **OPTIONS).quantize()[0]


def test_going_from_layer_to_layer_is_refused(pair, tokenizer):
    """Also where layers would go on with wrong numbers. With the streams of mHC the tool's loss fails by itself."""
    model = wake(new_model(pair, **AWAKE_FIELDS[pair.method] | wide(pair)))
    message = "size of tensor" if pair.method == "mhc" else r"Layer \d got 0 tensors of earlier layers and needs"
    with pytest.raises(RuntimeError, match=message):
        quantise(model, tokenizer)


def test_vanilla_models_work(pair, tokenizer):
    """So what is refused above is the mixing."""
    model = new_wide_vanilla(pair)
    before = new_wide_vanilla(pair)
    assert 1e-3 < relative_error(before, quantise(model, tokenizer)) < 1
