# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Registration with the Auto classes of transformers."""

import functools
import logging
from importlib import import_module
from typing import Any

from depthmix.families import FAMILIES, Family
from depthmix.hub import refuse_foreign_configurations, ship_remote_code
from depthmix.late_registration import HEADS


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
    register_configurations()
    register_models()


def register_configurations() -> None:
    """The part of [`register`] that does not need torch."""
    host = import_module("transformers.models.auto.configuration_auto")
    for model_type, family in FAMILIES.items():
        config_class = family.find_class("Config")
        # its `get` does not know what was registered
        try:
            other = host.CONFIG_MAPPING[model_type]
        except KeyError:
            other = config_class
        if not other.__module__.startswith("depthmix."):
            logger.warning(
                f"The model type {model_type!r} was that of {other.__module__}.{other.__name__}. After `import "
                f"depthmix` the Auto classes take it for {config_class.__name__}."
            )
        host.AutoConfig.register(model_type, config_class, exist_ok=True)


def register_models() -> None:
    """The other part. The classes are made when they are looked up."""
    host = import_module("transformers.models.auto.modeling_auto")
    for auto_class in HEADS:
        add_models(getattr(host, auto_class)._model_mapping._extra_content, auto_class)


def add_models(content: dict[type, Any], auto_class: str) -> None:
    """Adds the models for an Auto class, by configuration class, to what has been registered with it."""
    for family in FAMILIES.values():
        content[family.find_class("Config")] = functools.partial(family.find_class, HEADS[auto_class])


def prepare_configuration(config_class: type, family: Family) -> None:
    """What every configuration class of this package does that its code in a saved model does not."""
    refuse_foreign_configurations(config_class, family.auto_map)
    ship_remote_code(config_class, family.auto_map)
