# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Cross-layer (depth) mixing for Hugging Face Transformers.

With this package imported the Auto classes of transformers know its configurations and models, and every save of them
carries the code that is needed to load it without this package. Neither transformers nor torch is imported for that
before they are used.

Each class of a method on a backbone is an attribute here, such as `DepthQwen3ForCausalLM` or `AttnResOlmo2Config`.
`dir(depthmix)` lists them, and `help(depthmix.AttnResOlmo2Config)` explains one.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pkgutil import extend_path


# in a checkout, where the folders of the subpackages lie beside this one, they are found in the installed package
__path__ = extend_path(__path__, __name__)

if len(__path__) > 1:
    from depthmix.checkout import refuse_mixed_states

    refuse_mixed_states(__path__)

if find_spec("depthmix.configuration") is None:
    raise ImportError(
        f"{__path__[0]} is the package in a clone, and depthmix is not installed in this Python. Install it, in the "
        "clone, with `pip install .` or `pip install -e .`."
    )

from depthmix.late_registration import register_when_used
from depthmix.version import __version__ as __version__


register_when_used()

_ENDINGS = ("Config", "PreTrainedModel", "Model", "ForCausalLM", "ForSequenceClassification")
_FUNCTIONS = {
    "apply_liger_kernel": "depthmix.liger",
    "convert": "depthmix.conversion",
    "optimizer_groups": "depthmix.optimizer",
}
# `help()` and a star import take these; with some hundred classes neither would be of use
__all__ = sorted(["__version__", *_FUNCTIONS])
_SUBMODULES = (
    *("auto", "callbacks", "configuration", "conversion", "families", "hub", "inspection", "kernels", "modeling"),
    *("optimizer", "pipeline"),
)


def __getattr__(name: str):
    if name in _FUNCTIONS:
        return getattr(import_module(_FUNCTIONS[name]), name)
    if name in _SUBMODULES:
        return import_module(f"depthmix.{name}")
    # what the import system and other libraries ask every module for
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    classes = _classes()
    if name not in classes:
        # with these, Python itself says what is spelt like it
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    family, ending = classes[name]
    return family.find_class(ending)


def _classes() -> dict:
    from depthmix.families import FAMILIES

    return {f"{family.prefix}{ending}": (family, ending) for family in FAMILIES.values() for ending in _ENDINGS}


def __dir__() -> list[str]:
    return sorted([*__all__, *_classes()])
