# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Registration with the Auto classes of transformers."""

import logging

import transformers
from transformers import CONFIG_MAPPING

from depthmix.families import FAMILIES, HEADS
from depthmix.host_tables import register_past_auto_classes
from depthmix.hub import refuse_foreign_configurations, refuse_foreign_tensors, ship_remote_code


logger = logging.getLogger(__name__)


# model type -> Auto class -> module and class; also what `auto_map` in a saved config.json says
AUTO_MAPS = {model_type: family.auto_map for model_type, family in FAMILIES.items()}


def auto_classes(model_type: str) -> dict[str, type]:
    """The classes that `AUTO_MAPS` names for a model type, by the name of their Auto class."""
    family = FAMILIES[model_type]
    return {"AutoConfig": family.find_class("Config")} | {
        auto_class: family.find_class(ending) for auto_class, ending in HEADS.items()
    }


def register() -> None:
    """Makes the Auto classes know this package's models. Doing it again changes nothing."""
    model_classes: list[type] = []
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
        model_classes += classes.values()
    register_past_auto_classes(model_classes)
