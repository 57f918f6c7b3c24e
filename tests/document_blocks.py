# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The code blocks of the Markdown documents, and what is done with each.

- Python whose first line is a comment with the path of a file is an excerpt, which is compared with that file.
- Other Python runs, all blocks of a document in one namespace and in order. A comment below a `print` that begins with
  a parenthesis is what is printed.
- Commands for a shell are run if they are those of `depthmix` and have no placeholder in capitals. Others are checked
  against what they name: the parser of the command, the targets of the Makefile, extras, modules, scripts and their
  options.
- A block below `<!-- not run: REASON -->` is left out. There is a list of reasons, and each has to show in the block.
"""

import configparser
import re
import shlex
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "*/README.md", "benchmarks/study/README.md")
    for path in ROOT.glob(pattern)
    # of a model that was saved in the clone it is the card
    if not (path.parent / "config.json").exists()
)
# reason not to run a block -> what must then be in it
REASONS = {
    "needs the Hub": r"push_to_hub|--push-to-hub",
    "needs the released weights": r"-3B\b",
    "starts a server": r"\bserve\b",
    "needs several processes": r"torchrun|accelerate launch",
    "needs nnsight": r"^import nnsight",
    "needs llm-compressor": r"llmcompressor",
    "needs matplotlib": r"\bplot\b|matplotlib",
    "shows a form": r"^from \.\w+ import",
}
LANGUAGES = ("bash", "python", "text")
# what would be code in a block that says it is none
LOOKS_LIKE_CODE = re.compile(r"^(depthmix|python|pip|make|git|torchrun|accelerate|import|from) \S", re.MULTILINE)
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b")


@dataclass(frozen=True)
class Block:
    """A fenced block: its document, the number of its first line, and the reason that a mark above it gives."""

    document: Path
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def is_excerpt(self) -> bool:
        return self.language == "python" and re.match(r"# \S+\.py\n", self.text) is not None

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks_of(document: Path) -> list[Block]:
    """The fenced blocks of a document."""
    found, opened, above = [], None, ""
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        fence = re.match(r"\s*```(.*)", line)
        if opened is None and fence:
            mark = re.fullmatch(r"<!-- not run: (.*) -->\s*", above)
            opened = (number + 1, fence[1].strip(), mark[1] if mark else None)
            text = ""
        elif fence:
            found.append(Block(document, opened[0], opened[1], text, opened[2]))
            opened = None
        elif opened is not None:
            text += line
        above = line
    assert opened is None, f"{document}: the block of line {opened[0]} is not closed"
    return found


def commands_of(block: Block) -> list[list[str]]:
    """The commands of a block for a shell, as words; lines that only set variables of the shell are left out."""
    lines = re.sub(r"\\\n", " ", block.text).splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if not re.match(r"[A-Z]+=", line)]
    return [words for words in commands if words]


def runs_here(words: list[str]) -> bool:
    """Whether a command is one that a test runs."""
    return words[0] == "depthmix" and not any(PLACEHOLDER.fullmatch(word) for word in words)


def check_command(words: list[str]) -> None:
    """Compares a command that is not run with what it names."""
    name, *rest = words
    if name == "depthmix":
        from depthmix.conversion.cli import _make_parser

        _make_parser().parse_args(rest)
    elif name == "make":
        # a variable of make may follow
        targets = [word for word in rest if "=" not in word]
        assert targets and all(re.search(rf"^{each}:", _read("Makefile"), re.MULTILINE) for each in targets), words
    elif words[:2] == ["pip", "install"]:
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        extras = {each for word in rest for each in re.findall(r"\[(.*)\]", word) for each in each.split(",")}
        assert extras <= {*setup["options.extras_require"]}, words
        assert all(re.fullmatch(r"-e|\.(\[.*\])?", word) for word in rest[1:]), words
    elif words[:2] == ["accelerate", "launch"] or name == "torchrun":
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        assert all((ROOT / word).exists() for word in words[:script] if word.endswith(".yaml")), words
        check_command(["python", *words[script:]])
    elif name == "python":
        source = _script(rest)
        for option in (word.partition("=")[0] for word in rest if word.startswith("--")):
            assert f'"{option}"' in source, f"{words}: no option {option}"
    elif name == "lm_eval" or words[:2] == ["transformers", "chat"]:
        pass
    else:
        raise AssertionError(f"nobody knows how to check {words}")


def _script(rest: list[str]) -> str:
    """The text in which the options of a command for Python are defined."""
    if rest[:2] == ["-m", "pytest"]:
        paths = [word for word in rest[2:] if "/" in word]
        assert paths and all((ROOT / path).exists() for path in paths), rest
        return ""
    if rest[0] == "-m":
        path = ROOT / rest[1].replace(".", "/")
        return _read(path / "__main__.py" if path.is_dir() else path.with_suffix(".py"))
    source = _read(rest[0])
    # options that several scripts share stand in a module beside them
    modules = re.findall(r"^from (\w+) import", source, re.MULTILINE)
    beside = [Path(rest[0]).with_name(f"{module}.py") for module in modules]
    return source + "".join(_read(path) for path in beside if (ROOT / path).exists())


def _read(path: Path | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
