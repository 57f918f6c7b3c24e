# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the weights of a release were trained with, where its code leaves that open: the loss on real text decides.

    python examples/check_release.py ./DenseFormer-3B --text book.txt

Converts the checkpoint once, into a temporary folder, and prints the mean next-token loss for every alternative. The
wrong ones should be clearly worse; pass the best one to `depthmix convert`.
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import depthmix  # noqa: F401 registers the model classes
from depthmix.conversion import ConversionError, convert, inspect_checkpoint


@dataclass(frozen=True)
class Alternative:
    """One way to read a checkpoint: fields of the configuration, and hooks for what is no field."""

    name: str
    fields: dict = field(default_factory=dict)
    install: Callable[[PreTrainedModel, ExitStack], None] = lambda model, stack: None


def hand_on_raw_key(model: PreTrainedModel, stack: ExitStack) -> None:
    """Layer 0 gives later layers its key as it is before its norm, which here comes after the rotation."""
    layer, seen = model.model.layers[0], []
    norm = layer.self_attn.k_norm
    stack.enter_context(norm.register_forward_pre_hook(lambda _, args: seen.append(args[0])))
    stack.enter_context(layer.register_forward_hook(lambda _, __, output: (output[0], seen.pop(), *output[2:])))


AFTER, BEFORE = ({"key_norm_position": place} for place in ("after_rope", "before_rope"))
KEY_NORM = [
    Alternative("key norm after the rotation (as the released code runs by default)", AFTER),
    Alternative("key norm before the rotation (as its flash attention does)", BEFORE),
]
# layout -> target, and what the release leaves open
OPEN_POINTS = {
    "released_depth_attention": (
        "depth_qwen3",
        [
            *KEY_NORM,
            Alternative("key norm after the rotation, layer 0 hands on its key without it", AFTER, hand_on_raw_key),
        ],
    ),
    "released_qk_norm": ("depth_qwen3", KEY_NORM),
    "released_attnres": ("attnres", KEY_NORM),
    # without recency biases: the code's second form of it, or the first with biases of zero
    "released_attnres_block": (
        "attnres",
        [
            Alternative(f"{form}; {reading.name}", reading.fields | fields)
            for form, fields in (
                ("sums of blocks", {}),
                ("snapshots of the stream, no recency bias", {"attnres_variant": "cumulative"}),
            )
            for reading in KEY_NORM
        ],
    ),
    "released_denseformer": ("denseformer", KEY_NORM),
    "released_mhc": ("mhc", KEY_NORM),
}


@torch.no_grad()
def mean_loss(model: PreTrainedModel, ids: torch.Tensor, length: int) -> float:
    """Mean next-token loss of the token ids `[N]`, in windows of so many tokens."""
    total, count = 0.0, 0
    for window in ids.to(model.device).split(length):
        if len(window) > 1:
            logits = model(window[None], use_cache=False).logits[0, :-1].float()
            total += nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
            count += len(window) - 1
    return total / count


def compare(
    checkpoint: str, text: str, *, tokenizer: str | None = None, tokens: int = 8192, device: str = "cpu", folder: Path
) -> list[tuple[str, float]]:
    """
    The loss of each alternative, best first.

    Args:
        checkpoint (`str`):
            Folder or Hub id of released weights.
        text (`str`), tokens (`int`):
            Text, and how many tokens of it are read.
        tokenizer (`str`, *optional*):
            Where the tokenizer is, if not beside the weights.
        device (`str`):
            Where the model runs, in the dtype of its weights.
        folder (`Path`):
            Where the converted checkpoint goes.

    Raises:
        [`ConversionError`]: if the checkpoint is none of the release, or the text is too short.
    """
    description = inspect_checkpoint(checkpoint)
    if description.layout not in OPEN_POINTS:
        raise ConversionError(f"{description.source} is {description.kind}: nothing is open about it.")
    print(f"{description.source}: {description.kind} ({'; '.join(description.evidence)})")
    target, alternatives = OPEN_POINTS[description.layout]
    convert(checkpoint, folder / "converted", to=target, key_norm_position="after_rope")
    ids = AutoTokenizer.from_pretrained(tokenizer or folder / "converted")(text, return_tensors="pt").input_ids
    ids = ids[0, :tokens]
    if len(ids) < 2:
        raise ConversionError(f"The text has {len(ids)} tokens: at least 2 are needed.")

    losses = []
    for alternative in alternatives:
        model = AutoModelForCausalLM.from_pretrained(
            folder / "converted", dtype="auto", device_map={"": device}, **alternative.fields
        ).eval()
        with ExitStack() as stack:
            alternative.install(model, stack)
            losses.append((alternative.name, mean_loss(model, ids, model.config.max_position_embeddings)))
        del model
    return sorted(losses, key=lambda entry: entry[1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or Hub id of released weights")
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="ordinary text in the training language"
    )
    parser.add_argument("--tokenizer", metavar="T", help="folder or Hub id of the tokenizer, if it is somewhere else")
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="tokens to read (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", metavar="D")
    arguments = vars(parser.parse_args(argv))
    text = arguments.pop("text").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for name, loss in compare(text=text, folder=Path(folder), **arguments):
            print(f"{loss:8.4f}  {name}")


if __name__ == "__main__":
    main()
