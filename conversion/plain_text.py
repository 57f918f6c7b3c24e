# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Text that comes from files, servers and users, made fit for a terminal, a log and a model card.

Names of tensors and files, keys and values of configurations and answers of servers are other people's text. They may
hold escape sequences, line breaks, markup or a token, and may be very long.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator

from huggingface_hub import get_token


# of one line; a shard's name, a path or a list of options fits
LINE_LIMIT = 2000
_HIDDEN = "hf_***"
# what has the form of a secret, and what stands before it and tells that it is one. In a text that Python has escaped,
# what stands before a word can end in a letter
_SECRET = re.compile(
    r"""
    (?:\b|(?<=\\[nrt])|(?<=\\x[0-9a-f]{2})|(?<=\\u[0-9a-f]{4}))(?:hf|api_org)_[a-z0-9_-]{6,}(?:\.[a-z0-9_-]+)*
    | (?<=://)(?:[^\s/@]*:\S*|[^\s/@]+)(?=@)
    | (?P<before>
        \bbearer(?:\ |%20)
        | \bauthorization["']?\s*[:=]\s*["']?(?:\w+\s+)?
        | \b(?:hf|hugging_face_hub)_token["']?\s*[:=]\s*["']?
        | [?&][\w-]*(?:token|signature|credential|key|password|secret)=
      )[^\s&"',]+
    | (?P<before_line>\bcookie["']?\s*:\s*["']?)[^"'\r\n]+
    """,
    re.IGNORECASE | re.VERBOSE,
)
# whose addresses can hold a password
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# what Markdown and HTML give a meaning to, and what becomes a link by itself
_MARKUP = re.compile(r"[`<>\[\]|\\]|://|www\.|@")
_known_tokens: set[str] = set()


def printable(text: object, limit: int = LINE_LIMIT) -> str:
    """One line of text: what is not printable is escaped as in Python, and the middle of what is too long left out."""
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in mask_tokens(str(text)))
    if len(line) <= limit:
        return line
    kept = limit // 2
    return f"{line[:kept]} ... ({len(line) - 2 * kept} characters left out) ... {line[-kept:]}"


def one_line(error: object) -> str:
    """What a library says, without its line breaks and indentation. Not for names from files, which are escaped."""
    return " ".join(str(error).split())


def printable_lines(text: object, limit: int = LINE_LIMIT) -> str:
    """A message of several lines, each of which is made [`printable`]."""
    # `splitlines` would take separators that only some programs take for line breaks
    return "\n".join(printable(line, limit) for line in str(text).split("\n"))


def markdown_code(text: object, limit: int = 500) -> str:
    """One line of text as a code span, which nothing in it can leave."""
    line = printable(text, limit)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def markdown_text(text: object, limit: int = LINE_LIMIT) -> str:
    """One line of prose; as a code span if there is anything in it that could be markup or a link."""
    line = printable(text, limit)
    return markdown_code(line, limit) if _MARKUP.search(line) else line


def mask_tokens(text: str) -> str:
    """The text without tokens: those of [`hidden_tokens`], and whatever has the form of one."""
    for token in sorted(_known_tokens, key=len, reverse=True):
        text = text.replace(token, _HIDDEN)
    return _SECRET.sub(lambda found: (found["before"] or found["before_line"] or "") + _HIDDEN, text)


@contextlib.contextmanager
def hidden_tokens(token: str | bool | None) -> Iterator[None]:
    """
    Within the block, neither messages nor what the Hub's client logs shows this token, the one that is logged in or
    the password of a proxy, whatever their form is. A server may send them back.
    """
    # the Hub's client sends the token of the environment or of a login where none is given
    proxies = [os.environ.get(name, "") for each in _PROXIES for name in (each, each.upper())]
    logins = [proxy.rpartition("@")[0].rpartition("://")[2] for proxy in proxies]
    passwords = [login.partition(":")[2] for login in logins]
    secrets = (token, get_token(), *logins, *passwords)
    tokens = {each for each in secrets if isinstance(each, str) and len(each) > 3} - _known_tokens
    _known_tokens.update(tokens)
    # a filter of a logger sees its own records only, one of a handler those of all loggers below
    handlers = [handler for name in (None, "huggingface_hub", "httpx") for handler in logging.getLogger(name).handlers]
    for handler in handlers:
        handler.addFilter(_mask_record)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_mask_record)
        _known_tokens.difference_update(tokens)


def without_token(error: Exception) -> Exception | None:
    """The error as the cause of another one; None if its own text, which a traceback shows, holds a token."""
    text = f"{error} {error!r}"
    return error if mask_tokens(text) == text else None


def _mask_record(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if (masked := mask_tokens(message)) != message:
        record.msg, record.args = masked, ()
    return True
