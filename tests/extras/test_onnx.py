# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Export to ONNX with default options, and what onnxruntime makes of it."""

import pytest
import torch
from family_models import AWAKE_FIELDS, ids_of, new_model, wake
from torch import nn


onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


class Logits(nn.Module):
    """A model as a function from ids to logits: other outputs are no tensors."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def test_onnxruntime_gives_the_same_logits(pair, tmp_path):
    model = wake(new_model(pair, **AWAKE_FIELDS[pair.method])).eval()
    lengths = {"input_ids": {1: torch.export.Dim("length", min=2, max=64)}}
    program = torch.onnx.export(
        Logits(model), (), kwargs={"input_ids": ids_of(2, 12)}, dynamo=True, dynamic_shapes=lengths, verbose=False
    )
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for length in (12, 31):
        ids = ids_of(2, length, seed=3)
        (logits,) = session.run(None, {"input_ids": ids.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), model(ids, use_cache=False).logits, rtol=0, atol=2e-4)
