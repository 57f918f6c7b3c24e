# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The methods. Everything that has to know all of them asks here: Auto classes and the code of saved models, exports,
targets of conversion, tests and benchmarks.

A method is four modules by name: `configuration_<method>` with `CONFIGURATIONS`, `modeling_<method>` with the model
classes, `convert_to_<method>` with `TARGET`, `sites_of_<method>` with `SITES`. With a backbone it makes a family,
which has a model type of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from depthmix.configuration.depth_backbones import Backbone, ConfigurationClasses
from depthmix.late_registration import HEADS


if TYPE_CHECKING:
    from depthmix.inspection.sites import MethodSites

METHODS = ("depth_attention", "attnres", "denseformer", "mhc", "moda", "value_residual")


@dataclass(frozen=True)
class Family:
    """A method on a backbone."""

    method: str
    backbone: Backbone
    model_type: str
    # what the names of its classes begin with
    prefix: str

    @property
    def auto_map(self) -> dict[str, str]:
        """
        Auto class to module and class, as `auto_map` in a saved config.json has it. The configuration comes first; the
        base model is there for servers, which load it instead of a head.
        """
        modeling = f"modeling_{self.method}.{self.prefix}"
        return {"AutoConfig": f"configuration_{self.method}.{self.prefix}Config"} | {
            auto_class: f"{modeling}{ending}" for auto_class, ending in HEADS.items()
        }

    def find_class(self, name: str) -> type:
        """Its class of this name, without the prefix: `"Config"`, `"ForCausalLM"` and so on."""
        folder = "configuration" if name == "Config" else "modeling"
        module = import_module(f"depthmix.{folder}.{folder}_{self.method}")
        found: type = getattr(module, f"{self.prefix}{name}")
        return found


def configurations(method: str) -> ConfigurationClasses:
    """The configuration classes of a method."""
    found: ConfigurationClasses = import_module(f"depthmix.configuration.configuration_{method}").CONFIGURATIONS
    return found


def method_sites(method: str) -> "MethodSites":
    """Where a method mixes sources, and how that is seen and changed while a model runs."""
    found: MethodSites = import_module(f"depthmix.inspection.sites_of_{method}").SITES
    return found


def family_of(classes: ConfigurationClasses, backbone: Backbone) -> Family:
    """The family that these classes of a method make with a backbone."""
    method = classes.module.rpartition(".configuration_")[2]
    return Family(method, backbone, classes.model_type_of(backbone), f"{classes.prefix}{backbone.prefix}")


def _families() -> Iterator[Family]:
    for method in METHODS:
        classes = configurations(method)
        for backbone in classes.backbones.values():
            if backbone.is_available:
                yield family_of(classes, backbone)


# by model type; families on backbones that the installed transformers does not have are left out
FAMILIES = {family.model_type: family for family in _families()}
