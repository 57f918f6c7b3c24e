# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Reading and writing safetensors checkpoints, a megabyte at a time.

The safetensors library checks the headers. The tensors' bytes are copied here, because the library writes a file only
from tensors that are all in memory: by the kernel where they stay as they are, else by plain reads and writes.
"""

import errno
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from tqdm.auto import tqdm

from .errors import ConversionError, raise_problems


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# patterns of everything that weights are saved as; `*` would match the files of sub-folders too
WEIGHT_FILES = (SINGLE_FILE, f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors", INDEX_FILE)
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# what is read stays in the processor's cache until it is written; larger pieces are copied at two thirds of the speed
CHUNK_BYTES = 2**20
# what the kernel copies at a time, between which the progress is shown
_KERNEL_CHUNK_BYTES = 2**26
_NOT_BY_KERNEL = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)
# a text of a checkpoint that is larger is not one: the largest tokenizers and indices have tens of megabytes
TEXT_LIMIT = 128 * 2**20
_JSON_DEPTH = 100
# of weights: the largest checkpoints have some hundred
_MOST_FILES = 10_000
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_SIZE = re.compile(r"\s*(\d*\.?\d+)\s*([KMGT]?)B?\s*", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

# with their names in torch. Only these are weights that a model computes with; anything else comes from a quantised
# checkpoint
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FLOAT_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `nbytes` bytes from `offset` of `file`. `dtype` is spelled as safetensors does ("BF16")."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def chunks(self) -> Iterator[memoryview]:
        """The tensor's bytes, in pieces of at most `CHUNK_BYTES`. Each takes the place of the one before."""
        buffer = memoryview(bytearray(min(self.nbytes, CHUNK_BYTES)))
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            left = self.nbytes
            while left:
                size = file.readinto(buffer[:left])
                if not size:
                    raise ConversionError(f"{self.file} became shorter while it was read.")
                left -= size
                yield buffer[:size]


@dataclass(frozen=True)
class Checkpoint:
    """The headers of a checkpoint folder: its tensors by name, the files that hold them, and remarks on the folder."""

    folder: Path
    tensors: dict[str, StoredTensor]
    files: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class TensorWrite:
    """
    A tensor to be written; `chunks` gives its bytes when called. If these are those of stored tensors, one after the
    other, `copies` has them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterator[bytes | memoryview]]
    copies: tuple[StoredTensor, ...] = ()

    @classmethod
    def from_stored(cls, name: str, stored: StoredTensor, dtype: str | None = None) -> "TensorWrite":
        """Copies a stored tensor byte by byte, or rounds it to another floating dtype."""
        if dtype in (None, stored.dtype):
            return cls(name, stored.dtype, stored.shape, stored.nbytes, stored.chunks, (stored,))
        nbytes = stored.nbytes // _FLOAT_SIZES[stored.dtype] * _FLOAT_SIZES[dtype]
        return cls(name, dtype, stored.shape, nbytes, lambda: _cast_chunks(stored, dtype))

    @classmethod
    def from_function(
        cls, name: str, make: "Callable[[], torch.Tensor]", dtype: str, shape: tuple[int, ...]
    ) -> "TensorWrite":
        """Writes the start value of a parameter that the source does not have, made when it is its turn."""

        def chunks():
            # the user may have set another default
            with torch.device("cpu"):
                tensor = make().to(getattr(torch, FLOAT_DTYPES[dtype]))
            assert tensor.shape == shape, f"{name}: the start value has shape {list(tensor.shape)}"
            yield _to_bytes(tensor)

        return cls(name, dtype, shape, math.prod(shape) * _FLOAT_SIZES[dtype], chunks)

    @classmethod
    def joined(cls, name: str, parts: Sequence[StoredTensor], dtype: str, shape: tuple[int, ...]) -> "TensorWrite":
        """Copies of stored tensors, one below the other, as a parameter that the source does not have."""
        writes = [cls.from_stored(name, part, dtype) for part in parts]
        nbytes = sum(write.nbytes for write in writes)
        copies = tuple(parts) if all(write.copies for write in writes) else ()
        return cls(name, dtype, shape, nbytes, lambda: (chunk for write in writes for chunk in write.chunks()), copies)


def open_checkpoint(folder: Path) -> Checkpoint:
    """
    Reads the headers of the safetensors files that a folder's index lists, or of its single file.

    Raises:
        [`ConversionError`]: for weights that exist in pickled form only, files that are missing or lie outside the
            folder, broken headers, tensors in two files or not in the file that the index names.
    """
    single, index = (find_file(folder, name) for name in (SINGLE_FILE, INDEX_FILE))
    warnings = []
    if single is not None:
        # the order in which transformers looks for them
        if index is not None:
            warnings.append(f"{INDEX_FILE} ignored, because {SINGLE_FILE} is there too.")
        weight_map, files = {}, {SINGLE_FILE: single}
    elif index is not None:
        weight_map = _read_index(index)
        names = sorted(set(weight_map.values()))
        if len(names) > _MOST_FILES:
            raise ConversionError(f"{index} lists {len(names)} files, and no checkpoint has more than {_MOST_FILES}.")
        paths = {name: find_file(folder, name) for name in names}
        raise_problems(
            f"{index} lists files that are not there",
            [f"{name}" for name, path in paths.items() if path is None],
        )
        files = {name: path for name, path in paths.items() if path is not None}
    else:
        raise ConversionError(no_weights_message(folder, [path.name for path in folder.iterdir()]))

    tensors: dict[str, StoredTensor] = {}
    problems = []
    for path in files.values():
        for tensor in _read_header(path):
            if tensor.name in tensors:
                problems.append(f"{tensor.name} is in {tensors[tensor.name].file.name} and in {path.name}")
            tensors[tensor.name] = tensor
    for name, file in weight_map.items():
        if name not in tensors:
            problems.append(f"{name} is not in {file}, where {INDEX_FILE} puts it")
        elif tensors[name].file.name != file:
            problems.append(f"{name} is in {tensors[name].file.name}, but {INDEX_FILE} says {file}")
    raise_problems(f"The files of {folder} contradict each other", problems)
    return Checkpoint(folder, tensors, tuple(files), tuple(warnings))


def find_file(folder: Path, name: str) -> Path | None:
    """
    The path of a file of a checkpoint folder; None if there is none.

    Raises:
        [`ConversionError`]: if following `name` and its links leads out of the folder. Links into the blobs of the
            same repository are the normal form of the Hub cache and allowed.
    """
    path = folder / name
    try:
        resolved = path.resolve(strict=path.is_symlink())
    except FileNotFoundError:
        return None
    # a loop of links is an OSError or, in older versions of Python, a RuntimeError
    except (OSError, RuntimeError) as error:
        raise ConversionError(f"{path} cannot be followed: it is a link into a loop, or not readable.") from error
    if not any(resolved.is_relative_to(root) for root in _allowed_roots(folder.resolve())):
        raise ConversionError(
            f"{path} leads out of the checkpoint folder, to {resolved}, and is not opened. Copy the files into the "
            "folder, or give the folder that they really are in."
        )
    if not resolved.is_file():
        return None
    with open(resolved, "rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ConversionError(
                f"{path} is a pointer of git-lfs, not the file itself. Get the files with `git lfs pull` first."
            )
    return path


def check_text_size(path: Path) -> None:
    """
    Raises:
        [`ConversionError`]: if a file is larger than any text, license or tokenizer of a checkpoint.
    """
    if path.stat().st_size > TEXT_LIMIT:
        raise ConversionError(f"{path} has more than {TEXT_LIMIT} bytes, which no such file of a checkpoint has.")


def read_text(path: Path) -> str:
    """
    Reads a text of a checkpoint.

    Raises:
        [`ConversionError`]: if it is larger than `TEXT_LIMIT`, or no UTF-8.
    """
    check_text_size(path)
    with open(path, "rb") as file:
        content = file.read(TEXT_LIMIT)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path} is not UTF-8 text: {error}") from error


def read_json(path: Path) -> dict:
    """
    Reads a JSON object.

    Raises:
        [`ConversionError`]: if the file holds anything else, is larger than `TEXT_LIMIT` or nested too deep, or an
            object in it has a key twice.
    """
    try:
        content = json.loads(read_text(path), object_pairs_hook=_unique_keys)
    except ConversionError:
        raise
    except ValueError as error:
        raise ConversionError(f"{path} is not valid JSON: {error}") from error
    except RecursionError:
        raise ConversionError(f"{path} is nested more than {_JSON_DEPTH} levels deep.") from None
    if _is_deeper(content, _JSON_DEPTH):
        raise ConversionError(f"{path} is nested more than {_JSON_DEPTH} levels deep.")
    if not isinstance(content, dict):
        raise ConversionError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return content


def same_values(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two stored tensors are equal bit by bit."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return all(a == b for a, b in zip(first.chunks(), second.chunks(), strict=True))


def plan_shards(writes: Sequence[TensorWrite], shard_size: int | str) -> dict[str, list[TensorWrite]]:
    """
    Distributes tensors over files of at most `shard_size` (bytes, or text such as "5GB"), in their order.

    Raises:
        [`ConversionError`]: if the size is not understood.
    """
    by_name = {write.name: write for write in writes}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda write: write.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_parse_shard_size(shard_size),
    )
    return {file: [by_name[name] for name in names] for file, names in split.filename_to_tensors.items()}


def write_checkpoint(folder: Path, shards: dict[str, list[TensorWrite]], progress: bool = True) -> None:
    """Writes the files of a plan, and an index if there are several."""
    total = sum(write.nbytes for writes in shards.values() for write in writes)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Writing", disable=not progress) as bar:
        for file, writes in shards.items():
            _write_safetensors(folder / file, writes, bar)
    if len(shards) > 1:
        weight_map = {write.name: file for file, writes in shards.items() for write in writes}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def verify_checkpoint(folder: Path, shards: dict[str, list[TensorWrite]]) -> None:
    """
    Reopens written files and compares names, dtypes, shapes and sizes with the plan.

    Raises:
        [`ConversionError`]: naming what differs.
    """
    written = open_checkpoint(folder).tensors
    planned = {write.name: (write, file) for file, writes in shards.items() for write in writes}
    problems = [f"{name} was not written" for name in planned.keys() - written.keys()]
    problems += [f"{name} was not planned" for name in written.keys() - planned.keys()]
    for name in planned.keys() & written.keys():
        tensor, (write, file) = written[name], planned[name]
        found = (tensor.file.name, tensor.dtype, tensor.shape, tensor.nbytes)
        if found != (file, write.dtype, write.shape, write.nbytes):
            problems.append(f"{name} was written as {found}")
    raise_problems(f"The files written to {folder} differ from the plan", sorted(problems))


def no_weights_message(place: Path | str, names: Sequence[str]) -> str:
    """What to do about a folder or repository that holds these files and no safetensors checkpoint."""
    pickled = sorted(name for name in names if name.endswith(PICKLE_SUFFIXES))
    if "adapter_config.json" in names:
        return (
            f"{place} holds a PEFT adapter. Merge it into its base model (`merge_and_unload`) and convert the result."
        )
    if pickled:
        return (
            f"{place} has its weights only in pickled files ({', '.join(pickled[:5])}). These can run code when they "
            "are opened, so they are not. Get or make a safetensors version of the checkpoint: load it with "
            "transformers where you trust it, and save it with `save_pretrained`."
        )
    return f"{place} has neither {SINGLE_FILE} nor {INDEX_FILE}."


def _is_deeper(content: Any, depth: int) -> bool:
    """Whether lists and objects are nested deeper, without a call per level."""
    level = [content]
    for _ in range(depth):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    return any(isinstance(node, (dict, list)) for node in level)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object; without it the last of equal keys would win silently."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r} occurs twice in one object")
        content[key] = value
    return content


def _parse_shard_size(size: int | str) -> int:
    nbytes = size
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        # exact, and no number of digits overflows it
        nbytes = int(Fraction(match[1]) * _SIZE_UNITS[match[2].upper()])
    if type(nbytes) is not int or nbytes < 1:
        raise ConversionError(f"shard_size={size!r}: must be a whole number of bytes above 0, or text such as '5GB'.")
    return nbytes


def _allowed_roots(folder: Path) -> list[Path]:
    roots = [folder]
    snapshots, repository = folder.parent, folder.parent.parent
    if snapshots.name == "snapshots" and repository.name.startswith("models--"):
        roots.append(repository / "blobs")
        # newer caches share the blobs of all repositories, in a store that is marked as such
        if (repository.parent / "blobs" / ".huggingface-shared-blobs").is_file():
            roots.append(repository.parent / "blobs")
    return roots


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{path} must hold a non-empty object `weight_map`.")
    problems = []
    for file in dict.fromkeys(map(str, weight_map.values())):
        plain = Path(file).name == file and "\\" not in file and file.isprintable()
        if not plain or not file.endswith(".safetensors"):
            problems.append(f"{file!r} is not the plain name of a .safetensors file")
    raise_problems(f"{path} names files that will not be opened", problems)
    return weight_map


def _read_header(path: Path) -> list[StoredTensor]:
    try:
        # rejects headers that are cut off, overlap, leave gaps, or promise more or fewer bytes than the file has
        with safe_open(path, framework="numpy"):
            pass
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length), object_pairs_hook=_unique_keys)
        if not isinstance(header, dict):
            raise ValueError("the header is no JSON object")
    except RecursionError:
        raise ConversionError(f"{path} is not a valid safetensors file: the header is nested too deep") from None
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise ConversionError(f"{path} is not a valid safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return [
        StoredTensor(name, path, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
        for name, entry in header.items()
        for begin, end in [entry["data_offsets"]]
    ]


def _write_safetensors(path: Path, writes: Sequence[TensorWrite], bar: tqdm) -> None:
    # wide dtypes first, so that every tensor is aligned in the file
    writes = sorted(writes, key=lambda write: -_FLOAT_SIZES[write.dtype])
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for write in writes:
        end = offset + write.nbytes
        header[write.name] = {"dtype": write.dtype, "shape": list(write.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for write in writes:
            for stored in write.copies:
                _copy(stored, file, bar)
            for chunk in () if write.copies else write.chunks():
                file.write(chunk)
                bar.update(len(chunk))


def _copy(stored: StoredTensor, file: BinaryIO, bar: tqdm) -> None:
    """Appends the bytes of a stored tensor, by the kernel where it can copy between these files."""
    left = stored.nbytes
    file.flush()
    with open(stored.file, "rb") as source:
        try:
            while left and hasattr(os, "copy_file_range"):
                place = stored.offset + stored.nbytes - left
                size = os.copy_file_range(source.fileno(), file.fileno(), min(left, _KERNEL_CHUNK_BYTES), place)
                if not size:
                    raise ConversionError(f"{stored.file} became shorter while it was read.")
                left -= size
                bar.update(size)
        except OSError as error:
            # between some file systems the kernel does not, which shows in the first call
            if left < stored.nbytes or error.errno not in _NOT_BY_KERNEL:
                raise
        finally:
            # the kernel has moved the place to write at behind the file's back
            file.seek(0, os.SEEK_END)
    for chunk in stored.chunks() if left else ():
        file.write(chunk)
        bar.update(len(chunk))


def _cast_chunks(stored: StoredTensor, dtype: str) -> Iterator[bytes]:
    for chunk in stored.chunks():
        values = torch.frombuffer(bytearray(chunk), dtype=getattr(torch, FLOAT_DTYPES[stored.dtype]))
        cast = values.to(getattr(torch, FLOAT_DTYPES[dtype]))
        if not torch.equal(cast.isfinite(), values.isfinite()):
            largest = values[values.isfinite()].abs().max().item()
            raise ConversionError(
                f"{stored.name} has values up to {largest:.3g}, which torch.{FLOAT_DTYPES[dtype]} cannot hold. "
                "Use bfloat16."
            )
        yield _to_bytes(cast)


def _to_bytes(tensor: "torch.Tensor") -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
