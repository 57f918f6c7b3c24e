# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Checkpoints that version 0.1.0 saved, and what it computed with them on a CPU: logits in fp32 and bf16, with and
without padding, bit for bit, and the norms of all gradients.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM


FOLDERS = sorted((Path(__file__).parents[1] / "data" / "version_0_1_0").iterdir())
pytestmark = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def test_outputs_and_gradients(folder):
    expected = load_file(folder / "expected.safetensors")
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values())
    model.eval()
    ids = expected["input_ids"]
    outputs = model(ids, labels=ids, use_cache=False)
    assert torch.equal(outputs.logits, expected["logits"]) and torch.equal(outputs.loss[None], expected["loss"])
    outputs.loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.norm()[None], expected[f"grad.{name}"], atol=1e-7, rtol=1e-5)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, position_ids=positions).logits
        assert torch.equal(padded, expected["padded_logits"])


@torch.no_grad()
def test_low_precision(folder):
    expected = load_file(folder / "expected.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    assert torch.equal(model(expected["input_ids"], use_cache=False).logits, expected["bf16_logits"])


def test_configuration_round_trip(folder, tmp_path):
    config = AutoConfig.from_pretrained(folder)
    config.save_pretrained(tmp_path)
    saved = AutoConfig.from_pretrained(tmp_path)
    before, after = config.to_dict(), saved.to_dict()
    assert {key for key in before if before[key] != after.get(key)} <= {"auto_map", "_name_or_path"}
