# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The README.md of a converted checkpoint."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from yaml import YAMLError

from .checkpoint_source import is_hub_id
from .conversion_target import ConversionTarget
from .plain_text import markdown_code, markdown_text, printable
from .reports import ConversionReport


SUPPORTED_TRANSFORMERS = "transformers 5.16.1 to 5.24"
# a license and what it needs beside itself
_LICENSE_KEYS = ("license", "license_name", "license_link")


def read_card_metadata(path: Path | None) -> tuple[dict, list[str]]:
    """The metadata block of a model card, empty if there is none, and a warning if it cannot be read."""
    if path is None:
        return {}, []
    try:
        return ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.to_dict(), []
    except (ValueError, YAMLError):
        return {}, [f"The metadata of the source's {path.name} is not valid, so its license was not carried over."]


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

{report.function_note}
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
