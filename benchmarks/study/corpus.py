# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The text that the models learn: Python sources that lie on every machine with PyTorch, or text files in folders.

Packages are split into those to train on and those held out. A file that was seen before is left out, and so is a long
line that was seen before; short ones stay, since without them code falls apart. What is held out is read last, so no
long line of it is in the training text. The tokenizer, a byte-level BPE, is trained on the training text only.
"""

import hashlib
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


END_OF_TEXT = "<|endoftext|>"
# of which a repetition is left out
LONG_LINE = 24
LARGEST_FILE = 1_000_000
SHORTEST_DOCUMENT = 100


@dataclass(frozen=True)
class Split:
    """
    Args:
        held_out (`float`):
            Part of the bytes that is held out, in whole packages.
        largest (`float`):
            Part of the bytes that a package may have to be held out; if all have more, the smallest is.
    """

    held_out: float = 0.03
    largest: float = 0.01


@dataclass
class Description:
    """What a corpus was made of; it is kept beside it, and its checksum with every result."""

    vocab_size: int
    train_tokens: int = 0
    held_out_tokens: int = 0
    train_bytes: int = 0
    held_out_bytes: int = 0
    bytes_before: int = 0
    checksum: str = ""
    train_packages: dict[str, int] = field(default_factory=dict)
    held_out_packages: dict[str, int] = field(default_factory=dict)
    licences: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Corpus:
    """
    Tokens as one stream each, memory-mapped; `token_bytes[i]` is the number of bytes that token `i` stands for, none
    for the one that ends a document.
    """

    description: Description
    train: np.ndarray
    held_out: np.ndarray
    token_bytes: np.ndarray


def python_roots() -> list[Path]:
    """Where this machine's Python packages are: of the environment, and the standard library."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(Path(paths[name]).resolve() for name in ("purelib", "platlib", "stdlib")))


def package_of(name: str) -> str:
    """Folders of one project often share the first part of their names: `torch`, `_torch_tools`, `torch_geometric`."""
    return re.split(r"[_.\-]", name.lstrip("_").lower())[0]


def find_packages(roots: Iterable[Path], suffixes: tuple[str, ...] = (".py",)) -> dict[str, list[Path]]:
    """Text files by package, the first part of their path below a root. Both are sorted."""
    found: dict[str, set[Path]] = {}
    roots = [Path(root) for root in roots]
    for root in roots:
        if not root.is_dir():
            raise FileNotFoundError(f"{root} is no folder to read text from.")
        nested = {other for other in roots if other != root and other.is_relative_to(root)}
        for folder, folders, files in os.walk(root):
            # environments keep packages inside the standard library's folder
            folders[:] = [
                each
                for each in folders
                if each not in ("__pycache__", "site-packages", "dist-packages") and Path(folder, each) not in nested
            ]
            for name in files:
                path = Path(folder, name)
                if name.endswith(suffixes) and not path.is_symlink():
                    found.setdefault(package_of(path.relative_to(root).parts[0]), set()).add(path)
    return {package: sorted(found[package]) for package in sorted(found)}


def split_packages(sizes: dict[str, int], split: Split) -> tuple[list[str], list[str]]:
    """Those to train on and those held out, chosen by a hash of their names from those that are not too large."""
    total, taken, held_out = sum(sizes.values()), 0, []
    largest = max(split.largest * total, min((size for size in sizes.values() if size), default=0))
    for package in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if 0 < sizes[package] <= largest and taken < split.held_out * total:
            held_out.append(package)
            taken += sizes[package]
    if not held_out or len(held_out) == len(sizes):
        raise ValueError(
            f"held_out={split.held_out}, largest={split.largest}: {len(sizes)} packages cannot be split so; one at least "
            "must be held out and one left."
        )
    return sorted(set(sizes) - set(held_out)), sorted(held_out)


def read_text(path: Path) -> str:
    """The file's text, or nothing where it is no UTF-8, or too large to be written by people."""
    if path.stat().st_size > LARGEST_FILE:
        return ""
    try:
        return path.read_text(encoding="utf-8").replace("\0", "")
    except (UnicodeDecodeError, OSError):
        return ""


def documents(paths: Iterable[Path], seen: set[bytes | int]) -> Iterator[str]:
    """The texts of files without what was seen before, which is remembered in `seen`."""
    with ThreadPoolExecutor(4) as pool:
        for text in pool.map(read_text, paths):
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen:
                continue
            seen.add(digest)
            kept = []
            for line in text.split("\n"):
                stripped = line.strip()
                if len(stripped) >= LONG_LINE:
                    # the interpreter's hash differs from run to run, which matters to nothing but memory
                    key = hash(stripped)
                    if key in seen:
                        continue
                    seen.add(key)
                kept.append(line.rstrip())
            text = "\n".join(kept).strip("\n")
            if len(text) >= SHORTEST_DOCUMENT:
                yield text + "\n"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def bytes_of_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """How many bytes each token stands for: byte-level BPE writes each byte as one character of its own alphabet."""
    lengths = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = 0 if token == END_OF_TEXT else len(token)
    return lengths


def write_tokens(texts: list[str], tokenizer: Tokenizer, path: Path) -> int:
    """Appends nothing and keeps nothing else in memory: writes the stream of all texts, and returns its length."""
    end, count = tokenizer.token_to_id(END_OF_TEXT), 0
    with open(path, "wb") as file:
        for start in range(0, len(texts), 2048):
            for encoding in tokenizer.encode_batch_fast(texts[start : start + 2048], add_special_tokens=False):
                tokens = np.array([*encoding.ids, end], dtype=np.uint16)
                count += len(tokens)
                file.write(tokens.tobytes())
    return count


def licences_of(packages: set[str]) -> dict[str, str]:
    """What the distributions that are installed say of their licences, by package."""
    found = {}
    for distribution in metadata.distributions():
        name = package_of(distribution.metadata["Name"] or "")
        if name in packages:
            fields = distribution.metadata
            told = fields.get("License-Expression") or fields.get("License") or ""
            classifiers = [each.rsplit(" :: ", 1)[1] for each in fields.get_all("Classifier", []) if "License" in each]
            found[name] = (told.strip().splitlines() or classifiers or ["not told"])[0][:80]
    return dict(sorted(found.items()))


def build_corpus(
    folder: Path,
    roots: Iterable[Path],
    *,
    vocab_size: int = 2048,
    split: Split | None = None,
    suffixes: tuple[str, ...] = (".py",),
    sample_bytes: int = 30_000_000,
) -> Corpus:
    """
    Builds the corpus in a folder; where it is finished already, reads it. Nothing is left behind by a build that does
    not finish.
    """
    if (folder / "corpus.json").exists():
        return load_corpus(folder)
    packages = find_packages(roots, suffixes)
    sizes = {package: sum(path.stat().st_size for path in paths) for package, paths in packages.items()}
    training, held_out = split_packages(sizes, split or Split())
    description = Description(vocab_size=vocab_size, bytes_before=sum(sizes.values()))
    seen: set[bytes | int] = set()
    texts: dict[str, list[str]] = {"train": [], "held_out": []}
    for part, names in (("train", training), ("held_out", held_out)):
        for package in names:
            found = list(documents(packages[package], seen))
            count = sum(len(text.encode()) for text in found)
            if found:
                getattr(description, f"{part}_packages")[package] = count
            texts[part] += found
        setattr(description, f"{part}_bytes", sum(getattr(description, f"{part}_packages").values()))
        if not texts[part]:
            raise ValueError(f"There is no text for the {part} part in {', '.join(map(str, roots))}.")

    every = max(1, description.train_bytes // sample_bytes)
    tokenizer = train_tokenizer(texts["train"][::every], vocab_size)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}: the text gives {tokenizer.get_vocab_size()} tokens; take that or more text."
        )
    partial = folder.with_name(f"{folder.name}.partial.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer.save(str(partial / "tokenizer.json"))
    digest = hashlib.sha256()
    for part in texts:
        setattr(description, f"{part}_tokens", write_tokens(texts[part], tokenizer, partial / f"{part}.bin"))
        digest.update((partial / f"{part}.bin").read_bytes())
    description.checksum = digest.hexdigest()[:16]
    description.licences = licences_of({*training, *held_out})
    (partial / "corpus.json").write_text(json.dumps(asdict(description), indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return load_corpus(folder)


def load_corpus(folder: Path) -> Corpus:
    description = Description(**json.loads((folder / "corpus.json").read_text(encoding="utf-8")))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    streams = [np.memmap(folder / f"{part}.bin", dtype=np.uint16, mode="r") for part in ("train", "held_out")]
    return Corpus(description, *streams, bytes_of_tokens(tokenizer))
