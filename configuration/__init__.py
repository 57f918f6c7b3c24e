# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Configurations. Importing them needs transformers, not torch."""

from .configuration_attnres import AttnResConfig
from .configuration_denseformer import DenseFormerConfig
from .configuration_depth_qwen3 import DepthQwen3Config
from .configuration_mhc import MHCConfig
from .configuration_moda_olmo2 import MoDAOlmo2Config


__all__ = ["AttnResConfig", "DenseFormerConfig", "DepthQwen3Config", "MHCConfig", "MoDAOlmo2Config"]
