# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Measures models on held-out text, in nats per token and in bits per byte, which models with other tokens share.

With the defaults it takes seconds on a CPU: the small checkpoint beside it, on a little of the standard library.

    python examples/evaluate_models.py
    python examples/evaluate_models.py ./qwen3-depth Qwen/Qwen3-0.6B --data text.jsonl --length 4096 --stride 2048

With lm-eval (pip install lm-eval), also its tasks:

    python examples/evaluate_models.py ./qwen3-depth --data text.jsonl --tasks piqa,arc_easy
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from packed_training import read_lines
from text_corpus import read_corpus
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import depthmix  # noqa: F401  (registers its model types)


SMALL_MODEL = Path(__file__).with_name("tiny_qwen3_python")
# files of the held-out part of the standard library, where no data is named
DOCUMENTS = 1


class Measured(NamedTuple):
    """The sum of the losses, in nats, of how many tokens and of how many bytes of text."""

    nats: float
    tokens: int
    bytes: int

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=[str(SMALL_MODEL)], help="folders or Hub ids")
    parser.add_argument("--data", type=Path, help="JSON lines with `text`, or a folder of Python source")
    parser.add_argument("--length", type=int, default=512, help="tokens that a forward sees")
    parser.add_argument("--stride", type=int, help="tokens that are measured in each; all that are new by default")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tasks", help="tasks of lm-eval, with commas between them")
    parser.add_argument("--task-folder", help="folder with tasks of your own")
    options = parser.parse_args(argv)
    if options.stride is None:
        options.stride = options.length - 1
    if not 1 <= options.stride < options.length:
        parser.error(f"--stride {options.stride}: must be 1 or more and less than --length {options.length}.")
    return options


def windows(tokens: int, length: int, stride: int) -> list[tuple[int, int, int]]:
    """
    For a text of so many ids, the first of which is given: where a forward begins and ends, and from where on what it
    predicts is new. Each of the others is new once, and has at least `length - stride` ids before it, or all.
    """
    found, end = [], min(length, tokens)
    if tokens > 1:
        found.append((0, end, 1))
    while end < tokens:
        new, end = end, min(end + stride, tokens)
        found.append((max(0, end - length), end, new))
    return found


@torch.inference_mode()
def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int, stride: int
) -> Measured:
    """All tokens of each text are predicted, the first from the token with which a document begins."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    nats, tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor([start, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]])
        for begin, end, new in windows(len(ids), length, stride):
            window = ids[None, begin:end].to(model.device)
            logits = model(window, use_cache=False).logits[0, new - begin - 1 : -1].float()
            nats += torch.nn.functional.cross_entropy(logits, window[0, new - begin :], reduction="sum").item()
        tokens += len(ids) - 1
    return Measured(nats, tokens, sum(len(text.encode()) for text in texts))


def run_tasks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: list[str], folder: str | None
) -> None:
    """Prints the table of lm-eval."""
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError:
        raise SystemExit("--tasks: lm-eval is not installed (pip install lm-eval).") from None
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8)
    print(make_table(lm_eval.simple_evaluate(wrapped, tasks=tasks, task_manager=TaskManager(include_path=folder))))


def main(argv: Sequence[str] | None = None) -> dict[str, Measured]:
    options = parse_args(argv)
    if options.data is None or options.data.is_dir():
        # files that no example here trains on
        texts = read_corpus(options.data).held_out
        texts = texts[:DOCUMENTS] if options.data is None else texts
    else:
        texts = [row["text"] for row in read_lines(options.data, "text")]
    if not any(texts):
        raise SystemExit(f"--data {options.data}: has no text.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    for name in options.models:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=options.dtype).to(device).eval()
        result = found[name] = measure(model, tokenizer, texts, options.length, options.stride)
        print(
            f"{name}: {result.bits_per_byte:.4f} bits per byte, {result.nats_per_token:.4f} nats per token "
            f"({result.tokens:,} tokens, {result.bytes:,} bytes)",
            flush=True,
        )
        if options.tasks:
            run_tasks(model, tokenizer, options.tasks.split(","), options.task_folder)
    return found


if __name__ == "__main__":
    main()
