# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Names of tensors in a source and in a target, as data that is read in both directions."""

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class WeightMap:
    """
    How the tensor names of a source become those of a target.

    Args:
        renames (`tuple` of pairs of `str`):
            Source and target name. `{layer}` in both stands for the same layer index, `{rest}` for any text. Every
            other name is kept.
        dropped (`tuple` of `str`):
            Source names, of the same form, that the target has no use for. They may be absent.
    """

    renames: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()

    def to_target(self, name: str) -> str | None:
        """The target's name for a source tensor; None for one that is dropped."""
        return None if any(_match(pattern, name) for pattern in self.dropped) else _rename(name, self.renames)

    def to_source(self, name: str) -> str:
        """The source's name for a target tensor."""
        return _rename(name, tuple((target, source) for source, target in self.renames))


def _rename(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    for old, new in renames:
        if match := _match(old, name):
            return new.format(**match.groupdict())
    return name


def _match(pattern: str, name: str) -> re.Match | None:
    return _compiled(pattern).fullmatch(name)


# a checkpoint with many experts has a hundred thousand names, each of which is compared with each pattern
@cache
def _compiled(pattern: str) -> re.Pattern:
    expression = re.escape(pattern)
    for placeholder, matched in (("{layer}", r"(?P<layer>\d+)"), ("{rest}", r"(?P<rest>.+)")):
        expression = expression.replace(re.escape(placeholder), matched)
    return re.compile(expression)


# buffers that old versions of transformers saved; they are computed from the config
_ROTARY_BUFFERS = ("layers.{layer}.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")
_PREFIXED_ROTARY_BUFFERS = tuple(f"model.{name}" for name in _ROTARY_BUFFERS)

CAUSAL_LM = WeightMap(dropped=_PREFIXED_ROTARY_BUFFERS)
BASE_MODEL = WeightMap(
    renames=tuple((name, f"model.{name}") for name in ("embed_tokens.{rest}", "layers.{rest}", "norm.{rest}")),
    dropped=_ROTARY_BUFFERS,
)
# the release saves a norm that its forward never applies
RELEASED_LLAMA = WeightMap(dropped=("lm_head_layernorm.weight", *_PREFIXED_ROTARY_BUFFERS))
RELEASED_DENSEFORMER = WeightMap(
    renames=(("model.densetransformer_dwa.alphas.{layer}", "model.layers.{layer}.depth_average.weight"),),
    dropped=RELEASED_LLAMA.dropped,
)
# a module of the paper's code, which a model may hold at either place
DWA_MODULES = WeightMap(
    renames=tuple(
        (f"{prefix}dwa_modules.alphas.{{layer}}.weight", "model.layers.{layer}.depth_average.weight")
        for prefix in ("model.", "")
    ),
    dropped=CAUSAL_LM.dropped,
)
RELEASED_MHC = WeightMap(
    renames=(
        *(
            (
                f"model.layers.{{layer}}.{site}_residual_connector.{old}",
                f"model.layers.{{layer}}.{site}_connection.{new}",
            )
            for site in ("attn", "mlp")
            for old, new in (
                ("mhc_input_norm.weight", "norm_weight"),
                ("mhc_dynamic_projection.weight", "projection"),
                ("alpha_res", "alpha_residual"),
                ("{rest}", "{rest}"),
            )
        ),
        ("model.residual_stream_projector.reduce_logits", "model.stream_readout.logits"),
    ),
    dropped=RELEASED_LLAMA.dropped,
)
RELEASED_ATTNRES = WeightMap(
    renames=(
        ("model.layers.{layer}.attnres_attn_aggregator.{rest}", "model.layers.{layer}.attn_mixer.{rest}"),
        ("model.layers.{layer}.attnres_mlp_aggregator.{rest}", "model.layers.{layer}.mlp_mixer.{rest}"),
        ("model.attnres_final_aggregator.{rest}", "model.output_mixer.{rest}"),
    ),
    dropped=RELEASED_LLAMA.dropped,
)
