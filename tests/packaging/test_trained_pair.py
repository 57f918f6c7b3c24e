# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The two trained models that the demo compares."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import depthmix


EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.once


@torch.no_grad()
def test_mixing_is_all_that_differs_and_lowers_the_loss(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    from text_corpus import mean_loss, pack

    vanilla, mixed = (
        AutoModelForCausalLM.from_pretrained(EXAMPLES / "trained_pair" / name, dtype=torch.float32)
        for name in ("vanilla", "depth_attention")
    )
    differing = {name for name, value in mixed.config.to_dict().items() if vanilla.config.to_dict()[name] != value}
    assert differing - {"_name_or_path"} == {"depth_stride"}
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "trained_pair" / "vanilla")
    source = [path.read_text(encoding="utf-8") for path in sorted(Path(depthmix.__file__).parent.glob("*.py"))]
    blocks = pack(source, tokenizer, 512).spread(8)
    losses = [mean_loss(model, blocks) for model in (vanilla, mixed)]
    assert losses[1] < losses[0] - 0.02
    # its middle layer reads mostly the value of the first
    ids = blocks.blocks[:2]
    weights = mixed(ids, output_depth_weights=True).depth_weights
    assert weights[12][..., 0].mean() > 0.5
