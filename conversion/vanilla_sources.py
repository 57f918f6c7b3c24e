# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
How the sources of a method are read: vanilla checkpoints of all its backbones, and, of methods on the dense decoder,
the released weights and their vanilla control, which all are Llamas.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

from transformers import LlamaConfig, PreTrainedConfig

from depthmix.configuration.depth_backbones import BACKBONES, DENSE_TYPES, Backbone, ConfigurationClasses

from .conversion_target import AcceptedSource, NewTensorsFn, RetrofitFn, TranslatedConfig
from .errors import ConversionError
from .source_configs import all_fields, build_config, carried_fields, check_llama, check_vanilla, read_stock
from .source_layouts import read_switch
from .weight_maps import BASE_MODEL, CAUSAL_LM, RELEASED_LLAMA


OTHER_FUNCTION = "The converted model computes another function than the vanilla checkpoint. Fine-tune it before use."
SAME_FUNCTION = "The converted model computes exactly what the vanilla checkpoint does"
# fields of the dense decoder that a stock configuration does not have, because its model knows one value only
DENSE_FIELDS = {
    "qwen3": {"use_qk_norm": True},
    "qwen2": {"use_qk_norm": False, "attention_bias": True, "attention_output_bias": False},
    "llama": {"use_qk_norm": False},
}


class FunctionNote(NamedTuple):
    """Whether the function of a vanilla source is kept, up to rounding, and what is to be said of it."""

    is_kept: bool
    text: str


@dataclass(frozen=True)
class MethodSources:
    """
    A method as conversion sees it.

    Args:
        configurations (`ConfigurationClasses`):
            Its configurations.
        name (`str`):
            What it is called in messages.
        vanilla_note (`Callable`):
            Takes the converted configuration and says whether the function of a vanilla source is kept.
        retrofit_fields (`Callable`):
            As in [`AcceptedSource`].
        start_values (`Callable`):
            As `new_tensors` of [`AcceptedSource`].
        remarks (`Callable`):
            Takes the converted configuration and the options, and returns warnings.
        refused_keys (`tuple` of `str`):
            Keys of Llama configurations that it has no equivalent of.
    """

    configurations: ConfigurationClasses
    name: str
    vanilla_note: Callable[[PreTrainedConfig], FunctionNote]
    retrofit_fields: RetrofitFn = lambda options: {}
    start_values: NewTensorsFn = lambda config: {}
    remarks: Callable[[PreTrainedConfig, dict[str, Any]], list[str]] = lambda config, options: []
    refused_keys: tuple[str, ...] = ("scale_embeds", "use_p2n", "no_residual")

    def vanilla_sources(self) -> dict[str, AcceptedSource]:
        """The stock models of all backbones, under both kinds of tensor names."""
        accepted = {}
        for name, stock in BACKBONES.items():
            backbone = self.backbone_of(name)
            if name == "dense" or backbone is None:
                continue
            translate = partial(self._from_vanilla, stock, backbone)
            for suffix, weight_map in (("", CAUSAL_LM), ("_base", BASE_MODEL)):
                accepted[f"{name}{suffix}"] = AcceptedSource(
                    translate, weight_map, self.start_values, self.retrofit_fields
                )
        return accepted

    def released_control(self) -> dict[str, AcceptedSource]:
        """The vanilla control of the release, for methods on the dense decoder."""
        translate = self._from_released_qk_norm
        return {"released_qk_norm": AcceptedSource(translate, RELEASED_LLAMA, self.start_values, self.retrofit_fields)}

    def backbone_of(self, stock_type: str) -> Backbone | None:
        """The backbone that a stock model becomes; None if the method is not on it or transformers has it not."""
        backbones = self.configurations.backbones
        name = "dense" if stock_type in DENSE_TYPES and "dense" in backbones else stock_type
        return backbones[name] if name in backbones and backbones[name].is_available else None

    def from_released(
        self, own_fields: Callable[[dict[str, Any]], dict[str, Any]], source: dict[str, Any], options: dict[str, Any]
    ) -> TranslatedConfig:
        """Weights of the release, whose mixing is that of `own_fields(source)`."""
        trained_backbone = _released_backbone(source)
        warnings = _key_norm_warnings(trained_backbone, options)
        trained = {**trained_backbone, **own_fields(source)}
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
        stock_config, carried = self._read_dense(config_class, source)
        config = self._config(BACKBONES["dense"], {**carried, **trained, **options})
        changed = [key for key, value in options.items() if value != trained[key]]
        warnings = [*warnings, *(f"{k}={options[k]!r} as asked; {origin} runs with {trained[k]!r}." for k in changed)]
        if changed:
            note = f"The converted model computes another function than {origin}: {', '.join(changed)}."
        else:
            note = f"The converted model computes what {origin} computes, with mixes in fp32, which that rounds."
        return TranslatedConfig(config, stock_config, note, tuple(warnings))

    def _from_vanilla(
        self, stock: Backbone, backbone: Backbone, source: dict[str, Any], options: dict[str, Any]
    ) -> TranslatedConfig:
        warnings, config_class = check_vanilla(source, stock), stock.stock_config_class()
        if backbone.model_type == "dense":
            return self._keep_function(config_class, DENSE_FIELDS[stock.model_type], source, options, warnings)
        if stock.model_type == "llama":
            check_llama(source, self.name, self.refused_keys)
        stock_config, carried = read_stock(config_class, source), all_fields(config_class, source)
        return self._translated(backbone, stock_config, carried, source, options, warnings)

    def _from_released_qk_norm(self, source: dict[str, Any], options: dict[str, Any]) -> TranslatedConfig:
        trained_backbone = _released_backbone(source)
        warnings = _key_norm_warnings(trained_backbone, options)
        return self._keep_function(LlamaConfig, trained_backbone, source, options, warnings)

    def _keep_function(
        self,
        config_class: type[PreTrainedConfig],
        trained_backbone: dict[str, Any],
        source: dict[str, Any],
        options: dict[str, Any],
        warnings: list[str],
    ) -> TranslatedConfig:
        stock_config, carried = self._read_dense(config_class, source)
        carried |= trained_backbone
        return self._translated(BACKBONES["dense"], stock_config, carried, source, options, warnings)

    def _translated(
        self,
        backbone: Backbone,
        stock_config: PreTrainedConfig,
        carried: dict[str, Any],
        source: dict[str, Any],
        options: dict[str, Any],
        warnings: list[str],
    ) -> TranslatedConfig:
        trained_position = carried.get("key_norm_position", "before_rope")
        declared = {field.name for field in fields(self.configurations.of(backbone))}
        if unknown := options.keys() - declared:
            raise ConversionError(
                f"{', '.join(sorted(unknown))}: {self.configurations.model_type_of(backbone)} has no such option."
            )
        config = self._config(backbone, {**carried, **options})
        note, position = self.vanilla_note(config), options.get("key_norm_position", trained_position)
        if not getattr(config, "use_qk_norm", backbone.qk_norm == "head"):
            if "key_norm_position" in options:
                warnings.append(f"key_norm_position={position!r} has no effect: the source has no norms of key heads.")
        elif position != trained_position:
            warnings.append(
                f"key_norm_position={position!r} as asked; the source was trained with {trained_position!r}."
            )
            note = FunctionNote(False, OTHER_FUNCTION)
        warnings += self.remarks(config, options)
        return TranslatedConfig(config, stock_config, note.text, tuple(warnings), note.is_kept)

    def _read_dense(
        self, config_class: type[PreTrainedConfig], source: dict[str, Any]
    ) -> tuple[PreTrainedConfig, dict[str, Any]]:
        if config_class is LlamaConfig:
            check_llama(source, self.name, self.refused_keys)
        stock = read_stock(config_class, source)
        # Qwen2's configuration has no such field, though its model reads it where it is set
        head_dim = getattr(stock, "head_dim", None) or stock.hidden_size // stock.num_attention_heads
        carried = carried_fields(stock, self.configurations.of(BACKBONES["dense"]))
        return stock, {**carried, "head_dim": head_dim}

    def _config(self, backbone: Backbone, values: dict[str, Any]) -> PreTrainedConfig:
        return build_config(self.configurations.of(backbone), values)


def _released_backbone(source: dict[str, Any]) -> dict[str, Any]:
    # the released code takes an absent switch for true
    return {"use_qk_norm": read_switch(source, "use_qk_norm") is not False, "key_norm_position": "after_rope"}


def _key_norm_warnings(trained_backbone: dict[str, Any], options: dict[str, Any]) -> list[str]:
    if "key_norm_position" in options or not trained_backbone["use_qk_norm"]:
        return []
    # the recipes name a kernel that does it before, but the same recipe for Depth-Attention cannot have run with it
    return [
        "The release does not say whether its training normalised the keys before or after the rotation; its code "
        "does it after unless told otherwise. Compare the perplexity with that of key_norm_position='before_rope', "
        "and keep the better one."
    ]
