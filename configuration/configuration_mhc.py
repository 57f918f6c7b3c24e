# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Configurations of manifold-constrained hyper-connections (mHC, arXiv 2512.24880)."""

from dataclasses import dataclass, field
from typing import Literal

from .configuration_depth_common import DepthMixingFields, check_count, check_number
from .depth_backbones import ConfigurationClasses


# the parameters of a layer grow with the cube of the streams, and each iteration is a step of its own in every layer
_MAX_STREAMS = 64
_MAX_SINKHORN_ITERS = 1000


@dataclass(kw_only=True)
class MHCFields(DepthMixingFields):
    r"""
    The residual stream is widened to several. Before a sub-layer they are summed with weights between 0 and 1; after
    it they are mixed by a matrix that is made doubly stochastic by Sinkhorn iterations, and each gets the sub-layer's
    output times a weight between 0 and 2. All three depend on the streams at the token (section 4 of the paper).

    Args:
        mhc_num_streams (`int`, *optional*, defaults to 4):
            Number of residual streams, from 2 to 64.
        mhc_sinkhorn_iters (`int`, *optional*, defaults to 20):
            Number of iterations, at most 1000, each of which divides by the sums of the rows and by those of the
            columns.
        mhc_sinkhorn_order (`str`, *optional*, defaults to `"columns_first"`):
            Which of the two comes first in each iteration. `"columns_first"` is the paper's, after which each new
            stream is an average of the old ones; the weights released with arXiv 2606.05014 need `"rows_first"`.
        mhc_alpha_init (`float`, *optional*, defaults to 0.01):
            What the factors start at by which the part of the maps that depends on the streams is multiplied.

    ```python
    >>> from depthmix import MHCOlmo2Config

    >>> config = MHCOlmo2Config(mhc_num_streams=2)
    >>> config.model_type, config.mhc_sinkhorn_order
    ('mhc_olmo2', 'columns_first')
    ```
    """

    shape_fields = ("mhc_num_streams",)
    start_fields = ("mhc_alpha_init",)

    mhc_num_streams: int = field(default=4, metadata={"help": "number of residual streams"})
    mhc_sinkhorn_iters: int = field(default=20, metadata={"help": "number of Sinkhorn iterations"})
    mhc_sinkhorn_order: Literal["columns_first", "rows_first"] = field(
        default="columns_first", metadata={"help": "by which sums an iteration divides first"}
    )
    mhc_alpha_init: float | int = 0.01

    def validate_depth_mixing(self):
        """Part of the `@strict` validation, which runs on construction and before saving."""
        super().validate_depth_mixing()
        if self.mhc_num_streams < 2:
            raise ValueError(
                f"mhc_num_streams={self.mhc_num_streams}: must be at least 2; with one stream there is nothing to mix."
            )
        check_count("mhc_num_streams", self.mhc_num_streams, most=_MAX_STREAMS)
        if self.mhc_sinkhorn_iters < 1:
            raise ValueError(f"mhc_sinkhorn_iters={self.mhc_sinkhorn_iters}: must be a positive number of iterations.")
        check_count("mhc_sinkhorn_iters", self.mhc_sinkhorn_iters, most=_MAX_SINKHORN_ITERS)
        check_number("mhc_alpha_init", self.mhc_alpha_init)

    def ineffective_values(self):
        if self.mhc_alpha_init == 0:
            yield (
                "mhc_alpha_init=0: in a new model neither these factors nor the projection, which starts at zero, "
                "ever have a gradient, so that its maps stay constants."
            )


CONFIGURATIONS = ConfigurationClasses(
    __name__,
    prefix="MHC",
    model_type="mhc",
    fields=MHCFields,
    backbones=(
        "dense",
        "mistral",
        "smollm3",
        "olmo2",
        "olmo3",
        "qwen3_moe",
        "olmoe",
        "kimi_linear",
    ),
)
__getattr__ = CONFIGURATIONS.module_getattr()
__all__ = ["CONFIGURATIONS", "MHCFields"]
