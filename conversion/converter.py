# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Converts checkpoints to this package's models, and says what a checkpoint is."""

import json
import math
import os
import shlex
import shutil
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import GenerationConfig, PreTrainedConfig

from depthmix.auto import AUTO_MAPS
from depthmix.families import METHODS
from depthmix.hub import MANIFEST, collect_remote_code

from .checkpoint_io import (
    FLOAT_DTYPES,
    INDEX_FILE,
    WEIGHT_FILES,
    Checkpoint,
    check_text_size,
    find_file,
    open_checkpoint,
    plan_shards,
    read_json,
    verify_checkpoint,
    write_checkpoint,
)
from .checkpoint_source import (
    CARD_FILE,
    CHAT_TEMPLATE_FOLDER,
    COMPANION_FILES,
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    READ_FILES,
    TOKENIZER_CONFIG_FILE,
    expand_path,
    hub_id_of,
    list_entries,
    locate_checkpoint,
)
from .code_check import check_result, own_code_names
from .conversion_target import ConversionTarget, TranslatedConfig
from .errors import ConversionError
from .model_card import make_model_card, read_card_metadata
from .output_folder import (
    check_apart,
    check_destination,
    check_model_only,
    check_space,
    clear_leftovers,
    staged_folder,
)
from .plain_text import hidden_tokens, one_line, without_token
from .reports import (
    CheckpointDescription,
    ConversionReport,
    describe_config_changes,
    describe_dtypes,
    describe_sources,
    describe_start,
    own_fields,
)
from .source_configs import config_errors, read_own
from .source_layouts import LAYOUTS, SourceLayout, recognise_layout
from .source_tokenizer import SourceTokenizer, resolve_tokenizer, verify_tokenizer
from .stock_tensors import has_stock_tensors
from .tensor_plan import TensorPlan, check_layers, plan_tensors
from .travelling_files import clean_companions, drop_undeclared


# by the name of the method
TARGETS: dict[str, ConversionTarget] = {
    method: import_module(f"depthmix.conversion.convert_to_{method}").TARGET for method in METHODS
}
DTYPES = ("float32", "bfloat16", "float16")


def convert(
    source: str | os.PathLike,
    dest: str | os.PathLike,
    *,
    to: str = "depth_attention",
    retrofit: bool | None = None,
    dtype: "str | torch.dtype | None" = None,
    shard_size: int | str = "5GB",
    push_to_hub: str | None = None,
    private: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: bool = True,
    **options: Any,
) -> ConversionReport:
    """
    Converts a checkpoint and writes the result to a folder, with tokenizer, generation config, code and model card.

    The tensors are copied a few megabytes at a time, so the memory that is needed does not depend on the model. The
    folder appears when everything is written, checked and on the disk; a failure before that leaves nothing and
    changes nothing. Only a process that is killed can leave a hidden folder, `.<name>.<hex>.incomplete` or
    `.<name>.<hex>.replaced`, beside `dest`; the next conversion to `dest` clears it up and says so. A process that
    wants to clean up on SIGTERM has to turn it into an exception, as the `depthmix` command does.

    Args:
        source (`str` or `os.PathLike`):
            A folder with config.json and safetensors files, or a Hub id: a stock model of one of the backbones, or
            released weights of the method. `depthmix inspect` says what a checkpoint can become.
        dest (`str` or `os.PathLike`):
            Folder of the result, not the current one. It must not exist or be empty, unless `overwrite` is set.
        to (`str`, *optional*, defaults to `"depth_attention"`):
            The method, one of `depthmix.families.METHODS`. The source's backbone decides what model type the result
            has. A model type, such as `"depth_qwen3"`, is taken too, and has to be that one.
        retrofit (`bool`, *optional*):
            How a vanilla source starts. `True` is a start with the function of the source, from which training can
            move away; it is refused with options that change the function. `False` is the method as it was published.
            Left out, it is the retrofit, but other options are followed. Sources with trained mixing stay as they are.
        dtype (`str` or `torch.dtype`, *optional*):
            `"float32"`, `"bfloat16"` or `"float16"`. Left out, every tensor keeps its dtype.
        shard_size (`int` or `str`, *optional*, defaults to `"5GB"`):
            Most bytes of tensors per file: a number above 0, or text such as `"5GB"`.
        push_to_hub (`str`, *optional*):
            Hub repository that the finished folder is uploaded to. It is created if it is not there. Weights, code and
            files of the tokenizer and for generation that are there from before, and not in the folder, are deleted.
        private (`bool`, *optional*, defaults to `False`):
            Make that repository a private one. A public one that is there already is refused.
        revision (`str`, *optional*):
            Branch, tag or commit of a source on the Hub.
        token (`str`, *optional*):
            Token for the Hub. Left out or empty, the one that is logged in. No message or log shows it.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace a model that is in `dest`, once the new one is complete. Refused if other files are there too.
        dry_run (`bool`, *optional*, defaults to `False`):
            Check everything and write nothing. A source on the Hub is downloaded into the cache all the same.
        progress (`bool`, *optional*, defaults to `True`):
            Show a progress bar.
        options:
            Fields of the result's configuration that have a help text there, such as `depth_stride`; None is as good
            as left out. Those left out are what the weights were trained with, and for vanilla sources what the
            retrofit needs, and the defaults of the configuration otherwise.

    Returns:
        [`ConversionReport`]: what was done. `str()` of it is readable.

    Raises:
        [`ConversionError`]: for sources that are damaged, unsafe or cannot be represented exactly, destinations that
            are in the way, and options with invalid values. The message says what is wrong.

    ```python
    >>> from depthmix.conversion import convert

    >>> report = convert("Qwen/Qwen3-0.6B-Base", "qwen3-0.6b-depth", depth_stride=14)
    ```
    """
    target = _get_target(to)
    options = {key: value for key, value in options.items() if value is not None}
    # before the destination is looked at, which would be the next thing to refuse
    if unknown := options.keys() - set(target.options):
        raise ConversionError(
            f"{target.name} has no option {', '.join(sorted(unknown))}. Its options are: {', '.join(target.options)}."
        )
    if not isinstance(retrofit, bool | None):
        raise ConversionError(f"retrofit={retrofit!r}: must be True, False or None.")
    dtype_code = _check_dtype(dtype)
    _check_repo_id(push_to_hub)
    if private and push_to_hub is None:
        raise ConversionError("private: is for the repository of push_to_hub, which is not given.")
    token = _check_token(token)
    dest = expand_path(dest, "destination")
    # a model of another family may be replaced too
    own_files = own_code_names()
    remarks = [] if dry_run else clear_leftovers(dest, own_files)
    try:
        check_destination(dest, overwrite, own_files)
    except ConversionError as error:
        # there will be no report
        raise ConversionError(*str(error).split("\n"), *remarks) from error
    with hidden_tokens(token):
        folder = locate_checkpoint(source, revision, token)
    check_apart(dest, folder)

    opened = _open_source(folder)
    translated, plan = _plan_conversion(opened, target, options, retrofit, dtype_code)
    config = translated.config
    if to not in (target.name, config.model_type):
        raise ConversionError(
            f"to={to!r}: {opened.checkpoint.folder} is {opened.layout.title}, which becomes {config.model_type}. Give "
            f"to={target.name!r}, or a source that becomes {to}."
        )
    code_files = {MANIFEST, *collect_remote_code(AUTO_MAPS[config.model_type])}
    if dtype_code is not None:
        config.dtype = getattr(torch, FLOAT_DTYPES[dtype_code])
    shards = plan_shards(plan.writes, shard_size)
    companions = _companion_files(folder)
    tokenizer_config = read_json(companions[TOKENIZER_CONFIG_FILE]) if TOKENIZER_CONFIG_FILE in companions else {}
    config_changes = describe_config_changes(translated.stock_config, config)
    texts = _legacy_generation_config(opened.config, config, companions)
    hub_id = hub_id_of(source, folder)
    written_by = opened.config.get("transformers_version")
    tokenizer = resolve_tokenizer(companions, tokenizer_config, translated.stock_config, config, hub_id, written_by)
    if tokenizer.written:
        named = {**tokenizer_config, "tokenizer_class": tokenizer.written}
        texts[TOKENIZER_CONFIG_FILE] = json.dumps(named, indent=2, ensure_ascii=False) + "\n"
        before = tokenizer_config.get("tokenizer_class")
        change = f"{before!r} -> {tokenizer.written!r} (" if before else f"{tokenizer.written!r} (new, "
        config_changes.append(f"tokenizer_class: {change}in {TOKENIZER_CONFIG_FILE})")
    texts, left_behind = clean_companions(companions, texts)
    _check_generation_config(companions, texts)
    config_changes += left_behind
    verify_tokenizer(tokenizer, companions, texts, config)
    index = [INDEX_FILE] if len(shards) > 1 else []
    read = {*opened.checkpoint.files, INDEX_FILE, CONFIG_FILE, CARD_FILE, *companions}
    card_metadata, card_warnings = read_card_metadata(find_file(folder, CARD_FILE))
    report = ConversionReport(
        source=os.fspath(source),
        source_kind=opened.layout.title,
        evidence=opened.evidence,
        target=config.model_type,
        destination=dest,
        config_changes=config_changes,
        function_note=translated.function_note,
        retrofit=_is_retrofit(opened, target, translated, retrofit, plan.learns),
        sources=describe_sources(config),
        kept=plan.kept,
        renamed=plan.renamed,
        dropped=plan.dropped,
        new=plan.new,
        nbytes=sum(write.nbytes for write in plan.writes),
        files=sorted({*shards, *index, *companions, *texts, CONFIG_FILE, CARD_FILE, *code_files}),
        not_copied=[name for name in list_entries(folder) if name not in read],
        warnings=[
            *opened.checkpoint.warnings,
            *translated.warnings,
            *plan.warnings,
            *_code_warnings(tokenizer_config),
            *_tokenizer_warnings(tokenizer),
            *card_warnings,
        ],
        dry_run=dry_run,
        push_to_hub=push_to_hub,
    )
    if dry_run:
        # the one part of the writing that can fail by itself
        for write in plan.writes:
            if write.name in plan.new:
                deque(write.chunks(), maxlen=0)
        return report

    check_space(dest, report.nbytes + sum(path.stat().st_size for path in companions.values()))
    check_replaced = partial(check_model_only, code_files=own_files)
    with staged_folder(dest, overwrite, check_replaced, more_follows=push_to_hub is not None) as staging:
        write_checkpoint(staging, shards, progress)
        verify_checkpoint(staging, shards)
        for name, path in companions.items():
            if name in texts:
                continue
            (staging / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, staging / name)
        for name, text in texts.items():
            (staging / name).write_text(text, encoding="utf-8")
        config.save_pretrained(staging)
        _verify_config(config, staging)
        assert config.architectures is not None
        card = make_model_card(report, target, config.architectures[0], card_metadata, hub_id)
        (staging / CARD_FILE).write_text(card, encoding="utf-8")
        report.files = sorted(path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file())
        # nothing but this version's code must be reachable from what others will load
        check_result(staging, os.fspath(source))
        # writing takes long, and something may have been put there
        if overwrite:
            check_destination(dest, overwrite, own_files)
    # not in the card, which others read
    report.warnings += [*remarks, *clear_leftovers(dest, own_files)]
    if push_to_hub is not None:
        with hidden_tokens(token):
            report.pushed_to = _push(dest, push_to_hub, token, private)
    return report


def inspect_checkpoint(
    path_or_hub_id: str | os.PathLike, revision: str | None = None, token: str | bool | None = None
) -> CheckpointDescription:
    """
    Says what a checkpoint is, and what it would become.

    Args:
        path_or_hub_id (`str` or `os.PathLike`):
            A folder with config.json and safetensors files, or a Hub id, which is downloaded into the cache.
        revision (`str`, *optional*), token (`str`, *optional*):
            As for [`convert`].

    Returns:
        [`CheckpointDescription`]: what was found. `str()` of it is readable.

    Raises:
        [`ConversionError`]: if the checkpoint cannot be read, or is a model of this package whose configuration has a
            value that the model refuses.
    """
    token = _check_token(token)
    with hidden_tokens(token):
        folder = locate_checkpoint(path_or_hub_id, revision, token)
    opened = _open_source(folder)
    checkpoint = opened.checkpoint
    config = opened.config
    opened = replace(opened, config=_without_dtype(config))
    own_config = read_own(opened.config, checkpoint.folder / CONFIG_FILE)
    stock_config = own_config
    conversions, warnings = {}, list(checkpoint.warnings)
    for target in TARGETS.values():
        try:
            translated, plan = _plan_conversion(opened, target, {}, None, None, only_describe=True)
        except ConversionError as error:
            conversions[target.name] = f"no. {error}"
        else:
            made = translated.config
            fields = ", ".join(f"{name}={getattr(made, name)!r}" for name in target.options if hasattr(made, name))
            stock_config = translated.stock_config
            start = describe_start(_is_retrofit(opened, target, translated, None, True))
            note = f"{start} {translated.function_note}"
            conversions[target.name] = f"yes, to {made.model_type}, with {fields} unless asked otherwise. {note}"
            warnings += [*translated.warnings, *plan.warnings]
    return CheckpointDescription(
        source=os.fspath(path_or_hub_id),
        kind=opened.layout.title,
        layout=opened.layout.name,
        evidence=opened.evidence,
        config=config,
        own_config=own_fields(own_config) if own_config else {},
        num_tensors=len(checkpoint.tensors),
        num_parameters=sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()),
        nbytes=checkpoint.nbytes,
        dtypes=describe_dtypes(checkpoint),
        files=list(checkpoint.files),
        conversions=conversions,
        warnings=warnings,
        tokenizer=_tokenizer_class(path_or_hub_id, checkpoint.folder, stock_config),
    )


@dataclass(frozen=True)
class _OpenedSource:
    config: dict[str, Any]
    checkpoint: Checkpoint
    layout: SourceLayout
    evidence: list[str]


def _open_source(folder: Path) -> _OpenedSource:
    # first, since an adapter has no config.json either
    checkpoint = open_checkpoint(folder)
    config_path = find_file(folder, CONFIG_FILE)
    if config_path is None:
        raise ConversionError(f"{folder} has no config.json.")
    config = read_json(config_path)
    return _OpenedSource(config, checkpoint, *recognise_layout(config, checkpoint.tensors))


def _is_retrofit(
    opened: _OpenedSource, target: ConversionTarget, translated: TranslatedConfig, retrofit: bool | None, learns: bool
) -> bool | None:
    """
    Whether a vanilla source becomes a retrofit, which has its function and parameters (`learns`) that can leave it;
    None for a source with trained mixing.
    """
    if target.sources[opened.layout.name].retrofit_fields is None:
        return None
    return retrofit is not False and translated.keeps_function and learns


def _plan_conversion(
    opened: _OpenedSource,
    target: ConversionTarget,
    options: dict[str, Any],
    retrofit: bool | None,
    dtype: str | None,
    only_describe: bool = False,
) -> tuple[TranslatedConfig, TensorPlan]:
    layout = opened.layout
    if layout.name not in target.sources:
        titles = {known.name: known.title for known in LAYOUTS}
        known_titles = "; ".join(titles[name] for name in target.sources if not name.endswith("_base"))
        reason = target.refusals.get(layout.name, f"Accepted are: {known_titles}.")
        raise ConversionError(
            f"{opened.checkpoint.folder} is {layout.title} ({'; '.join(opened.evidence)}), which does not convert to "
            f"{target.name}. {reason}"
        )
    if opened.config.get("quantization_config") is not None:
        raise ConversionError("The checkpoint is quantised (quantization_config). Convert the one it was made from.")
    accepted = target.sources[layout.name]
    if retrofit and accepted.retrofit_fields is None:
        raise ConversionError(
            f"retrofit=True: {opened.checkpoint.folder} is {layout.title}, and must be a vanilla model. "
            "Leave it out to convert this one as it was trained."
        )
    given = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "this one"
    if accepted.retrofit_fields is not None and retrofit is not False:
        options = accepted.retrofit_fields(options) | options
    check_layers(opened.checkpoint, opened.config.get("num_hidden_layers"))
    with config_errors():
        translated = accepted.translate(opened.config, options)
        drop_undeclared(translated.config)
    # the plan has no remarks then, and nobody asks for its tensors
    if only_describe and has_stock_tensors(opened.checkpoint, accepted.weight_map, translated.config):
        return translated, TensorPlan()
    plan = plan_tensors(
        opened.checkpoint, accepted.weight_map, translated.model_class, translated.config, accepted.new_tensors, dtype
    )
    if plan.function_note is not None:
        translated = replace(translated, function_note=plan.function_note, keeps_function=False)
    if retrofit and not translated.keeps_function:
        raise ConversionError(
            f"retrofit=True: must keep the function of the source, which is lost with {given}. "
            f"{translated.function_note}"
        )
    if retrofit and not plan.learns:
        raise ConversionError(
            f"retrofit=True: must have parameters that training can move, and there are none with {given}."
        )
    return translated, plan


def _without_dtype(config: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json without a dtype that is one: the host would load torch for it."""
    return {
        key: value
        for key, value in config.items()
        if key not in ("dtype", "torch_dtype") or value not in FLOAT_DTYPES.values()
    }


def _get_target(name: str) -> ConversionTarget:
    for target in TARGETS.values():
        if name == target.name or name in target.model_types:
            return target
    raise ConversionError(f"to={name!r}: {rule_of_targets(name)}.")


def rule_of_targets(name: str) -> str:
    """What may be asked for, and what of it is spelt like this name."""
    # some model types are called as their method
    known = {**TARGETS, **{each: target for target in TARGETS.values() for each in target.model_types}}
    similar = get_close_matches(str(name).lower(), known, n=3)
    return f"must be one of {', '.join(TARGETS)}, or a model type of one of these" + (
        f"; similar ones are {', '.join(similar)}" if similar else ""
    )


def _check_dtype(dtype: "str | torch.dtype | None") -> str | None:
    """The spelling that safetensors uses."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConversionError(f"dtype={name!r}: must be one of {', '.join(DTYPES)}.")
    return next(code for code, float_dtype in FLOAT_DTYPES.items() if float_dtype == name)


def _check_repo_id(repo_id: str | None) -> None:
    if repo_id is None:
        return
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConversionError(f"push_to_hub={repo_id!r}: not the name of a Hub repository. {one_line(error)}") from (
            without_token(error)
        )


def _companion_files(folder: Path) -> dict[str, Path]:
    templates = sorted(path.name for path in (folder / CHAT_TEMPLATE_FOLDER).glob("*.jinja"))
    names = [*COMPANION_FILES, *(f"{CHAT_TEMPLATE_FOLDER}/{name}" for name in templates)]
    found = {name: path for name in names if (path := find_file(folder, name)) is not None}
    for path in found.values():
        check_text_size(path)
    return found


def _code_warnings(tokenizer_config: dict[str, Any]) -> list[str]:
    if "auto_map" not in tokenizer_config:
        return []
    return [
        "The tokenizer needs code of its own (auto_map in tokenizer_config.json). Neither the code nor the pointer to "
        "it is copied: the converted folder has the tokenizer that transformers makes of the other files."
    ]


def _tokenizer_class(source: str | os.PathLike, folder: Path, stock_config: PreTrainedConfig | None) -> str | None:
    """The class that transformers makes of a source's files, where its model type is known."""
    companions = _companion_files(folder)
    if stock_config is None:
        return None
    content = read_json(companions[TOKENIZER_CONFIG_FILE]) if TOKENIZER_CONFIG_FILE in companions else {}
    return resolve_tokenizer(companions, content, stock_config, None, hub_id_of(source, folder)).class_name


def _tokenizer_warnings(tokenizer: SourceTokenizer) -> list[str]:
    if tokenizer.problem is None:
        return []
    return [
        f"Transformers cannot load the source's tokenizer here, so it was copied without a check: {tokenizer.problem}"
    ]


def _legacy_generation_config(
    source_config: dict[str, Any], config: PreTrainedConfig, companions: dict[str, Path]
) -> dict[str, str]:
    """Old checkpoints keep generation parameters in config.json, from where saving the configuration drops them."""
    if GENERATION_CONFIG_FILE in companions:
        return {}
    with config_errors("Parameters of generation in config.json: "):
        known = GenerationConfig().to_dict()
        parameters = {key: value for key, value in source_config.items() if key in known}
        legacy = GenerationConfig.from_model_config(deepcopy(parameters))
    if legacy.to_diff_dict() == GenerationConfig.from_model_config(config).to_diff_dict():
        return {}
    legacy._from_model_config = False
    return {GENERATION_CONFIG_FILE: legacy.to_json_string()}


def _check_generation_config(companions: dict[str, Path], texts: dict[str, str]) -> None:
    """With values that the host refuses the converted model would not load."""
    path = companions.get(GENERATION_CONFIG_FILE)
    if path is not None:
        text = texts.get(GENERATION_CONFIG_FILE)
        with config_errors(f"{path}: "):
            GenerationConfig.from_dict(read_json(path) if text is None else json.loads(text))


def _verify_config(config: PreTrainedConfig, folder: Path) -> None:
    written = type(config).from_pretrained(folder).to_dict()
    # these say where a configuration comes from
    ignored = {"transformers_version", "auto_map", "_name_or_path"}
    differing = [key for key, value in config.to_dict().items() if key not in ignored and written.get(key) != value]
    if differing:
        raise ConversionError(f"config.json does not give the same configuration back: {', '.join(differing)}.")


def _check_token(token: str | bool | None) -> str | bool | None:
    """The token without the white space that files and clipboards add; None for none, as for an empty one."""
    if not isinstance(token, str):
        return token
    token = token.strip()
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConversionError("token: must be one word of ASCII characters. It is not shown here.")
    return token or None


def _push(dest: Path, repo_id: str, token: str | bool | None, private: bool) -> str:
    api = HfApi(token=token)
    try:
        address = api.create_repo(repo_id, private=private or None, exist_ok=True)
        # one that was there already keeps its visibility
        if private and not api.model_info(repo_id).private:
            raise ConversionError("it is there already and is public, and private was asked for.")
        # weights of an earlier upload must not stay beside the new ones, nor what the host would read besides
        earlier = [*WEIGHT_FILES, *READ_FILES, f"{CHAT_TEMPLATE_FOLDER}/*.jinja", *sorted(own_code_names())]
        api.upload_folder(
            repo_id=repo_id, folder_path=dest, commit_message="Convert with depthmix", delete_patterns=earlier
        )
    # without a network the errors are those of the Hub client's HTTP library
    except Exception as error:
        raise ConversionError(
            f"The conversion is complete in {dest}, but pushing to {repo_id} failed: {one_line(error)}",
            f"To upload it later: {shlex.join(['hf', 'upload', repo_id, str(dest)])}",
        ) from without_token(error)
    return str(address)
