# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Real text that every machine with Python has: the source of the standard library, packed into token blocks."""

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import Dataset


# tests and tables would teach little but repetition; installed packages and build settings differ between machines
SKIPPED_NAMES = {
    *("encodings", "entities.py", "idlelib", "lib2to3", "locale.py", "pydoc_data", "test", "tests"),
    *("__pycache__", "dist-packages", "site-packages"),
}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
HELD_OUT_PERCENT = 5


class Corpus(NamedTuple):
    train: list[str]
    held_out: list[str]


class TokenBlocks(Dataset):
    """Token blocks `[blocks, block_size]` (int64) as the examples that `Trainer` and our loss functions take."""

    def __init__(self, blocks: torch.Tensor):
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}

    def spread(self, count: int) -> "TokenBlocks":
        """`count` of the blocks, evenly spaced, so that a short measurement still sees every kind of text."""
        return TokenBlocks(self.blocks[:: max(1, len(self) // count)][:count])


def is_held_out(relative_path: str) -> bool:
    """Whether a file is kept from training: decided by its path alone, so the same in every Python version."""
    return int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:4]) % 100 < HELD_OUT_PERCENT


def read_corpus(root: str | Path | None = None) -> Corpus:
    """Reads the `.py` files below `root` (this interpreter's standard library), in the order of their paths."""
    root = Path(root or sysconfig.get_path("stdlib"))
    corpus = Corpus([], [])
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if SKIPPED_NAMES.intersection(relative.parts) or relative.parts[0].startswith(SKIPPED_PREFIXES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            (corpus.held_out if is_held_out(relative.as_posix()) else corpus.train).append(text)
    if not corpus.train or not corpus.held_out:
        raise FileNotFoundError(f"{root} holds too few Python source files to train on and to measure with")
    return corpus


def pack(texts: list[str], tokenizer, block_size: int) -> TokenBlocks:
    """Joins the texts, each ended by the end-of-text token, and cuts them into full blocks; the rest is dropped."""
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    stream = torch.tensor([token for tokens in encoded for token in (*tokens, tokenizer.eos_token_id)])
    count = len(stream) // block_size
    return TokenBlocks(stream[: count * block_size].view(count, block_size))


@torch.inference_mode()
def mean_loss(model, data: TokenBlocks, batch_size: int = 16) -> float:
    """The mean loss per predicted token, in nats."""
    was_training = model.training
    model.eval()
    total = sum(
        model(input_ids=batch, labels=batch).loss.item() * len(batch)
        for batch in data.blocks.to(model.device).split(batch_size)
    )
    model.train(was_training)
    return total / len(data)
