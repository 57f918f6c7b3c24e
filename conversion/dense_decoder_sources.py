# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
What the targets on the dense decoder have in common: their vanilla sources Qwen3, Qwen2 and Llama, and how the
released weights, which all are Llamas, are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from .conversion_target import AcceptedSource, TranslatedConfig
from .source_configs import build_config, carried_fields, check_llama, check_vanilla, read_stock
from .source_layouts import read_switch
from .weight_maps import BASE_MODEL, CAUSAL_LM, RELEASED_LLAMA


# stock configuration, and the backbone's fields that it does not have, because its model knows one value only
STOCK = {
    "qwen3": (Qwen3Config, {"use_qk_norm": True}),
    "qwen2": (Qwen2Config, {"use_qk_norm": False, "attention_bias": True, "attention_output_bias": False}),
    "llama": (LlamaConfig, {"use_qk_norm": False}),
}


@dataclass(frozen=True)
class DenseDecoderTarget:
    """
    A family on the dense decoder as conversion sees it.

    Args:
        config_class, model_class (`type`):
            Its configuration and its model.
        name (`str`):
            What it is called in messages.
        vanilla_fields (`Callable`):
            Takes the options and returns the fields with which the function of a vanilla source is kept.
        vanilla_note (`Callable`):
            Takes the converted configuration and says whether it is kept.
        start_values (`Callable`):
            As `new_tensors` of [`AcceptedSource`].
        refused_keys (`tuple` of `str`):
            Keys of Llama configurations that it has no equivalent of.
    """

    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    name: str
    vanilla_fields: Callable[[dict[str, Any]], dict[str, Any]]
    vanilla_note: Callable[[PreTrainedConfig], str]
    start_values: Callable[[PreTrainedConfig], dict[str, torch.Tensor]]
    refused_keys: tuple[str, ...] = ("scale_embeds", "use_p2n")

    def vanilla_sources(self) -> dict[str, AcceptedSource]:
        """The stock models, under both kinds of tensor names, and the vanilla control of the release."""
        sources = {
            f"{name}{suffix}": AcceptedSource(partial(self._from_vanilla, *stock), weight_map, self.start_values)
            for name, stock in STOCK.items()
            for suffix, weight_map in (("", CAUSAL_LM), ("_base", BASE_MODEL))
        }
        return sources | {
            "released_qk_norm": AcceptedSource(self._from_released_qk_norm, RELEASED_LLAMA, self.start_values)
        }

    def from_released(
        self, own_fields: Callable[[dict[str, Any]], dict[str, Any]], source: dict[str, Any], options: dict[str, Any]
    ) -> TranslatedConfig:
        """Weights of the release, whose mixing is that of `own_fields(source)`."""
        backbone = _released_backbone(source)
        warnings = _key_norm_warnings(backbone, options)
        trained = {**backbone, **own_fields(source)}
        return self.from_trained(LlamaConfig, trained, "the released code", source, options, warnings)

    def from_trained(
        self,
        config_class: type[PreTrainedConfig],
        trained: dict[str, Any],
        origin: str,
        source: dict[str, Any],
        options: dict[str, Any],
        warnings: list[str],
    ) -> TranslatedConfig:
        """Weights that were trained with these fields, by the code that messages call `origin`."""
        stock_config, carried = self._read(config_class, source)
        config = self._config({**carried, **trained, **options})
        changed = [key for key, value in options.items() if value != trained[key]]
        warnings = [*warnings, *(f"{k}={options[k]!r} as asked; {origin} runs with {trained[k]!r}." for k in changed)]
        if changed:
            note = f"The converted model computes another function than {origin}: {', '.join(changed)}."
        else:
            note = f"The converted model computes what {origin} computes, with mixes in fp32, which that rounds."
        return TranslatedConfig(config, stock_config, note, tuple(warnings))

    def _from_vanilla(
        self,
        config_class: type[PreTrainedConfig],
        backbone: dict[str, Any],
        source: dict[str, Any],
        options: dict[str, Any],
    ) -> TranslatedConfig:
        warnings = check_vanilla(source, config_class.__name__.removesuffix("Config"))
        return self._keep_function(config_class, backbone, source, options, warnings)

    def _from_released_qk_norm(self, source: dict[str, Any], options: dict[str, Any]) -> TranslatedConfig:
        backbone = _released_backbone(source)
        return self._keep_function(LlamaConfig, backbone, source, options, _key_norm_warnings(backbone, options))

    def _keep_function(
        self,
        config_class: type[PreTrainedConfig],
        backbone: dict[str, Any],
        source: dict[str, Any],
        options: dict[str, Any],
        warnings: list[str],
    ) -> TranslatedConfig:
        stock_config, carried = self._read(config_class, source)
        trained_position = backbone.get("key_norm_position", "before_rope")
        config = self._config({**carried, **backbone, **self.vanilla_fields(options), **options})
        note = self.vanilla_note(config)
        if config.use_qk_norm and config.key_norm_position != trained_position:
            warnings.append(
                f"key_norm_position={config.key_norm_position!r} as asked; the source was trained with "
                f"{trained_position!r}."
            )
            note = OTHER_FUNCTION
        elif not config.use_qk_norm and "key_norm_position" in options:
            warnings.append(
                f"key_norm_position={config.key_norm_position!r} has no effect: the source has no q/k norms."
            )
        return TranslatedConfig(config, stock_config, note, tuple(warnings))

    def _read(
        self, config_class: type[PreTrainedConfig], source: dict[str, Any]
    ) -> tuple[PreTrainedConfig, dict[str, Any]]:
        if config_class is LlamaConfig:
            check_llama(source, self.name, self.refused_keys)
        stock = read_stock(config_class, source)
        # Qwen2's configuration has no such field, though its model reads it where it is set
        head_dim = getattr(stock, "head_dim", None) or stock.hidden_size // stock.num_attention_heads
        return stock, {**carried_fields(stock, self.config_class), "head_dim": head_dim}

    def _config(self, values: dict[str, Any]) -> PreTrainedConfig:
        return build_config(self.config_class, self.model_class, values)


OTHER_FUNCTION = "The converted model computes another function than the vanilla checkpoint. Fine-tune it before use."


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
