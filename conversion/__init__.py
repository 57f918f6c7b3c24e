# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Conversion of checkpoints to this package's models."""

from .code_check import CodeCheck, verify_code
from .converter import convert, inspect_checkpoint
from .errors import ConversionError
from .fold_gates import fold_gates
from .reports import CheckpointDescription, ConversionReport


__all__ = [
    "CheckpointDescription",
    "CodeCheck",
    "ConversionError",
    "ConversionReport",
    "convert",
    "fold_gates",
    "inspect_checkpoint",
    "verify_code",
]
