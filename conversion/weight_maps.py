# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Names of tensors in a source and in a target, as data that is read in both directions."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightMap:
    """
    How the tensor names of a source become those of a target.

    Args:
        renames (`tuple` of pairs of `str`):
            Source and target name. `{layer}` in both stands for the same layer index. Every other name is kept.
        dropped (`tuple` of `str`):
            Source names that the target has no use for. They may be absent.
    """

    renames: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()

    def to_target(self, name: str) -> str | None:
        """The target's name for a source tensor; None for one that is dropped."""
        return None if name in self.dropped else _rename(name, self.renames)

    def to_source(self, name: str) -> str:
        """The source's name for a target tensor."""
        return _rename(name, tuple((target, source) for source, target in self.renames))


def _rename(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    for old, new in renames:
        pattern = re.escape(old).replace(re.escape("{layer}"), r"(?P<layer>\d+)")
        if match := re.fullmatch(pattern, name):
            return new.format(**match.groupdict())
    return name


QWEN3_TO_DEPTH_QWEN3 = WeightMap()
# the release saves a norm that its forward never applies
RELEASED_LLAMA_TO_DEPTH_QWEN3 = WeightMap(dropped=("lm_head_layernorm.weight",))
