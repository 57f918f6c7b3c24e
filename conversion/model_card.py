# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The README.md of a converted checkpoint."""

import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from .checkpoint_io import read_text
from .checkpoint_source import is_hub_id
from .conversion_target import ConversionTarget
from .errors import ConversionError
from .plain_text import markdown_code, markdown_text, printable
from .reports import ConversionReport, describe_start


SUPPORTED_TRANSFORMERS = "transformers 5.16.1 to 5.24"
# the block between two lines of dashes at the beginning of a card; more text than any needs takes minutes to parse
_METADATA = re.compile(r"\s*---[ \t]*\r?\n(.*?)(?:^---[ \t]*\r?$|\Z)", re.DOTALL | re.MULTILINE)
_METADATA_LIMIT = 300_000
# a license and what it needs beside itself
_LICENSE_KEYS = ("license", "license_name", "license_link")


def read_card_metadata(path: Path | None) -> tuple[dict, list[str]]:
    """The metadata block of a model card, empty if there is none, and a warning if it cannot be read."""
    if path is None:
        return {}, []
    try:
        block = _METADATA.match(read_text(path))
        metadata = yaml.safe_load(block[1][:_METADATA_LIMIT]) if block else {}
    # the card is other people's text, and no more than its license is taken from it
    except (ConversionError, yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        metadata = None
    if metadata is None or not isinstance(metadata, dict):
        return {}, [f"The metadata of the source's {path.name} is not valid, so its license was not carried over."]
    return {key: value for key, value in metadata.items() if key in (*_LICENSE_KEYS, "base_model")}, []


def _is_plain(value: Any) -> bool:
    """Whether a value of metadata is a short text of one line, as names and links of licenses are."""
    return isinstance(value, str) and 0 < len(value) <= 200 and printable(value) == value


def _base_models(value: Any) -> str | list[str] | None:
    """The Hub ids among what a source's card names as its base."""
    named = [each for each in (value if isinstance(value, list) else [value]) if _is_plain(each) and is_hub_id(each)]
    return named[0] if len(named) == 1 else named or None


def make_model_card(
    report: ConversionReport, target: ConversionTarget, model_class: str, source_metadata: dict, hub_id: str | None
) -> str:
    """
    Text of the card. The base model is the source's Hub id, or what the source's own card names; the license is that
    of the source's card.
    """
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=hub_id or _base_models(source_metadata.get("base_model")),
        tags=list(target.tags),
        **{key: source_metadata[key] for key in _LICENSE_KEYS if _is_plain(source_metadata.get(key))},
    )
    origin = f"[`{hub_id}`](https://huggingface.co/{hub_id})" if hub_id else "a local checkpoint"
    counts = ", ".join(f"{len(getattr(report, kind))} {kind}" for kind in ("kept", "renamed", "dropped", "new"))
    changes = "\n".join(f"- {markdown_code(change)}" for change in report.config_changes)
    warnings = "".join(f"\n> {markdown_text(warning)}\n" for warning in report.warnings)
    return f"""---
{metadata.to_yaml().strip()}
---

# {model_class} from {hub_id or report.source_kind}

This is {origin} ({report.source_kind}), converted to `{target.name}` with depthmix. {target.summary}

{describe_start(report.retrofit)} {report.function_note}
{warnings}
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/or/id", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("path/or/id", trust_remote_code=True)
```

The code of the model is in this folder. It needs {SUPPORTED_TRANSFORMERS}. After `import depthmix` the code of that
package is used instead, and `trust_remote_code` is not needed.

## What changed

Tensors: {counts}. Configuration:

{changes}
"""
