# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What is compared: ways of continuing the training of one pretrained vanilla model on the same extra tokens."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


# learning rates of mixing parameters, or of adapters, as multiples of the rate of the weights
SCALES = (10.0, 1.0, 100.0)


@dataclass(frozen=True)
class Arm:
    """
    Args:
        name (`str`):
            What tables call it.
        to (`str`, *optional*):
            The target of `depthmix convert`; left out, the model stays vanilla.
        options (`dict`):
            Options of that conversion, besides those of the method's defaults.
        trains (`str`):
            `"all"` parameters, `"adapters"` (LoRA) only, or the `"mixing"` parameters only.
        scales (`tuple` of `float`):
            The relative learning rates to choose from, of mixing parameters or adapters, the first of which is tried
            first.
        ablated (`bool`):
            Whether its depth weights are also averaged over tokens, and exchanged between tokens, after training.
    """

    name: str
    to: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    trains: str = "all"
    scales: tuple[float, ...] = SCALES
    ablated: bool = False


_BLOCKS = {"attnres_variant": "block"}
_ADDITIVE = _BLOCKS | {"attnres_routing": "additive"}

# by what they tell, since time can end before all have run
ARMS = (
    Arm("vanilla", scales=(1.0,)),
    Arm("Depth-Attention", "depth_attention", ablated=True),
    # all sources count in the gradient of a query, as many times as there are
    Arm("Attention Residuals, sum", "attnres", _BLOCKS, scales=(1.0, 10.0, 100.0)),
    Arm("Depth-Attention, naive", "depth_attention", {"retrofit": False}, scales=(1.0,), ablated=True),
    Arm("MoDA", "moda"),
    Arm("Attention Residuals, additive", "attnres", _ADDITIVE),
    Arm("DenseFormer", "denseformer"),
    Arm("value residual", "value_residual"),
    Arm("mHC", "mhc"),
    Arm("LoRA", trains="adapters"),
    Arm("MoDA, naive", "moda", {"retrofit": False}, scales=(1.0,)),
    Arm("Depth-Attention, frozen base", "depth_attention", trains="mixing", scales=(100.0, 10.0, 1.0), ablated=True),
    Arm("Attention Residuals, additive, frozen base", "attnres", _ADDITIVE, trains="mixing"),
    Arm("Attention Residuals full, sum", "attnres", scales=(1.0, 10.0, 100.0)),
)


@dataclass(frozen=True)
class Trial:
    """One training: an arm at one of its scales, with the data order of a seed."""

    arm: Arm
    scale: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.arm.name}, x{self.scale:g}, seed {self.seed}"


def trials(arms: Iterable[Arm], seeds: Iterable[int], rows: Iterable) -> list[Trial]:
    """
    Every arm at the scale that is tried first, with every seed; then all other scales with the first seed; then, of
    an arm whose scales have all finished with the first seed, the best one with the other seeds.
    """
    arms, (first, *others) = list(arms), seeds
    losses = {(row.system, row.scale): row.loss for row in rows if row.seed == first}
    listed = [Trial(arm, arm.scales[0], seed) for seed in (first, *others) for arm in arms]
    listed += [Trial(arm, scale, first) for arm in arms for scale in arm.scales[1:]]
    for arm in arms:
        if all((arm.name, scale) in losses for scale in arm.scales):
            best = min(arm.scales, key=lambda scale: losses[arm.name, scale])
            listed += [Trial(arm, best, seed) for seed in others]
    return list({trial.key: trial for trial in listed}.values())
