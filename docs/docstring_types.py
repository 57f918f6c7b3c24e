# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Docstrings as the API reference reads them. Ours are written as those of transformers, with Markdown in the types and
several names on a line; the parser takes what stands between parentheses as it is.
"""

import re

from griffe import Docstring, Extension, Object


# "name (`type`), other (`type`, *optional*):"
_PARAMETERS = re.compile(r"^(\s+)(\w+(?:, \w+)* \(.*\)):$", re.MULTILINE)
_PAIR = re.compile(r"(\w+)(?: \(((?:[^()]|\([^()]*\))*)\))?(?:, |$)")
# "[`Error`]: when" and "`Error`: when"
_RAISED = re.compile(r"^(\s+)\[?`(\w+)`\]?: ", re.MULTILINE)
# "What [`function`] raises.", which names no error
_PASSED_ON = re.compile(r"^(\s+)What (\[`\w+`\] raises\.)$", re.MULTILINE)


class PlainTypes(Extension):
    """Takes the Markdown out of types, and names that share a text are one entry."""

    def on_object(self, *, obj: Object, **kwargs) -> None:
        if isinstance(obj.docstring, Docstring):
            text = _PARAMETERS.sub(_one_entry, obj.docstring.value)
            text = _PASSED_ON.sub(r"\1Exception: what \2", text)
            obj.docstring.value = _RAISED.sub(r"\1\2: ", text)


def _one_entry(match: re.Match) -> str:
    pairs = _PAIR.findall(match[2])
    types = dict.fromkeys(re.sub(r"[`*]", "", kind) for _, kind in pairs if kind)
    return f"{match[1]}{', '.join(name for name, _ in pairs)} ({'; '.join(types)}):"
