# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Looking inside of models: which sources their layers mix, what these are good for, and what they say.

It is called `depthmix.inspection` since `depthmix inspect` is a command that says what a checkpoint is, and since
`from depthmix import inspect` would hide the module of that name in Python's library.
"""

from .causal import ablate, ablated, importance_map, patch, patched
from .lens import Lens, logit_lens
from .measures import (
    DepthMap,
    Magnitudes,
    SiteWeights,
    depth_map,
    depth_weights,
    gate_values,
    output_magnitudes,
    source_entropy,
)
from .plot import plot
from .sites import Site
from .streams import StreamMaps, stream_maps


__all__ = [
    "DepthMap",
    "Lens",
    "Magnitudes",
    "Site",
    "SiteWeights",
    "StreamMaps",
    "ablate",
    "ablated",
    "depth_map",
    "depth_weights",
    "gate_values",
    "importance_map",
    "logit_lens",
    "output_magnitudes",
    "patch",
    "patched",
    "plot",
    "source_entropy",
    "stream_maps",
]


def __dir__() -> list[str]:
    return __all__
