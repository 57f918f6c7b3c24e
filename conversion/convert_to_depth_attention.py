# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Conversion to Depth-Attention: from the stock models, and from the released weights and their vanilla control, which
become Qwen3 with Depth-Attention.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from depthmix.configuration.configuration_depth_attention import CONFIGURATIONS
from depthmix.configuration.depth_backbones import BACKBONES

from .conversion_target import AcceptedSource, ConversionTarget, TranslatedConfig
from .errors import ConversionError
from .source_configs import build_config, carried_fields, check_llama, read_stock
from .source_layouts import NO_SOFTMAX, common_refusals, read_switch
from .vanilla_sources import SAME_FUNCTION, FunctionNote, MethodSources
from .weight_maps import RELEASED_LLAMA


_REFUSED_KEYS = ("mlp_bias", "scale_embeds", "no_residual", "use_p2n")


def vanilla_note(config: PreTrainedConfig) -> FunctionNote:
    """Whether the function of a vanilla source is kept."""
    if config.num_loops > 1:
        several = (
            "The converted model runs the layers of the vanilla checkpoint several times. Fine-tune it before use."
        )
        return FunctionNote(False, several)
    if not any(config.depth_sources):
        return FunctionNote(True, f"Mixing over depth is off. {SAME_FUNCTION}.")
    if config.depth_gate:
        return FunctionNote(True, f"{SAME_FUNCTION}: the gates of its mixing are closed, and training opens them.")
    return FunctionNote(
        False,
        "The converted model computes another function than the vanilla checkpoint: mixing over depth has no "
        "parameters that could switch it off at the start. Fine-tune it before use. With depth_gate=True it has, and "
        "with depth_stride=0 and key_norm_position='before_rope' it is exactly the vanilla model.",
    )


def retrofit_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Gates, where anything is mixed."""
    return {} if options.get("depth_stride") == 0 else {"depth_gate": True}


def gate_values(start: float, config: PreTrainedConfig) -> "dict[str, Callable[[], torch.Tensor]]":
    """The gates of every layer that mixes, if it has them: closed at 0, or open at 1."""
    if not config.depth_gate:
        return {}
    # not at the top: `inspect` needs no torch
    from depthmix.modeling.modeling_depth_attention import mixing_layers

    make = partial(torch.full, (config.num_key_value_heads,), start)
    return {f"model.layers.{i}.self_attn.depth_gate.weight": make for i in sorted(mixing_layers(config))}


def from_released_depth_attention(source: dict[str, Any], options: dict[str, Any]) -> TranslatedConfig:
    """The stride, the window and the order of key norm and rotation are those that the released code runs with."""
    for key in ("cross_layer_pattern", "cross_layer_mode"):
        if source.get(key) not in (None, "depth_softmax", "depth_attention"):
            raise ConversionError(
                f"{key} is {source[key]!r}, an experimental variant that computes something else. Only depth_softmax "
                "and depth_attention convert."
            )
    warnings = []
    if read_switch(source, "recurrent_model") is False:
        if "depth_stride" not in options:
            raise ConversionError(
                "recurrent_model is false: the code of that time would have run this checkpoint without mixing, later "
                "code with it. Say which: pass depth_stride=0 for no mixing, or the stride it was trained with."
            )
        warnings.append("recurrent_model is false in the source, so the code of that time ran it without mixing.")
    if source.get("layer_kv_reuse_map"):
        warnings.append("layer_kv_reuse_map was ignored: it has no effect where Depth-Attention is on.")

    stride, differing = _aliased(source, "depth_attention_stride", "depth_softmax_stride", default=1)
    window, differing_window = _aliased(source, "depth_attention_recent_window", "depth_recent_window", default=0)
    warnings += differing + differing_window
    # the released code takes 0 and less for "every earlier layer" and "no window"
    return _from_llama(source, options, {"depth_stride": max(stride, 1), "depth_window": max(window, 0)}, warnings)


def from_released_qk_norm(source: dict[str, Any], options: dict[str, Any]) -> TranslatedConfig:
    """The vanilla control of the release: the same model without mixing."""
    warnings = []
    if "use_qk_norm" not in source and "key_norm_position" not in options:
        warnings.append(
            "The config does not say that it comes from the Depth-Attention release, only the q/k norms do. If its "
            "code normalises the key before the rotation, pass key_norm_position='before_rope'."
        )
    return _from_llama(source, options, {"depth_stride": 0, "depth_window": 0}, warnings)


def _from_llama(
    source: dict[str, Any], options: dict[str, Any], trained: dict[str, Any], warnings: list[str]
) -> TranslatedConfig:
    problems = []
    if read_switch(source, "use_qk_norm") is False:
        problems.append("use_qk_norm is false: DepthQwen3 always normalises queries and keys")
    check_llama(source, "DepthQwen3", _REFUSED_KEYS, problems)

    trained = {**trained, "key_norm_position": "after_rope", "num_loops": 1, "depth_gate": False}
    stock_config = read_stock(LlamaConfig, source)
    carried = carried_fields(stock_config, Qwen3Config)
    config_class = CONFIGURATIONS.of(BACKBONES["qwen3"])
    as_trained = build_config(config_class, {**carried, **trained})
    config = build_config(config_class, {**carried, **trained, **options})
    changed = {key: value for key, value in options.items() if value != trained[key]}
    warnings += [
        f"{key}={value!r} as asked; the source was trained with {trained[key]!r}." for key, value in changed.items()
    ]
    warnings += window_warnings(config, options)
    # not every other value makes a difference: a window without mixing does not
    if (config.depth_sources, config.key_norm_position) != (as_trained.depth_sources, as_trained.key_norm_position):
        note = f"The converted model computes another function than the source, because of {', '.join(changed)}."
    else:
        note = "The converted model computes what the source computes without a cache and without padding."
    return TranslatedConfig(config, stock_config, note, tuple(warnings))


def _aliased(source: dict[str, Any], key: str, older_key: str, default: int) -> tuple[int, list[str]]:
    """The value of a field that was renamed, and a warning if both names are there with different values."""
    found = [(name, source[name]) for name in (key, older_key) if name in source] or [(key, default)]
    for name, value in found:
        if type(value) is not int:
            raise ConversionError(f"{name} is {value!r}, must be an integer.")
    value = found[0][1]
    if any(other != value for _, other in found):
        return value, [
            f"{key} is {value} but {older_key} is {found[1][1]}; {key} was followed, as the later code does."
        ]
    return value, []


def window_warnings(config: PreTrainedConfig, options: dict[str, Any]) -> list[str]:
    """What has no effect."""
    if config.depth_stride == 0 and config.depth_window > 0:
        return [f"depth_window={config.depth_window} has no effect: depth_stride=0 switches the mixing off."]
    return []


_SOURCES = MethodSources(
    CONFIGURATIONS,
    "Depth-Attention",
    vanilla_note,
    retrofit_fields,
    partial(gate_values, 0.0),
    remarks=window_warnings,
)

TARGET = ConversionTarget(
    name="depth_attention",
    configurations=CONFIGURATIONS,
    sources=_SOURCES.vanilla_sources()
    | {
        "released_depth_attention": AcceptedSource(
            from_released_depth_attention, RELEASED_LLAMA, partial(gate_values, 1.0)
        ),
        "released_qk_norm": AcceptedSource(from_released_qk_norm, RELEASED_LLAMA, partial(gate_values, 0.0)),
    },
    refusals=common_refusals("depth_attention", "Depth-Attention", "Depth-Attention") | NO_SOFTMAX,
    summary=(
        "It is a decoder with Depth-Attention (arXiv 2606.05014): a layer mixes its values with those of earlier "
        "layers at the same token, and has no additional parameters for it but gates, if it was converted with them."
    ),
    tags=("depthmix", "depth-attention"),
)
