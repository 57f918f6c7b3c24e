# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Reading of sources' configurations that the targets share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedConfig

from depthmix.auto import AUTO_MAPS, auto_classes
from depthmix.configuration.configuration_depth_common import check_decoder_shape, shown
from depthmix.configuration.depth_backbones import Backbone
from depthmix.hub import OWN_MARK

from .errors import ConversionError
from .plain_text import one_line
from .source_keys import (
    ALIASES,
    EXECUTION_KEYS,
    HARMLESS_KEYS,
    IDENTITY_KEYS,
    READ_EVERYWHERE,
    REFUSED_KEYS,
    TOKENIZER_KEYS,
    refused_keys,
)


def declared_names(config_class: type[PreTrainedConfig]) -> set[str]:
    """The fields that a configuration declares, under both of their names where they have two."""
    aliases = config_class.attribute_map
    return {field.name for field in fields(config_class)} | {*aliases, *aliases.values()}


def all_fields(config_class: type[PreTrainedConfig], source: dict[str, Any]) -> dict[str, Any]:
    """
    What a target that derives from the source's configuration takes over.

    Raises:
        [`ConversionError`]: for a key that changes what stock code computes and cannot be carried, or a value out of
            range.
    """
    for key, change in refused_keys(declared_names(config_class), source).items():
        raise ConversionError(
            f"{key}={shown(source[key])} in config.json: stands for {change}, of which the targets have no "
            "equivalent, and without which the function would be another."
        )
    return _declared_fields(config_class, source)


def _declared_fields(config_class: type[PreTrainedConfig], source: dict[str, Any]) -> dict[str, Any]:
    """
    The keys that a configuration declares or understands. Nothing else of a file may reach it: there it would become
    an attribute, which hides a method or which the host reads by name.
    """
    declared = declared_names(config_class)
    for key in source:
        if key not in declared and callable(getattr(config_class, key, None)):
            raise ConversionError(f"config.json has a key {key}, which is the name of a method of configurations.")
    kept = {*declared, *ALIASES, *READ_EVERYWHERE} - {*IDENTITY_KEYS, *EXECUTION_KEYS}
    values = {key: value for key, value in source.items() if key in kept}
    try:
        check_decoder_shape(values)
    except ValueError as error:
        raise ConversionError(f"{str(error).rstrip('.')} (in config.json).") from error
    return values


def unknown_keys(config_class: type[PreTrainedConfig], source: dict[str, Any]) -> list[str]:
    """The keys that no stock code reads and that depthmix does not know either."""
    known = declared_names(config_class) | set(GenerationConfig().to_dict())
    known |= {*IDENTITY_KEYS, *ALIASES, *READ_EVERYWHERE, *TOKENIZER_KEYS, *REFUSED_KEYS}
    return sorted(source.keys() - known - EXECUTION_KEYS - HARMLESS_KEYS)


@contextmanager
def config_errors(place: str = "") -> Iterator[None]:
    """Errors of configurations become [`ConversionError`]; the message begins with the place."""
    try:
        yield
    # the last three say nothing of a configuration: a full disk, an alarm, no memory
    except (ConversionError, OSError, MemoryError):
        raise
    except StrictDataclassError as error:
        # the cause is the rule, which names the field and the value
        raise ConversionError(f"{place}{one_line(error.__cause__ or error)}") from error
    except Exception as error:
        # any: a damaged value can fail anywhere in a library, and a mere `'bogus'` says little without its type
        kind = "" if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: "
        raise ConversionError(f"{place}The configuration is not valid: {kind}{one_line(error)}") from error


def read_own(source: dict[str, Any], path: Path) -> PreTrainedConfig | None:
    """
    The configuration of a model of this package, as it is in a file; None for others.

    Raises:
        [`ConversionError`]: for values that the model refuses.
    """
    model_type = source.get("model_type")
    if not isinstance(model_type, str) or model_type not in AUTO_MAPS or OWN_MARK not in source:
        return None
    with config_errors(f"{path}: "):
        config_class: Any = auto_classes(model_type)["AutoConfig"]
        values = _declared_fields(config_class, source)
        # by this the class tells its own checkpoints from other people's of the same model type
        return config_class.from_dict(deepcopy(values | {"auto_map": source.get("auto_map")}))


def read_stock(config_class: type[PreTrainedConfig], source: dict[str, Any]) -> PreTrainedConfig:
    """A source's configuration as transformers reads it, without what a file says on how to run the model."""
    values = all_fields(config_class, source)
    return config_class.from_dict(deepcopy(values | {key: source[key] for key in TOKENIZER_KEYS if key in source}))


def carried_fields(stock_config: PreTrainedConfig, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The fields of a stock configuration that another class has too, absent ones with the stock defaults."""
    shared = {field.name for field in fields(stock_config)} & {field.name for field in fields(config_class)}
    return {key: value for key, value in stock_config.to_dict().items() if key in shared}


# field of a Llama config -> what a model does not do if any value but false, null, 0 or absent changes the function
_LLAMA_REFUSALS = {
    "mlp_bias": "has no biases in its MLP",
    "scale_embeds": "does not scale its embeddings",
    "no_residual": "always adds the residual",
    "use_p2n": "runs its layers once",
}


def check_llama(source: dict[str, Any], name: str, refused: Sequence[str], problems: Sequence[str] = ()) -> None:
    """
    Raises:
        [`ConversionError`]: if the model `name` cannot compute what a Llama with this config does, because of one of
            the `refused` keys, of `pretraining_tp` or of what is among the `problems` already.
    """
    found = [f"{key} is {source[key]!r}: {name} {_LLAMA_REFUSALS[key]}" for key in refused if source.get(key)]
    found += problems
    if source.get("pretraining_tp") not in (None, 0, 1):
        found.append(f"pretraining_tp is {source['pretraining_tp']!r}: only 1 computes what {name} computes")
    if found:
        raise ConversionError(f"{name} cannot represent this checkpoint exactly: {'; '.join(found)}.")


def read_aliased(source: dict[str, Any], key: str, older_key: str, default: int) -> int:
    """
    A field that has two names, of which the first is followed; null stands for absent.

    Raises:
        [`ConversionError`]: if it is no integer.
    """
    for name in (key, older_key):
        value = source.get(name)
        if value is not None:
            if type(value) is not int:
                raise ConversionError(f"{name} is {value!r}, must be an integer.")
            return value
    return default


def build_config(config_class: type[PreTrainedConfig], values: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a converted model."""
    config = config_class.from_dict(deepcopy(values))
    config.architectures = [config_class.__name__.removesuffix("Config") + "ForCausalLM"]
    return config


def check_vanilla(source: dict[str, Any], stock: Backbone) -> list[str]:
    """
    Warnings on a source that is taken for a stock model.

    Raises:
        [`ConversionError`]: if it is no causal language model.
    """
    causal_lm, base_model = f"{stock.prefix}ForCausalLM", f"{stock.prefix}Model"
    architectures = source.get("architectures") or [causal_lm]
    if not isinstance(architectures, list):
        raise ConversionError(f"architectures is {shown(architectures)}, must be a list of names.")
    # stock transformers loads a base model's checkpoint as a causal language model too
    if causal_lm not in architectures and base_model not in architectures:
        raise ConversionError(
            f"architectures is {shown(architectures)}. Only causal language models ({causal_lm}) convert."
        )
    warnings = []
    if source.get("auto_map"):
        warnings.append(
            f"The source names code of its own (auto_map). It was ignored: the model is taken for stock {stock.title}."
        )
    if unknown := unknown_keys(stock.stock_config_class(), source):
        names = ", ".join(shown(key) for key in unknown[:10]) + (", …" if len(unknown) > 10 else "")
        warnings.append(f"config.json has keys that stock {stock.title} does not read. They were left out: {names}.")
    return warnings
