# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Reading of sources' configurations that the targets share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from depthmix.auto import AUTO_MAPS, auto_classes

from .errors import ConversionError


# say what a file is, not how the model computes
_IDENTITY_KEYS = ("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path")


def all_fields(source: dict[str, Any]) -> dict[str, Any]:
    """What a target that derives from the source's configuration takes over."""
    return {key: value for key, value in source.items() if key not in _IDENTITY_KEYS}


@contextmanager
def config_errors(place: str = "") -> Iterator[None]:
    """Errors of configurations become [`ConversionError`]; the message begins with the place."""
    try:
        yield
    except ConversionError:
        raise
    except StrictDataclassError as error:
        # the cause is the rule, which names the field and the value
        raise ConversionError(f"{place}{error.__cause__ or error}") from error
    except Exception as error:
        # any: a damaged value can fail anywhere in a library, and a mere `'bogus'` says little without its type
        kind = "" if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: "
        raise ConversionError(f"{place}The configuration is not valid: {kind}{error}") from error


def read_own(source: dict[str, Any], path: Path) -> PreTrainedConfig | None:
    """
    The configuration of a model of this package, as it is in a file; None for others.

    Raises:
        [`ConversionError`]: for values that the model refuses.
    """
    model_type = source.get("model_type")
    if not isinstance(model_type, str) or model_type not in AUTO_MAPS:
        return None
    with config_errors(f"{path}: "):
        return auto_classes(model_type)["AutoConfig"].from_dict(deepcopy(source))


def read_stock(config_class: type[PreTrainedConfig], source: dict[str, Any]) -> PreTrainedConfig:
    """A source's configuration as transformers reads it."""
    return config_class.from_dict(deepcopy(source))


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


def build_config(
    config_class: type[PreTrainedConfig], model_class: type[PreTrainedModel], values: dict[str, Any]
) -> PreTrainedConfig:
    """The configuration of a converted model."""
    config = config_class.from_dict(deepcopy(values))
    config.architectures = [model_class.__name__]
    return config


def check_vanilla(source: dict[str, Any], stock_name: str) -> list[str]:
    """
    Warnings on a source that is taken for a stock model.

    Raises:
        [`ConversionError`]: if it is no causal language model.
    """
    causal_lm, base_model = f"{stock_name}ForCausalLM", f"{stock_name}Model"
    architectures = source.get("architectures") or [causal_lm]
    # stock transformers loads a base model's checkpoint as a causal language model too
    if not {causal_lm, base_model} & set(architectures):
        raise ConversionError(f"architectures is {architectures}. Only causal language models ({causal_lm}) convert.")
    if source.get("auto_map"):
        return [
            f"The source names code of its own (auto_map). It was ignored: the model is taken for stock {stock_name}."
        ]
    return []
