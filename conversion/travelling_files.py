# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
What of a source's files and keys may travel into a converted folder.

Keys are listed, and what is not listed stays behind: a key that nobody has looked at may name code, as `auto_map`,
`custom_pipelines` and positional arguments for a tokenizer do, and the host would run it from the converted folder.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from .checkpoint_io import read_json
from .checkpoint_source import GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE
from .source_configs import declared_names


# what tokenizers are built from; special tokens, `<name>_token`, besides
_TOKENIZER_KEYS = """
add_bos_token add_eos_token add_prefix_space added_tokens_decoder additional_special_tokens backend
chat_control_tokens chat_template clean_up_tokenization_spaces
clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output do_basic_tokenize do_lower_case errors
extra_ids extra_special_tokens fix_mistral_regex from_slow legacy max_len max_length merges model_input_names
model_max_length model_specific_special_tokens never_split pad_to_multiple_of pad_token_type_id padding
padding_side response_template sp_model_kwargs spaces_between_special_tokens special_tokens_pattern
split_special_tokens stride strip_accents token_type_ids_include_special_tokens token_type_ids_pattern
tokenize_chinese_chars tokenizer_class tokenizer_padding tokenizer_truncation transformers_version trim_offsets
truncation truncation_side truncation_strategy unk_id use_default_system_prompt use_fast vocab wordpieces_prefix
"""
_SPECIAL_TOKEN = re.compile(r"\w+_tokens?")
# backends that run, not what is generated
_EXECUTION_KEYS = frozenset(("compile_config", "continuous_batching_config"))
# with values other than these, the host takes the way of generating from other people's code on the Hub
HUB_GENERATION = {
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "diversity_penalty": (None, 0),
    "num_beam_groups": (None, 1),
    "constraints": (None,),
    "force_words_ids": (None,),
}


def drop_undeclared(config: PreTrainedConfig) -> list[str]:
    """
    Takes out of a converted configuration whatever its class does not declare, and returns the names.

    A number, a truth value or null stays, since stock code reads some of these by name and none can name code.
    """
    declared = {"model_type", *declared_names(type(config))}
    dropped = [
        key
        for key, value in vars(config).items()
        if not key.startswith("_") and key not in declared and not isinstance(value, (bool, int, float, type(None)))
    ]
    # the host writes these by itself
    dropped = [key for key in dropped if key in config.to_dict()]
    for key in dropped:
        delattr(config, key)
    return sorted(dropped)


def clean_companions(companions: Mapping[str, Path], texts: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """
    Takes out of a source's JSON files what may not travel.

    Args:
        companions (`Mapping`):
            Names to paths of the files that are copied.
        texts (`Mapping`):
            Names to content of those that are written in place of a copy, or besides.

    Returns:
        `tuple`: the texts, with one more for each file of which a part stays behind, and a remark on each part.

    Raises:
        [`ConversionError`]: for a file that is no JSON object.
    """
    cleaned, remarks = dict(texts), []
    for name, may_travel in _FILTERS.items():
        if name in texts:
            content = json.loads(texts[name])
        elif name in companions:
            content = read_json(companions[name])
        else:
            continue
        kept = {key: value for key, value in content.items() if may_travel(key, value)}
        if kept != content:
            cleaned[name] = json.dumps(kept, indent=2, ensure_ascii=False) + "\n"
            remarks += [f"{key}: dropped from {name}" for key in content if key not in kept]
    return cleaned, remarks


def _may_configure_generation(key: str, value: Any) -> bool:
    if key in HUB_GENERATION:
        return value in HUB_GENERATION[key]
    return key in _generation_keys and key not in _EXECUTION_KEYS


def _may_configure_tokenizer(key: str, value: Any) -> bool:
    return key in _TOKENIZER_KEYS.split() or _is_special_token(key, value)


def _is_special_token(key: str, value: Any) -> bool:
    return _SPECIAL_TOKEN.fullmatch(key) is not None and isinstance(value, (str, dict, list, type(None)))


_generation_keys = frozenset(GenerationConfig().to_dict())
_FILTERS: dict[str, Callable[[str, Any], bool]] = {
    GENERATION_CONFIG_FILE: _may_configure_generation,
    TOKENIZER_CONFIG_FILE: _may_configure_tokenizer,
    "special_tokens_map.json": _is_special_token,
    "chat_template.json": lambda key, value: key == "chat_template",
}
