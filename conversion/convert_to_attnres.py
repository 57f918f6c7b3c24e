# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Conversion to AttnRes: from Qwen3, Qwen2 and Llama, and from the released AttnRes weights and their vanilla control.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from depthmix.configuration.configuration_attnres import AttnResConfig
from depthmix.modeling.modeling_attnres import AttnResForCausalLM, AttnResMixer

from .conversion_target import AcceptedSource, ConversionTarget, TranslatedConfig
from .errors import ConversionError
from .source_configs import build_config, carried_fields, check_vanilla, read_stock
from .source_layouts import read_switch
from .weight_maps import BASE_MODEL, CAUSAL_LM, RELEASED_ATTNRES, RELEASED_LLAMA


OPTIONS = ("attnres_variant", "attnres_block_size", "attnres_recency_bias", "attnres_scale", "key_norm_position")

# the backbone's fields that a stock configuration does not have, because its model knows one value only
_QWEN3 = {"use_qk_norm": True}
_QWEN2 = {"use_qk_norm": False, "attention_bias": True, "attention_output_bias": False}
_LLAMA = {"use_qk_norm": False}

# field of a Llama config -> why a value other than false, null, 0 or absent changes the function
_LLAMA_REFUSALS = {
    "scale_embeds": "AttnRes does not scale its embeddings",
    "use_p2n": "AttnRes runs its layers once",
}


def from_vanilla(
    config_class: type[PreTrainedConfig], backbone: dict[str, Any], source: dict[str, Any], options: dict[str, Any]
) -> TranslatedConfig:
    """Every field is carried; the mixing starts at zero queries, and with the scale "sum" as the vanilla model."""
    warnings = check_vanilla(source, config_class.__name__.removesuffix("Config"))
    return _from_vanilla(config_class, backbone, source, options, warnings)


def from_released_qk_norm(source: dict[str, Any], options: dict[str, Any]) -> TranslatedConfig:
    """The vanilla control of the release: a Llama with q/k norms."""
    backbone = _released_backbone(source)
    return _from_vanilla(LlamaConfig, backbone, source, options, _key_norm_warnings(backbone, options))


def from_released_attnres(variant: str, source: dict[str, Any], options: dict[str, Any]) -> TranslatedConfig:
    """The variant is known from the tensors; the block size and the start of the bias are in the config."""
    _check_llama(source)
    backbone = _released_backbone(source)
    warnings = _key_norm_warnings(backbone, options)
    size = source.get("attnres_block_size", 12)
    if type(size) is not int or size < 1:
        raise ConversionError(f"attnres_block_size is {size!r}, must be a positive integer.")
    trained = {
        **backbone,
        "attnres_variant": variant,
        # the released code takes snapshots between layers of two sub-layers
        "attnres_block_size": size + size % 2 if variant == "cumulative" else size,
        "attnres_recency_bias": variant == "cumulative",
        "attnres_recency_bias_init": source.get("attnres_recency_bias_init", 3.0),
        "attnres_scale": "mean",
    }
    stock_config = read_stock(LlamaConfig, source)
    config = _attnres_config({**carried_fields(stock_config, AttnResConfig), **trained, **options})
    changed = [key for key, value in options.items() if value != trained[key]]
    warnings += [f"{key}={options[key]!r} as asked; the released code runs with {trained[key]!r}." for key in changed]
    if changed:
        note = f"The converted model computes another function than the released code: {', '.join(changed)}."
    else:
        note = "The converted model computes what the released code computes, with mixes in fp32, which that rounds."
    return TranslatedConfig(config, stock_config, note, tuple(warnings))


def start_values(config: AttnResConfig) -> dict[str, Callable[[], torch.Tensor]]:
    """The parameters of every mixer of a model that was just built."""
    mixer = AttnResMixer(config).state_dict()
    layers = range(config.num_hidden_layers)
    names = [f"model.layers.{i}.{site}_mixer" for i in layers for site in ("attn", "mlp")]
    names.append("model.output_mixer")
    return {f"{name}.{key}": partial(mixer.get, key) for name in names for key in mixer}


def _from_vanilla(
    config_class: type[PreTrainedConfig],
    backbone: dict[str, Any],
    source: dict[str, Any],
    options: dict[str, Any],
    warnings: list[str],
) -> TranslatedConfig:
    if config_class is LlamaConfig:
        _check_llama(source)
    stock_config = read_stock(config_class, source)
    carried = carried_fields(stock_config, AttnResConfig)
    # Qwen2's configuration has no such field, though its model reads it where it is set
    head_dim = getattr(stock_config, "head_dim", None) or stock_config.hidden_size // stock_config.num_attention_heads
    scale = "mean" if options.get("attnres_variant") == "cumulative" else "sum"
    trained_position = backbone.get("key_norm_position", "before_rope")
    config = _attnres_config({**carried, "head_dim": head_dim, **backbone, "attnres_scale": scale, **options})

    reorders = config.use_qk_norm and config.key_norm_position != trained_position
    if reorders:
        warnings.append(
            f"key_norm_position={config.key_norm_position!r} as asked; the source was trained with "
            f"{trained_position!r}."
        )
    elif not config.use_qk_norm and "key_norm_position" in options:
        warnings.append(f"key_norm_position={config.key_norm_position!r} has no effect: the source has no q/k norms.")
    if reorders or config.attnres_variant == "cumulative":
        note = "The converted model computes another function than the vanilla checkpoint. Fine-tune it before use."
    elif config.attnres_scale == "sum":
        note = (
            "The converted model computes what the vanilla checkpoint does, up to rounding: its pseudo-queries are "
            "zero, and then the mix is the plain sum of the sources."
        )
    else:
        note = (
            "The converted model computes nearly what the vanilla checkpoint does: its pseudo-queries are zero, and "
            "then the mix is the average of the sources, from which the sum that the vanilla model has differs by a "
            "factor. The norms undo it, up to their epsilon. With attnres_scale='sum' nothing changes."
        )
    return TranslatedConfig(config, stock_config, note, tuple(warnings))


def _released_backbone(source: dict[str, Any]) -> dict[str, Any]:
    # the released code takes an absent switch for true
    return {"use_qk_norm": read_switch(source, "use_qk_norm") is not False, "key_norm_position": "after_rope"}


def _key_norm_warnings(backbone: dict[str, Any], options: dict[str, Any]) -> list[str]:
    if "key_norm_position" in options or not backbone["use_qk_norm"]:
        return []
    # the recipes name a kernel that does it before, but the same recipe for Depth-Attention cannot have run with it
    return [
        "The release does not say whether its training normalised the keys before or after the rotation; its code "
        "does it after unless told otherwise. Compare the perplexity with that of key_norm_position='before_rope', "
        "and keep the better one."
    ]


def _check_llama(source: dict[str, Any]) -> None:
    problems = [f"{key} is {source[key]!r}: {why}" for key, why in _LLAMA_REFUSALS.items() if source.get(key)]
    if source.get("pretraining_tp") not in (None, 0, 1):
        problems.append(f"pretraining_tp is {source['pretraining_tp']!r}: only 1 computes what AttnRes computes")
    if problems:
        raise ConversionError(f"AttnRes cannot represent this checkpoint exactly: {'; '.join(problems)}.")


def _attnres_config(values: dict[str, Any]) -> AttnResConfig:
    return build_config(AttnResConfig, AttnResForCausalLM, values)


TARGET = ConversionTarget(
    name=AttnResConfig.model_type,
    model_class=AttnResForCausalLM,
    options=OPTIONS,
    sources={
        **{
            f"{name}{suffix}": AcceptedSource(partial(from_vanilla, config_class, backbone), weight_map, start_values)
            for name, config_class, backbone in (
                ("qwen3", Qwen3Config, _QWEN3),
                ("qwen2", Qwen2Config, _QWEN2),
                ("llama", LlamaConfig, _LLAMA),
            )
            for suffix, weight_map in (("", CAUSAL_LM), ("_base", BASE_MODEL))
        },
        "released_qk_norm": AcceptedSource(from_released_qk_norm, RELEASED_LLAMA, start_values),
        "released_attnres": AcceptedSource(partial(from_released_attnres, "cumulative"), RELEASED_ATTNRES),
        "released_attnres_block": AcceptedSource(partial(from_released_attnres, "block"), RELEASED_ATTNRES),
    },
    refusals={
        "attnres": "It already is what it would become: load it as it is.",
        "released_depth_attention": "It does not compute Attention Residuals. Convert it to depth_qwen3.",
        "released_experiment": "It does not compute Attention Residuals. Use the released AttnRes weights.",
        "qwen3_p2n": "It runs its layers several times per token. Use a plain Qwen3 checkpoint.",
        "released_denseformer": "DenseFormer is not supported by this version of depthmix.",
        "released_mhc": "mHC is not supported by this version of depthmix.",
        "attention_residuals": "This form of Attention Residuals is not supported by this version of depthmix.",
    },
    summary=(
        "AttnRes is a dense decoder with Attention Residuals (arXiv 2603.15031): a sub-layer reads a mix of earlier "
        "sub-layers' outputs, weighted by a softmax over depth, in place of their sum."
    ),
    tags=("depthmix", "attention-residuals"),
)
