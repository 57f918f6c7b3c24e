# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Which tokenizer transformers makes of a source, so that the converted folder gives the same one.

The host chooses the class by the model type, by its Hub id and by the class that the files declare, from tables that
differ between its versions, and knows nothing of the model types of this package. So it is asked: the tokenizer is
loaded as the source's and as the converted model's, and where the two differ the class is written down.
"""

import json
import shutil
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import (
    TOKENIZER_MAPPING,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    __version__,
)

from .checkpoint_source import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILES
from .errors import ConversionError
from .plain_text import one_line


_ATTRIBUTES = ("padding_side", "truncation_side", "model_max_length", "model_input_names", "all_special_tokens")
# what names files or code elsewhere, of which a tokenizer that is only looked at has no need
_POINTERS = ("auto_map", "name_or_path", "tokenizer_file", "vocab_file", "merges_file")


@dataclass(frozen=True)
class SourceTokenizer:
    """
    A source's tokenizer.

    Args:
        class_name (`str`, *optional*):
            The class that transformers makes it an instance of; None if there are no files of a tokenizer.
        content (`dict`):
            Content of tokenizer_config.json.
        written (`str`, *optional*):
            The class that tokenizer_config.json of the converted model has to name, if it names another or none.
        loaded (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer itself, unless transformers cannot load it.
        problem (`str`, *optional*):
            Why not.
    """

    class_name: str | None
    content: dict[str, Any]
    written: str | None = None
    loaded: PreTrainedTokenizerBase | None = None
    problem: str | None = None


def resolve_tokenizer(
    companions: Mapping[str, Path],
    content: dict[str, Any],
    stock_config: PreTrainedConfig,
    config: PreTrainedConfig | None,
    hub_id: str | None,
    written_by: str | None = None,
) -> SourceTokenizer:
    """
    Asks the host which tokenizer it makes of a source's files, and what it needs to make the same one for `config`.
    `written_by` is the version of transformers that the source's config.json names.

    Raises:
        [`ConversionError`]: if no class makes the two equal.
    """
    if companions.keys().isdisjoint(TOKENIZER_FILES):
        return SourceTokenizer(None, content)
    stock_config = copy(stock_config)
    # for some repositories the host goes by the name
    stock_config._name_or_path = hub_id or ""
    # of a Mistral it goes by the version, which decides whether `fix_mistral_regex` is followed
    stock_config.transformers_version = written_by
    declared = content.get("tokenizer_class")
    files = {name: path for name, path in companions.items() if name in TOKENIZER_FILES}
    try:
        loaded = _load(files, content, stock_config)
    except ConversionError as error:
        implied = declared or _implied_class(stock_config)
        return SourceTokenizer(implied, content, None if declared else implied, problem=str(error))
    name = type(loaded).__name__
    if config is None:
        return SourceTokenizer(name, content, None, loaded)
    config = _as_written(config)
    if _is_same(loaded, files, content, config):
        return SourceTokenizer(name, content, None, loaded)
    if not _is_same(loaded, files, content | {"tokenizer_class": name}, config):
        raise ConversionError(
            f"The tokenizer cannot be kept: for the source transformers makes a {name} of its files, and for "
            f"{config.model_type} another one, whichever class {TOKENIZER_CONFIG_FILE} names (tokenizer_class="
            f"{declared!r}). Save the tokenizer of the source with this version of transformers and convert again."
        )
    return SourceTokenizer(name, content, name, loaded)


def verify_tokenizer(
    tokenizer: SourceTokenizer, companions: Mapping[str, Path], texts: Mapping[str, str], config: PreTrainedConfig
) -> None:
    """
    Checks what is to be written: copies of `companions`, with `texts` in place of some or besides.

    Raises:
        [`ConversionError`]: if it gives another tokenizer than the source's.
    """
    # nothing but copies was checked before
    if tokenizer.loaded is None or texts.keys().isdisjoint(TOKENIZER_FILES):
        return
    config = _as_written(config)
    written: dict[str, Path | str] = {**companions, **texts}
    files = {name: content for name, content in written.items() if name in TOKENIZER_FILES}
    content = json.loads(texts[TOKENIZER_CONFIG_FILE]) if TOKENIZER_CONFIG_FILE in texts else tokenizer.content
    if not _is_same(tokenizer.loaded, files, content, config):
        changed = ", ".join(sorted(texts.keys() & set(TOKENIZER_FILES)))
        raise ConversionError(
            f"The tokenizer, a {tokenizer.class_name}, is another one without what does not travel from {changed}. "
            "Save it with this version of transformers and convert again."
        )


def _as_written(config: PreTrainedConfig) -> PreTrainedConfig:
    """A converted configuration as the host will find it."""
    config = copy(config)
    config._name_or_path, config.transformers_version = "", __version__
    return config


def _implied_class(stock_config: PreTrainedConfig) -> str | None:
    if named := getattr(stock_config, "tokenizer_class", None):
        return named
    by_model_type: Any = TOKENIZER_MAPPING.get(type(stock_config), None)
    return by_model_type and by_model_type.__name__


def _load(
    files: Mapping[str, Path | str], content: dict[str, Any], config: PreTrainedConfig
) -> PreTrainedTokenizerBase:
    """A tokenizer from these files, or texts, alone, without code of theirs."""
    with TemporaryDirectory() as folder:
        for name, file in files.items():
            if isinstance(file, str):
                Path(folder, name).write_text(file, encoding="utf-8")
            else:
                shutil.copyfile(file, Path(folder, name))
        # the host reads this one besides the configuration that it is given
        seen = {"model_type": config.model_type, "transformers_version": config.transformers_version}
        Path(folder, CONFIG_FILE).write_text(json.dumps(seen), encoding="utf-8")
        kept = {key: value for key, value in content.items() if key not in _POINTERS}
        if content or TOKENIZER_CONFIG_FILE in files:
            Path(folder, TOKENIZER_CONFIG_FILE).write_text(json.dumps(kept), encoding="utf-8")
        try:
            # a name of any class of the host may be declared
            loaded = AutoTokenizer.from_pretrained(
                folder, config=config, local_files_only=True, trust_remote_code=False
            )
            if not isinstance(loaded, PreTrainedTokenizerBase):
                raise TypeError(f"{type(loaded).__name__} is no tokenizer")
            return loaded
        except (TimeoutError, MemoryError):
            raise
        except Exception as error:
            text = one_line(f"{type(error).__name__}: {error}")
            raise ConversionError(text.replace(folder, "the source")) from error
        except BaseException as error:
            # what a panic of the tokenizers library is raised as
            if type(error).__name__ != "PanicException":
                raise
            raise ConversionError(f"the tokenizers library panics: {error}") from error


def _is_same(
    loaded: PreTrainedTokenizerBase, files: Mapping[str, Path | str], content: dict[str, Any], config: PreTrainedConfig
) -> bool:
    try:
        return _state(_load(files, content, config)) == _state(loaded)
    except ConversionError:
        return False


def _state(tokenizer: PreTrainedTokenizerBase) -> list:
    """All that decides on the ids of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else [sorted(tokenizer.get_vocab().items())]
    return [type(tokenizer).__name__, content, *(getattr(tokenizer, name, None) for name in _ATTRIBUTES)]
