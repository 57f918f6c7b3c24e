# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Cross-layer (depth) mixing for Hugging Face Transformers.

Importing this package registers its configurations and models with the Auto classes of transformers, and makes every
save of them carry the code that is needed to load it without this package.

Each class of a method on a backbone is an attribute here, such as `DepthQwen3ForCausalLM` or `AttnResOlmo2Config`.
"""

from pkgutil import extend_path


# in a checkout, where the folders of the subpackages lie beside this one, they are found in the installed package
__path__ = extend_path(__path__, __name__)

from depthmix.auto import register
from depthmix.families import FAMILIES
from depthmix.liger import apply_liger_kernel as apply_liger_kernel
from depthmix.optimizer import optimizer_groups as optimizer_groups
from depthmix.version import __version__ as __version__


register()

_ENDINGS = ("Config", "PreTrainedModel", "Model", "ForCausalLM", "ForSequenceClassification")
_CLASSES = {f"{family.prefix}{ending}": (family, ending) for family in FAMILIES.values() for ending in _ENDINGS}
__all__ = sorted([*_CLASSES, "__version__", "apply_liger_kernel", "optimizer_groups"])


def __getattr__(name: str) -> type:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    family, ending = _CLASSES[name]
    return family.find_class(ending)


def __dir__() -> list[str]:
    return __all__
