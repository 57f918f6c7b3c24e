# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The hashes of the code that each release writes into saved models."""

import functools
import json
from pathlib import Path


RECORD = Path(__file__).with_name("released_code.json")


@functools.cache
def released_hashes() -> dict[str, dict[str, dict[str, dict[str, str]]]]:
    """By version and model type, the `auto_map` and, as `files`, the SHA-256 of each file of code by its name."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def record_release() -> None:
    """
    Adds the code that this version writes to the record. Part of making a release.

    Raises:
        `ValueError`: if the record has other hashes for this version: what is released does not change.
    """
    # not at the top: they need this module
    from depthmix.auto import AUTO_MAPS
    from depthmix.hub import collect_remote_code, hash_code
    from depthmix.version import __version__

    written = {
        model_type: {
            "auto_map": auto_map,
            "files": {name: hash_code(code) for name, code in collect_remote_code(auto_map).items()},
        }
        for model_type, auto_map in AUTO_MAPS.items()
    }
    record = released_hashes()
    if record.get(__version__, written) != written:
        raise ValueError(f"{__version__} is recorded with other code. Give this version a number of its own.")
    RECORD.write_text(json.dumps(record | {__version__: written}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record_release()
