# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Configuration of the dense decoder with depth-weighted averages (DenseFormer, arXiv 2402.02622)."""

from huggingface_hub.dataclasses import strict

from .configuration_dense_decoder import DenseDecoderConfig
from .configuration_depth_common import check_decoder_shape


@strict
class DenseFormerConfig(DenseDecoderConfig):
    r"""
    Configuration of [`DenseFormerModel`]: every field of [`DenseDecoderConfig`], and the following.

    After a decoder layer the hidden states are replaced by an average of the embedding and of the outputs of this and
    all earlier layers, whose weights are learned numbers: they do not depend on the input and are not normalised. At
    the start it is the layer's own output, so that the model is the vanilla decoder (section 3 of the paper).

    Args:
        dwa_dilation (`int`, *optional*, defaults to 1):
            An average reads every so-manieth of them, the layer's own output among them.
        dwa_period (`int`, *optional*, defaults to 1):
            There is an average after every so-manieth layer.

    Raises:
        `huggingface_hub.errors.StrictDataclassError`: for a value of the wrong type or out of range; the message names
            the field, the value and the rule. (`ValueError` from the model, for one that was set later.)

    ```python
    >>> from depthmix import DenseFormerConfig

    >>> DenseFormerConfig(num_hidden_layers=4, dwa_dilation=2).average_sources
    ((1,), (0, 2), (1, 3), (0, 2, 4))
    ```
    """

    model_type = "denseformer"

    dwa_dilation: int = 1
    dwa_period: int = 1

    def validate_depth_mixing(self):
        """Part of the `@strict` validation, which runs on construction and before saving."""
        check_decoder_shape(self)
        for field in ("dwa_dilation", "dwa_period"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}: must be a positive number of layers.")

    @property
    def average_sources(self) -> tuple[tuple[int, ...], ...]:
        """
        For each layer, what the average after it reads, ascending: 0 is the embedding and `i` the output of the
        `i`-th layer, so that the layer's own is last. Empty where there is no average.
        """
        # fields may have changed since, without validation: `from_pretrained(path, dwa_period=...)` sets them late
        self.validate_depth_mixing()
        return tuple(
            () if own % self.dwa_period else tuple(range(own % self.dwa_dilation, own + 1, self.dwa_dilation))
            for own in range(1, self.num_hidden_layers + 1)
        )


__all__ = ["DenseFormerConfig"]
