# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Configuration of the dense decoder with manifold-constrained hyper-connections (mHC, arXiv 2512.24880)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_dense_decoder import DenseDecoderConfig
from .configuration_depth_common import check_count, check_decoder_shape, check_number


# the parameters of a layer grow with the cube of the streams, and each iteration is a step of its own in every layer
_MAX_STREAMS = 64
_MAX_SINKHORN_ITERS = 1000


@strict
class MHCConfig(DenseDecoderConfig):
    r"""
    Configuration of [`MHCModel`]: every field of [`DenseDecoderConfig`], and the following.

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

    Raises:
        `huggingface_hub.errors.StrictDataclassError`: for a value of the wrong type or out of range; the message names
            the field, the value and the rule. (`ValueError` from the model, for one that was set later.)
    """

    model_type = "mhc"

    mhc_num_streams: int = 4
    mhc_sinkhorn_iters: int = 20
    mhc_sinkhorn_order: Literal["columns_first", "rows_first"] = "columns_first"
    mhc_alpha_init: float | int = 0.01

    def validate_depth_mixing(self):
        """Part of the `@strict` validation, which runs on construction and before saving."""
        check_decoder_shape(self)
        if self.mhc_num_streams < 2:
            raise ValueError(
                f"mhc_num_streams={self.mhc_num_streams}: must be at least 2; with one stream there is nothing to mix."
            )
        check_count("mhc_num_streams", self.mhc_num_streams, most=_MAX_STREAMS)
        if self.mhc_sinkhorn_iters < 1:
            raise ValueError(f"mhc_sinkhorn_iters={self.mhc_sinkhorn_iters}: must be a positive number of iterations.")
        check_count("mhc_sinkhorn_iters", self.mhc_sinkhorn_iters, most=_MAX_SINKHORN_ITERS)
        check_number("mhc_alpha_init", self.mhc_alpha_init)


__all__ = ["MHCConfig"]
