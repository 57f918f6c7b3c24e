# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Cross-layer (depth) mixing for Hugging Face Transformers.

Importing this package registers its configurations and models with the Auto classes of transformers, and makes every
save of them carry the code that is needed to load it without this package.
"""

from pkgutil import extend_path


# in a checkout, where the folders of the subpackages lie beside this one, they are found in the installed package
__path__ = extend_path(__path__, __name__)

from depthmix.auto import register
from depthmix.configuration import AttnResConfig, DenseFormerConfig, DepthQwen3Config, MHCConfig, MoDAOlmo2Config
from depthmix.modeling import (
    AttnResForCausalLM,
    AttnResForSequenceClassification,
    AttnResModel,
    AttnResPreTrainedModel,
    DenseFormerForCausalLM,
    DenseFormerForSequenceClassification,
    DenseFormerModel,
    DenseFormerPreTrainedModel,
    DepthQwen3ForCausalLM,
    DepthQwen3ForSequenceClassification,
    DepthQwen3Model,
    DepthQwen3PreTrainedModel,
    MHCForCausalLM,
    MHCForSequenceClassification,
    MHCModel,
    MHCPreTrainedModel,
    MoDAOlmo2ForCausalLM,
    MoDAOlmo2ForSequenceClassification,
    MoDAOlmo2Model,
    MoDAOlmo2PreTrainedModel,
)
from depthmix.optimizer import optimizer_groups
from depthmix.version import __version__


register()

__all__ = [
    "AttnResConfig",
    "AttnResForCausalLM",
    "AttnResForSequenceClassification",
    "AttnResModel",
    "AttnResPreTrainedModel",
    "DenseFormerConfig",
    "DenseFormerForCausalLM",
    "DenseFormerForSequenceClassification",
    "DenseFormerModel",
    "DenseFormerPreTrainedModel",
    "DepthQwen3Config",
    "DepthQwen3ForCausalLM",
    "DepthQwen3ForSequenceClassification",
    "DepthQwen3Model",
    "DepthQwen3PreTrainedModel",
    "MHCConfig",
    "MHCForCausalLM",
    "MHCForSequenceClassification",
    "MHCModel",
    "MHCPreTrainedModel",
    "MoDAOlmo2Config",
    "MoDAOlmo2ForCausalLM",
    "MoDAOlmo2ForSequenceClassification",
    "MoDAOlmo2Model",
    "MoDAOlmo2PreTrainedModel",
    "__version__",
    "optimizer_groups",
]
