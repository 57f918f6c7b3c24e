# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Registration with the Auto classes of transformers."""

import logging
from importlib import import_module

import transformers
from transformers import CONFIG_MAPPING

from depthmix.hub import refuse_foreign_configurations, refuse_foreign_tensors, ship_remote_code


logger = logging.getLogger(__name__)


# model type -> Auto class -> module and class; also what `auto_map` in a saved config.json says.
# the config comes first, and the base model is there for servers, which load it instead of a head
AUTO_MAPS = {
    "attnres": {
        "AutoConfig": "configuration_attnres.AttnResConfig",
        "AutoModel": "modeling_attnres.AttnResModel",
        "AutoModelForCausalLM": "modeling_attnres.AttnResForCausalLM",
        "AutoModelForSequenceClassification": "modeling_attnres.AttnResForSequenceClassification",
    },
    "denseformer": {
        "AutoConfig": "configuration_denseformer.DenseFormerConfig",
        "AutoModel": "modeling_denseformer.DenseFormerModel",
        "AutoModelForCausalLM": "modeling_denseformer.DenseFormerForCausalLM",
        "AutoModelForSequenceClassification": "modeling_denseformer.DenseFormerForSequenceClassification",
    },
    "depth_qwen3": {
        "AutoConfig": "configuration_depth_qwen3.DepthQwen3Config",
        "AutoModel": "modeling_depth_qwen3.DepthQwen3Model",
        "AutoModelForCausalLM": "modeling_depth_qwen3.DepthQwen3ForCausalLM",
        "AutoModelForSequenceClassification": "modeling_depth_qwen3.DepthQwen3ForSequenceClassification",
    },
    "mhc": {
        "AutoConfig": "configuration_mhc.MHCConfig",
        "AutoModel": "modeling_mhc.MHCModel",
        "AutoModelForCausalLM": "modeling_mhc.MHCForCausalLM",
        "AutoModelForSequenceClassification": "modeling_mhc.MHCForSequenceClassification",
    },
    "moda_olmo2": {
        "AutoConfig": "configuration_moda_olmo2.MoDAOlmo2Config",
        "AutoModel": "modeling_moda_olmo2.MoDAOlmo2Model",
        "AutoModelForCausalLM": "modeling_moda_olmo2.MoDAOlmo2ForCausalLM",
        "AutoModelForSequenceClassification": "modeling_moda_olmo2.MoDAOlmo2ForSequenceClassification",
    },
}


def auto_classes(model_type: str) -> dict[str, type]:
    """The classes that `AUTO_MAPS` names for a model type, by the name of their Auto class."""
    classes = {}
    for auto_class, reference in AUTO_MAPS[model_type].items():
        module, name = reference.split(".")
        folder = module.split("_")[0]
        classes[auto_class] = getattr(import_module(f"depthmix.{folder}.{module}"), name)
    return classes


def register() -> None:
    """Makes the Auto classes know this package's models. Doing it again changes nothing."""
    for model_type, auto_map in AUTO_MAPS.items():
        classes = auto_classes(model_type)
        config_class = classes.pop("AutoConfig")
        # its `get` does not know what was registered
        try:
            other = CONFIG_MAPPING[model_type]
        except KeyError:
            other = config_class
        if not other.__module__.startswith("depthmix."):
            logger.warning(
                f"The model type {model_type!r} was that of {other.__module__}.{other.__name__}. After `import "
                f"depthmix` the Auto classes take it for {config_class.__name__}."
            )
        transformers.AutoConfig.register(model_type, config_class, exist_ok=True)
        for auto_class, model_class in classes.items():
            getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)
            refuse_foreign_tensors(model_class)
        refuse_foreign_configurations(config_class, auto_map)
        ship_remote_code(config_class, auto_map)
