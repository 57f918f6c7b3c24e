# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Model classes."""

from .modeling_attnres import (
    AttnResForCausalLM,
    AttnResForSequenceClassification,
    AttnResModel,
    AttnResPreTrainedModel,
)
from .modeling_denseformer import (
    DenseFormerForCausalLM,
    DenseFormerForSequenceClassification,
    DenseFormerModel,
    DenseFormerPreTrainedModel,
)
from .modeling_depth_qwen3 import (
    DepthQwen3ForCausalLM,
    DepthQwen3ForSequenceClassification,
    DepthQwen3Model,
    DepthQwen3PreTrainedModel,
)
from .modeling_mhc import (
    MHCForCausalLM,
    MHCForSequenceClassification,
    MHCModel,
    MHCPreTrainedModel,
)
from .modeling_moda_olmo2 import (
    MoDAOlmo2ForCausalLM,
    MoDAOlmo2ForSequenceClassification,
    MoDAOlmo2Model,
    MoDAOlmo2PreTrainedModel,
)


__all__ = [
    "AttnResForCausalLM",
    "AttnResForSequenceClassification",
    "AttnResModel",
    "AttnResPreTrainedModel",
    "DenseFormerForCausalLM",
    "DenseFormerForSequenceClassification",
    "DenseFormerModel",
    "DenseFormerPreTrainedModel",
    "DepthQwen3ForCausalLM",
    "DepthQwen3ForSequenceClassification",
    "DepthQwen3Model",
    "DepthQwen3PreTrainedModel",
    "MHCForCausalLM",
    "MHCForSequenceClassification",
    "MHCModel",
    "MHCPreTrainedModel",
    "MoDAOlmo2ForCausalLM",
    "MoDAOlmo2ForSequenceClassification",
    "MoDAOlmo2Model",
    "MoDAOlmo2PreTrainedModel",
]
