# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Recognises what a checkpoint is, from its config.json and the names of its tensors.

`LAYOUTS` is tried in order and the first layout with any evidence is taken. Most released research checkpoints say
`model_type: llama` and differ only in keys that stock Llama does not know, so those come before Llama itself.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from depthmix.configuration.depth_backbones import BACKBONES
from depthmix.families import FAMILIES
from depthmix.hub import OWN_MARK

from .errors import ConversionError


Evidence = list[str]
RecogniseFn = Callable[[dict[str, Any], Collection[str]], Evidence]


@dataclass(frozen=True)
class SourceLayout:
    """
    A kind of checkpoint.

    Args:
        name (`str`):
            Short name, by which targets say that they accept it.
        title (`str`):
            What it is called in messages.
        recognise (`Callable`):
            Takes the content of config.json and the tensor names, returns what speaks for this layout. Nothing if it
            is another one.
    """

    name: str
    title: str
    recognise: RecogniseFn


def recognise_layout(config: dict[str, Any], tensor_names: Collection[str]) -> tuple[SourceLayout, Evidence]:
    """
    The layout of a checkpoint and what speaks for it; `UNKNOWN_LAYOUT` if it is none of them.

    Raises:
        [`ConversionError`]: if the config contradicts itself or the tensors, or a switch in it is not true or false.
    """
    for layout in LAYOUTS:
        if evidence := layout.recognise(config, tensor_names):
            return layout, evidence
    model_type = config.get("model_type")
    known = f"model_type is {model_type!r}"
    if isinstance(model_type, str) and model_type in FAMILIES:
        known += f", without {OWN_MARK}, which every model of depthmix has"
    return UNKNOWN_LAYOUT, [known]


def read_switch(config: dict[str, Any], key: str) -> bool | None:
    """
    A field that turns something on or off; None if it is absent or null.

    Raises:
        [`ConversionError`]: for any other value, which would otherwise pass for one of the three.
    """
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise ConversionError(f"{key} is {value!r} in config.json, must be true, false, null or absent.")
    return value


def _model_type(model_type: str) -> RecogniseFn:
    def recognise(config, tensor_names):
        return [f"model_type is {model_type!r}"] if config.get("model_type") == model_type else []

    return recognise


def _own(model_type: str) -> RecogniseFn:
    def recognise(config, tensor_names):
        # others' models may have the same type
        return _model_type(model_type)(config, tensor_names) if OWN_MARK in config else []

    return recognise


# released baseline -> its title, its spellings in the config, and what occurs in its tensor names only
_RELEASED_BASELINES = {
    "released_attnres": (
        "the released AttnRes baseline",
        ("attnres", "block_attnres", "block-attnres", "attention_residual", "attention-residual"),
        "attnres_attn_aggregator.",
    ),
    "released_denseformer": (
        "the released DenseFormer baseline",
        ("denseformer", "densetransformer"),
        "densetransformer_dwa.",
    ),
    "released_mhc": ("the released mHC baseline", ("mhc",), "attn_residual_connector."),
}


def _released_baseline(name: str) -> RecogniseFn:
    def recognise(config, tensor_names):
        if config.get("model_type") != "llama":
            return []
        mode = _baseline_mode(config)
        by_config = [key for key, (_, spellings, _) in _RELEASED_BASELINES.items() if mode in spellings]
        by_tensors = [
            key
            for key, (*_, mark) in _RELEASED_BASELINES.items()
            if any(mark in tensor_name for tensor_name in tensor_names)
        ]
        if by_config and by_tensors and by_config != by_tensors:
            raise ConversionError(
                f"config.json says baseline_mode {mode!r}, but the tensors are those of "
                f"{', '.join(_RELEASED_BASELINES[key][0] for key in by_tensors)}."
            )
        evidence = [f"baseline_mode is {mode!r}"] if name in by_config else []
        if name in by_tensors:
            evidence.append(f"tensors named `{_RELEASED_BASELINES[name][-1]}`")
        return evidence

    return recognise


def _attnres_without_bias(config, tensor_names):
    evidence = _released_baseline("released_attnres")(config, tensor_names)
    if not evidence or any(name.endswith("_aggregator.recency_bias") for name in tensor_names):
        return []
    return [*evidence, "no tensors named `recency_bias`"]


def _baseline_mode(config: dict[str, Any]) -> str | None:
    modes = {}
    for key in ("baseline_mode", "residual_baseline"):
        text = str(config.get(key) or "").strip().lower()
        if text not in ("", "none", "null", "false"):
            modes[key] = text
    if len(set(modes.values())) > 1:
        raise ConversionError(f"config.json contradicts itself: {modes}.")
    return next(iter(modes.values()), None)


def _other_attention_residuals(config, tensor_names):
    evidence = [
        f"{key} is set" for key in ("attn_res_block_size", "attnres_num_blocks") if config.get(key) is not None
    ]
    return evidence + _model_type("qwen3_attnres")(config, tensor_names)


def _released_depth_attention(config, tensor_names):
    if config.get("model_type") != "llama":
        return []
    evidence = []
    if read_switch(config, "use_depth_attention"):
        evidence.append("use_depth_attention is true")
    if config.get("cross_layer_pattern") in ("depth_attention", "depth_softmax"):
        evidence.append(f"cross_layer_pattern is {config['cross_layer_pattern']!r}")
    return evidence


def _released_experiment(config, tensor_names):
    if config.get("model_type") != "llama":
        return []
    evidence = [f"{key} is set" for key in ("layer_kv_reuse_map", "no_residual") if config.get(key)]
    if config.get("cross_layer_pattern"):
        evidence.append(f"cross_layer_pattern is {config['cross_layer_pattern']!r}")
    if mode := _baseline_mode(config):
        evidence.append(f"baseline_mode is {mode!r}")
    return evidence


def _released_qk_norm(config, tensor_names):
    if config.get("model_type") != "llama":
        return []
    evidence = ["use_qk_norm is true"] if read_switch(config, "use_qk_norm") else []
    # a config without the key decides nothing: the release takes that for true, and stock Llama has no such key
    if any(name.endswith(".self_attn.q_norm.weight") for name in tensor_names):
        evidence.append("tensors named `self_attn.q_norm`")
    return evidence


def _qwen3_shifted_passes(config, tensor_names):
    return ["use_p2n is true"] if config.get("model_type") == "qwen3" and config.get("use_p2n") else []


def _base_model(model_type: str) -> RecogniseFn:
    def recognise(config, tensor_names):
        evidence = _model_type(model_type)(config, tensor_names)
        is_base = evidence and "embed_tokens.weight" in tensor_names
        return [*evidence, "tensors named without `model.`"] if is_base else []

    return recognise


def _dwa_modules(model_type: str) -> RecogniseFn:
    """The module that the code of the DenseFormer paper adds to a model."""

    def recognise(config, tensor_names):
        evidence = _model_type(model_type)(config, tensor_names)
        has_averages = any("dwa_modules.alphas." in name for name in tensor_names)
        return [*evidence, "tensors named `dwa_modules.alphas`"] if evidence and has_averages else []

    return recognise


# where the checkpoints that compute something of their own belong
_HOMES = {
    "released_depth_attention": "depth_attention",
    "released_attnres": "attnres",
    "released_attnres_block": "attnres",
    "released_denseformer": "denseformer",
    "qwen3_dwa": "denseformer",
    "qwen2_dwa": "denseformer",
    "llama_dwa": "denseformer",
    "released_mhc": "mhc",
}
# why methods that work inside of the attention are not on Kimi Linear
NO_SOFTMAX = dict.fromkeys(
    ("kimi_linear", "kimi_linear_base"),
    "Its delta attention has no values that a softmax reads, and mixed values do not fit into the latents that its "
    "latent attention keeps: a cache of expanded keys and values would be 17.8 times as large. Attention Residuals, "
    "DenseFormer and mHC take it.",
)


def common_refusals(method: str, mixing: str, release: str) -> dict[str, str]:
    """
    Why a target does not take the layouts that have a way of mixing of their own, by layout.

    Args:
        method (`str`):
            Its name.
        mixing (`str`), release (`str`):
            What it computes, and what weights of it are called.
    """
    refusals = {
        layout: f"It does not compute {mixing}. Convert it to {home}."
        for layout, home in _HOMES.items()
        if home != method
    }
    for model_type, family in FAMILIES.items():
        if family.method == method:
            refusals[model_type] = (
                "It already is what it would become: load it as it is, with other values of its fields as keywords, "
                "`from_pretrained(path, ...)`."
            )
        else:
            refusals[model_type] = f"It does not compute {mixing}, but what {family.method} does: load it as it is."
    return refusals | {
        "released_experiment": f"It does not compute {mixing}. Use the released {release} weights.",
        "qwen3_p2n": "It runs its layers several times per token. Use a plain Qwen3 checkpoint.",
        "attention_residuals": "This form of Attention Residuals is not supported by this version of depthmix.",
    }


UNKNOWN_LAYOUT = SourceLayout("unknown", "a model that depthmix does not know", lambda config, tensor_names: [])

LAYOUTS = (
    *(SourceLayout(name, f"{family.prefix} (depthmix)", _own(name)) for name, family in FAMILIES.items()),
    SourceLayout("released_attnres_block", "the released code's AttnRes without recency bias", _attnres_without_bias),
    *(SourceLayout(name, title, _released_baseline(name)) for name, (title, *_) in _RELEASED_BASELINES.items()),
    SourceLayout("attention_residuals", "another form of Attention Residuals", _other_attention_residuals),
    SourceLayout("released_depth_attention", "the released Depth-Attention layout", _released_depth_attention),
    SourceLayout("released_experiment", "an experiment of the Depth-Attention code", _released_experiment),
    SourceLayout("released_qk_norm", "the released vanilla control with q/k norm", _released_qk_norm),
    SourceLayout("qwen3_p2n", "Qwen3 with several shifted passes (P2N)", _qwen3_shifted_passes),
    *(
        SourceLayout(name, title, recognise)
        for model_type, stock_name in (
            (name, backbone.title) for name, backbone in BACKBONES.items() if name != "dense"
        )
        for name, title, recognise in (
            (f"{model_type}_dwa", f"{stock_name} with DenseFormer's averages", _dwa_modules(model_type)),
            (f"{model_type}_base", f"{stock_name} with the tensor names of its base model", _base_model(model_type)),
            (model_type, stock_name, _model_type(model_type)),
        )
    ),
)
