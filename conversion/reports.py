# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What a conversion did or would do, and what a checkpoint is, as data and as text."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from .checkpoint_io import Checkpoint
from .checkpoint_source import TOKENIZER_FILES
from .plain_text import printable, printable_lines


# characters of one name, and of one configuration key with its value
_NAME_LIMIT = 200
_VALUE_LIMIT = 500


@dataclass
class ConversionReport:
    """
    The outcome of [`convert`].

    Args:
        source (`str`), source_kind (`str`), evidence (`list` of `str`):
            What was converted, what it was taken for, and why.
        target (`str`), destination (`Path`):
            Model type and folder of the result.
        config_changes (`list` of `str`):
            Differences between the source's configuration and the result's.
        function_note (`str`):
            Whether the result computes what the source did.
        retrofit (`bool`, *optional*):
            Of a vanilla source, whether the result starts with its function, or as the method was published; None for
            a source with trained mixing.
        sources (`list` of `str`):
            What each layer reads of earlier ones, layers that read the same together; empty for methods in which all
            layers read in the same way.
        kept, renamed, dropped, new (`list` of `str`):
            Names of the tensors: in the source's names where they were dropped, in the target's otherwise.
        nbytes (`int`):
            Bytes of all tensors written.
        files (`list` of `str`):
            Files in the destination, or, in a dry run, those that would be.
        not_copied (`list` of `str`):
            Files and folders of the source that neither travel nor are converted.
        warnings (`list` of `str`):
            What needs attention.
        dry_run (`bool`):
            Whether nothing was written.
        push_to_hub (`str`, *optional*), pushed_to (`str`, *optional*):
            Repository on the Hub that was asked for, and its address once the result is there.
    """

    source: str
    source_kind: str
    evidence: list[str]
    target: str
    destination: Path
    config_changes: list[str]
    function_note: str
    kept: list[str]
    renamed: list[str]
    dropped: list[str]
    new: list[str]
    nbytes: int
    files: list[str]
    not_copied: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    dry_run: bool = False
    push_to_hub: str | None = None
    pushed_to: str | None = None
    retrofit: bool | None = None
    sources: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            "Plan (nothing written)" if self.dry_run else "Converted",
            f"  source:   {self.source}: {self.source_kind} ({'; '.join(self.evidence)})",
            f"  target:   {self.target} in {self.destination}",
            f"  tensors:  {len(self.kept)} kept, {len(self.renamed)} renamed, {len(self.dropped)} dropped, "
            f"{len(self.new)} new; {format_bytes(self.nbytes)}",
            *(f"    dropped {printable(name, _NAME_LIMIT)}" for name in self.dropped),
            *(f"    new {names}" for names in _of_all_layers(self.new)),
            "  config:",
            *(f"    {printable(change, _VALUE_LIMIT)}" for change in self.config_changes),
            *(f"  {'' if i else 'mixing:':9} {line}" for i, line in enumerate(self.sources)),
            f"  files:    {_shorten(self.files)}",
            *([f"  not copied: {_shorten(self.not_copied)}"] if self.not_copied else []),
            *(["  tokenizer: none, as in the source"] if set(self.files).isdisjoint(TOKENIZER_FILES) else []),
            f"  start:    {describe_start(self.retrofit)}",
            f"  function: {self.function_note}",
            *(f"  warning:  {warning}" for warning in self.warnings),
        ]
        if self.pushed_to:
            lines.append(f"  pushed:   {self.pushed_to}")
        elif self.push_to_hub:
            lines.append(f"  push:     would go to {self.push_to_hub} on the Hub")
        return "\n".join(printable(line) for line in lines)


@dataclass
class CheckpointDescription:
    """
    The outcome of [`inspect_checkpoint`].

    Args:
        source (`str`), kind (`str`), layout (`str`), evidence (`list` of `str`):
            What was inspected, what it is (title and short name of the layout), and why.
        config (`dict`), own_config (`dict`):
            Content of config.json, and, of a model of this package, the fields that its backbone does not have.
        num_tensors, num_parameters, nbytes (`int`):
            Size.
        dtypes (`dict`):
            Number of tensors by dtype, in the spelling of safetensors.
        files (`list` of `str`):
            Weight files.
        conversions (`dict`):
            Target to what the checkpoint would become, or to the reason why it cannot.
        warnings (`list` of `str`):
            What needs attention.
        tokenizer (`str`, *optional*):
            The class that transformers makes of the tokenizer's files; None without such files.
    """

    source: str
    kind: str
    layout: str
    evidence: list[str]
    config: dict
    own_config: dict
    num_tensors: int
    num_parameters: int
    nbytes: int
    dtypes: dict[str, int]
    files: list[str]
    conversions: dict[str, str]
    warnings: list[str]
    tokenizer: str | None = None

    def __str__(self) -> str:
        shape = (
            *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "vocab_size", "tie_word_embeddings"),
        )
        shown = {key: self.config[key] for key in shape if key in self.config} | self.own_config
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in self.dtypes.items())
        lines = [
            f"{self.source}: {self.kind} ({'; '.join(self.evidence)})",
            f"  tokenizer: {self.tokenizer or 'none'}",
            f"  config:   {', '.join(printable(f'{key}={value}', _VALUE_LIMIT) for key, value in shown.items())}",
            f"  tensors:  {self.num_tensors} ({dtypes}), {self.num_parameters:,} values, {format_bytes(self.nbytes)}",
            f"  files:    {_shorten(self.files)}",
            *(f"  warning:  {warning}" for warning in self.warnings),
        ]
        # a reason may have several lines, which the error that gave it has made of single ones
        outcomes = [printable_lines(f"  to {target}: {outcome}") for target, outcome in self.conversions.items()]
        return "\n".join([*(printable(line) for line in lines), *outcomes])


def describe_start(retrofit: bool | None) -> str:
    """How the mixing of a converted model starts, as a sentence."""
    if retrofit is None:
        return "Its mixing is what the source was trained with."
    return "It is a retrofit." if retrofit else "It starts as the method was published, or as the options say."


def _shorten(names: list[str], limit: int = 12) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(printable(name, _NAME_LIMIT) for name in names[:limit]) + more


def describe_sources(config: PreTrainedConfig, limit: int = 6) -> list[str]:
    """What each layer reads of earlier ones, by the property of the configuration that says so."""
    if hasattr(config, "depth_sources"):
        found = [(f"layer {i}", _listed("layer", read)) for i, read in enumerate(config.depth_sources)]
    elif hasattr(config, "average_sources"):
        found = [
            (f"after layer {i}", _listed("output", read) + " (0: the embedding)" if read else "")
            for i, read in enumerate(config.average_sources, start=1)
        ]
    elif hasattr(config, "depth_slots"):
        found = [
            (f"layer {i}", f"slots {start} to {stop - 1}" if stop > start else "")
            for i, (start, stop) in enumerate(config.depth_slots)
        ]
    elif hasattr(config, "num_finished_sources"):
        *sites, last = config.num_finished_sources
        found = [(f"sub-layer {i}", _finished(count)) for i, count in enumerate(sites)]
        found.append(("final norm", _finished(last)))
    else:
        return []
    lines = []
    for read, group in itertools.groupby(found, key=lambda pair: pair[1]):
        first, *others = [reader for reader, _ in group]
        if read:
            lines.append(f"{first}{f' to {others[-1]}' if others else ''}: {read}")
    # the last ones read the most
    return lines if len(lines) <= limit else [*lines[: limit - 2], f"… ({len(lines) - limit + 1} more)", lines[-1]]


def _listed(what: str, read: Sequence[int], limit: int = 12) -> str:
    shown = [str(i) for i in read] if len(read) <= limit else [*map(str, read[: limit - 1]), "…", str(read[-1])]
    return f"{what}{'s' if len(read) > 1 else ''} {', '.join(shown)}" if read else ""


def _finished(count: int) -> str:
    return f"{count} finished source{'s' if count > 1 else ''} and the running sum" if count else ""


def describe_dtypes(checkpoint: Checkpoint) -> dict[str, int]:
    return dict(Counter(tensor.dtype for tensor in checkpoint.tensors.values()).most_common())


def own_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that the backbone of a model of this package does not have."""
    backbone: Any = next(base for base in type(config).__mro__ if base.__module__.startswith("transformers."))
    names = [name for name in type(config).__dataclass_fields__ if name not in backbone.__dataclass_fields__]
    return {name: getattr(config, name) for name in names}


def describe_config_changes(stock_config: PreTrainedConfig, config: PreTrainedConfig) -> list[str]:
    """Fields that differ, that the result does not have, and that are the target's own."""
    before, after, own = stock_config.to_dict(), config.to_dict(), own_fields(config)
    # what a file is, of which the model type says enough
    ignored = {"transformers_version", "auto_map", "architectures"}
    changes = [f"{key}: {value!r} dropped" for key, value in before.items() if key not in after and key not in ignored]
    for key, value in after.items():
        if key in before and before[key] != value and key not in ignored:
            changes.append(f"{key}: {before[key]!r} -> {value!r}")
        elif key not in before and key in own:
            changes.append(f"{key}: {value!r} (new)")
    return changes


def _of_all_layers(names: Sequence[str]) -> list[str]:
    """Names with the layer left out, and how many there are of each."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return [name if count == 1 else f"{name} ({count})" for name, count in counts.items()]


def format_bytes(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"
