# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The text that the models learn: Python sources that lie on every machine with PyTorch, or text files in folders.

Packages are split into those to train on and those held out. A file that was seen before is left out, and so is a long
line that was seen before; short ones stay, since without them code falls apart. What is held out is read last, so no
long line of it is in the training text. The tokenizer, a byte-level BPE, is trained on the training text only.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
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
                # what says where this package was installed from would make each machine's corpus its own
                is_link = path.is_symlink() or name.startswith("__editable__")
                if name.endswith(suffixes) and not is_link:
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
            f"held_out={split.held_out}, largest={split.largest}: {len(sizes)} packages cannot be split so; at least "
            "one must be held out and one left."
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


def kept_lines(text: str) -> tuple[list[str], list[int]]:
    """A text's lines without spaces at their ends, and the places of the long ones among them."""
    lines = [line.rstrip() for line in text.split("\n")]
    return lines, [place for place, line in enumerate(lines) if len(line.lstrip()) >= LONG_LINE]


def fingerprints(path: Path) -> tuple[bytes, np.ndarray]:
    """Hashes of a file's text, and of its long lines."""
    text = read_text(path)
    lines, places = kept_lines(text)
    hashes = b"".join(hashlib.blake2b(lines[place].lstrip().encode(), digest_size=8).digest() for place in places)
    return hashlib.sha256(text.encode()).digest(), np.frombuffer(hashes, dtype=np.int64)


def first_occurrences(found: list[tuple[bytes, np.ndarray]]) -> list[np.ndarray | None]:
    """
    For each file, in their order, which of its long lines no file before it has; None for a file that is a copy.
    """
    seen: set[bytes] = set()
    is_copy = [digest in seen or seen.add(digest) is not None for digest, _ in found]
    lengths = [0 if copied else len(hashes) for copied, (_, hashes) in zip(is_copy, found, strict=True)]
    all_hashes = [hashes for copied, (_, hashes) in zip(is_copy, found, strict=True) if not copied]
    hashes = np.concatenate([np.zeros(0, dtype=np.int64), *all_hashes])
    is_first = np.zeros(len(hashes), dtype=bool)
    is_first[np.unique(hashes, return_index=True)[1]] = True
    ends = np.cumsum([0, *lengths])
    return [None if copied else is_first[ends[i] : ends[i + 1]] for i, copied in enumerate(is_copy)]


def document(path: Path, is_first: np.ndarray | None) -> str:
    """The text of a file without the long lines that are not to be kept; nothing if too little is left."""
    if is_first is None:
        return ""
    lines, places = kept_lines(read_text(path))
    dropped = {place for place, keep in zip(places, is_first, strict=True) if not keep}
    text = "\n".join(line for place, line in enumerate(lines) if place not in dropped).strip("\n")
    return text + "\n" if len(text) >= SHORTEST_DOCUMENT else ""


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


def encode(job: tuple[str, list[tuple[Path, np.ndarray | None]]]) -> list[tuple[int, bytes]]:
    """For each file, with a tokenizer as JSON, the bytes that are left of it and its tokens in 16 bits."""
    serialised, files = job
    tokenizer = Tokenizer.from_str(serialised)
    # sources of tokenizers have its text, which ends no document
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id(END_OF_TEXT)
    results = []
    for path, is_first in files:
        text = document(path, is_first)
        tokens = [*tokenizer.encode(text, add_special_tokens=False).ids, end] if text else []
        results.append((len(text.encode()), np.array(tokens, dtype=np.uint16).tobytes()))
    return results


@contextlib.contextmanager
def mapper(processes: int) -> Iterator[Callable]:
    """A `map` over processes, which keeps the order."""
    if processes == 1:
        yield map
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, _one_thread_each) as pool:
        yield partial(pool.map, chunksize=16)


def _one_thread_each() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


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
    processes: int | None = None,
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
    files = [(package, path) for package in (*training, *held_out) for path in packages[package]]
    processes = processes or os.cpu_count() or 1
    with mapper(processes) as over_files:
        firsts = first_occurrences(list(over_files(fingerprints, [path for _, path in files])))
    pairs = [(path, first) for (_, path), first in zip(files, firsts, strict=True)]
    train_files = sum(package in set(training) for package, _ in files)

    # evenly over the packages, by as much as is read rather than what is left of it
    every = max(1, sum(sizes[package] for package in training) // sample_bytes)
    tokenizer = train_tokenizer((document(*pair) for pair in pairs[:train_files:every]), vocab_size)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}: the text gives {tokenizer.get_vocab_size()} tokens; take that or more text."
        )
    with mapper(processes) as over_files:
        chunks = [(tokenizer.to_str(), pairs[start : start + 16]) for start in range(0, len(pairs), 16)]
        encoded = [result for results in over_files(encode, chunks) for result in results]

    partial_folder = folder.with_name(f"{folder.name}.partial.{os.getpid()}")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    tokenizer.save(str(partial_folder / "tokenizer.json"))
    digest = hashlib.sha256()
    for part, chosen in (("train", slice(0, train_files)), ("held_out", slice(train_files, None))):
        by_package = getattr(description, f"{part}_packages")
        with open(partial_folder / f"{part}.bin", "wb") as stream:
            for (package, _), (size, tokens) in zip(files[chosen], encoded[chosen], strict=True):
                if size:
                    by_package[package] = by_package.get(package, 0) + size
                    digest.update(tokens)
                    stream.write(tokens)
            setattr(description, f"{part}_tokens", stream.tell() // 2)
        setattr(description, f"{part}_bytes", sum(by_package.values()))
        if not by_package:
            shutil.rmtree(partial_folder)
            raise ValueError(f"There is no text for the {part} part in {', '.join(map(str, roots))}.")
    description.checksum = digest.hexdigest()[:16]
    description.licences = licences_of({*training, *held_out})
    (partial_folder / "corpus.json").write_text(json.dumps(asdict(description), indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial_folder.rename(folder)
    return load_corpus(folder)


def load_corpus(folder: Path) -> Corpus:
    description = Description(**json.loads((folder / "corpus.json").read_text(encoding="utf-8")))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    streams = [np.memmap(folder / f"{part}.bin", dtype=np.uint16, mode="r") for part in ("train", "held_out")]
    return Corpus(description, *streams, bytes_of_tokens(tokenizer))
