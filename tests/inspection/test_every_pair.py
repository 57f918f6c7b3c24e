# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Every method on every backbone can be looked into."""

import pytest
import torch
from family_models import AWAKE_FIELDS, TOLERANCE, ids_of, new_model, wake

from depthmix.families import FAMILIES
from depthmix.inspection import ablate, importance_map, logit_lens, output_magnitudes, patch
from depthmix.inspection.watch import evaluation, run, viewing, watch


@pytest.mark.once
@pytest.mark.parametrize("pair", FAMILIES.values(), ids=FAMILIES)
def test_every_pair(pair):
    model = wake(new_model(pair, **AWAKE_FIELDS[pair.method]))
    inputs, other = ({"input_ids": ids_of(2, 7, seed=seed)} for seed in (1, 2))
    tolerance = {"atol": 2 * TOLERANCE.get(pair.backbone.model_type, 1e-5), "rtol": 1e-4}
    with torch.no_grad():
        expected = model(**inputs).logits
    with evaluation(model), watch(model) as watched:
        with viewing(watched.editors, lambda _, mix: mix.replace(0, mix.contribution(0))):
            torch.testing.assert_close(run(model, inputs).logits, expected, **tolerance)
        site = watched.sites[-1]
    torch.testing.assert_close(logit_lens(model, inputs).logits[-1], expected, **tolerance)
    assert logit_lens(model, inputs, over="sources", positions=[3]).logits.isfinite().all()
    sizes = output_magnitudes(model, inputs)
    assert (sizes.hidden_states > 0).all() and (sizes.attention > 0).all() and (sizes.mlp > 0).all()
    changed = [ablate(model, inputs, site.sources[0], site.target), patch(model, inputs, other, site.sources)]
    assert all((each.logits - expected).abs().max() > 1e-4 for each in changed)


@pytest.mark.once
def test_classifiers(small, inputs):
    """They have no loss of the next token, and all the rest."""
    model = small("attnres", ending="ForSequenceClassification", attnres_block_size=2)
    before = model(**inputs).logits
    assert (ablate(model, inputs, "embeddings", "output").logits - before).abs().max() > 1e-4
    found = importance_map(model, inputs, measure=lambda output: output.logits[:, 0].mean())
    assert found.values[-1].abs().max() > 1e-4
    with pytest.raises(ValueError, match="give a measure"):
        importance_map(model, inputs)
