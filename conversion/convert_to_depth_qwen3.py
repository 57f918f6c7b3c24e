# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Conversion to DepthQwen3: from Qwen3, and from the released Depth-Attention weights and their vanilla control."""

from typing import Any

from transformers import LlamaConfig, Qwen3Config

from depthmix.configuration.configuration_depth_attention import DepthQwen3Config
from depthmix.modeling.modeling_depth_attention import DepthQwen3ForCausalLM

from .conversion_target import AcceptedSource, ConversionTarget, TranslatedConfig
from .errors import ConversionError
from .source_configs import all_fields, build_config, carried_fields, check_llama, check_vanilla, read_stock
from .source_layouts import common_refusals, read_switch
from .weight_maps import BASE_MODEL, CAUSAL_LM, RELEASED_LLAMA


OPTIONS = ("depth_stride", "depth_window", "key_norm_position", "num_loops")

_REFUSED_KEYS = ("mlp_bias", "scale_embeds", "no_residual", "use_p2n")


def from_qwen3(source: dict[str, Any], options: dict[str, Any]) -> TranslatedConfig:
    """Every field is carried; the fields of the mixing come from the options, or are this package's defaults."""
    warnings = check_vanilla(source, "Qwen3")
    config = _depth_config({**all_fields(Qwen3Config, source), **options})
    warnings += _window_warnings(config)
    if config.key_norm_position != "before_rope":
        warnings.append(
            f"key_norm_position={config.key_norm_position!r}: Qwen3 weights are trained with 'before_rope'."
        )
    if config.num_loops > 1:
        note = "The converted model runs the layers of the vanilla checkpoint several times. Fine-tune it before use."
    elif any(config.depth_sources) or config.key_norm_position != "before_rope":
        note = (
            "The converted model computes another function than the vanilla checkpoint: mixing over depth has no "
            "parameters that could switch it off at the start. Fine-tune it before use. With depth_stride=0 and "
            "key_norm_position='before_rope' it is exactly the vanilla model."
        )
    else:
        note = "Mixing over depth is off: the converted model computes exactly what the vanilla checkpoint does."
    return TranslatedConfig(config, read_stock(Qwen3Config, source), note, tuple(warnings))


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

    trained = {**trained, "key_norm_position": "after_rope", "num_loops": 1}
    stock_config = read_stock(LlamaConfig, source)
    carried = carried_fields(stock_config, Qwen3Config)
    as_trained = _depth_config({**carried, **trained})
    config = _depth_config({**carried, **trained, **options})
    changed = {key: value for key, value in options.items() if value != trained[key]}
    warnings += [
        f"{key}={value!r} as asked; the source was trained with {trained[key]!r}." for key, value in changed.items()
    ]
    warnings += _window_warnings(config)
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


def _window_warnings(config: DepthQwen3Config) -> list[str]:
    if config.depth_stride == 0 and config.depth_window > 0:
        return [f"depth_window={config.depth_window} has no effect: depth_stride=0 switches the mixing off."]
    return []


def _depth_config(values: dict[str, Any]) -> DepthQwen3Config:
    return build_config(DepthQwen3Config, DepthQwen3ForCausalLM, values)


TARGET = ConversionTarget(
    name=DepthQwen3Config.model_type,
    model_class=DepthQwen3ForCausalLM,
    options=OPTIONS,
    sources={
        "qwen3": AcceptedSource(from_qwen3, CAUSAL_LM),
        "qwen3_base": AcceptedSource(from_qwen3, BASE_MODEL),
        "released_depth_attention": AcceptedSource(from_released_depth_attention, RELEASED_LLAMA),
        "released_qk_norm": AcceptedSource(from_released_qk_norm, RELEASED_LLAMA),
    },
    refusals=common_refusals("depth_qwen3", "Depth-Attention", "Depth-Attention")
    | {
        "depth_qwen3": (
            "It already is what it would become: load it as it is, or with another stride, "
            "`from_pretrained(path, depth_stride=...)`."
        ),
        **dict.fromkeys(
            ("llama", "llama_base", "qwen2", "qwen2_base"),
            "It has no q/k norms, and DepthQwen3 normalises queries and keys in every layer, which no choice of norm "
            "weights undoes. Use a Qwen3 checkpoint of that size.",
        ),
    },
    summary=(
        "DepthQwen3 is Qwen3 with Depth-Attention (arXiv 2606.05014): a layer mixes its values with those of earlier "
        "layers at the same token, and has no additional parameters for it."
    ),
    tags=("depthmix", "depth-attention"),
)
