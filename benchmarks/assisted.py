# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`python -m benchmarks.assisted TARGET DRAFT [TARGET DRAFT ...]` times greedy generation with and without a draft model
that proposes tokens.

The two of a pair are folders of models with one tokenizer; `benchmarks.study --plan models --models FOLDER` trains
some. The texts must be equal, so a difference is an error.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import depthmix

from .harness import DEVICE, Measurement, write_results


def measured(target_folder: Path, draft_folder: Path, arguments: argparse.Namespace) -> list[Measurement]:
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    # greedy texts of two schedules are equal only where rounding cannot decide between two tokens
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype="float32").to(DEVICE).eval()
        for folder in (target_folder, draft_folder)
    )
    for model in (target, draft):
        # models are trained without a cache, and saved so
        model.config.use_cache = model.generation_config.use_cache = True
    settings = {"max_new_tokens": arguments.new_tokens, "do_sample": False, "eos_token_id": None}
    ways = {"alone": {}, "with the draft": {"assistant_model": draft}}
    seconds = {way: [] for way in ways}
    for text in arguments.text or sorted(Path(depthmix.__file__).parent.glob("*.py")):
        tokens = tokenizer(text.read_text(), return_tensors="pt").input_ids[:, : arguments.prompt_tokens].to(DEVICE)
        outputs = []
        for way, options in ways.items():
            start = time.perf_counter()
            outputs.append(target.generate(tokens, **settings, **options))
            seconds[way].append(time.perf_counter() - start)
        if not torch.equal(*outputs):
            raise SystemExit(f"{text}: the draft changes the text.")
    return [
        Measurement(
            case=f"generate {arguments.new_tokens} tokens {way}",
            size=f"{target.config.num_hidden_layers} and {draft.config.num_hidden_layers} layers",
            model=f"{target.config.model_type}, {draft.config.model_type} draft",
            milliseconds=1000 * statistics.median(each),
            low=1000 * min(each),
            high=1000 * max(each),
            gib=0.0,
            ratio=statistics.median(own / alone for own, alone in zip(each, seconds["alone"], strict=True)),
        )
        for way, each in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", type=Path, nargs="+", metavar="FOLDER", help="a target, its draft, and so on")
    parser.add_argument("--text", type=Path, nargs="+", help="files whose starts are the prompts; default: depthmix's")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path, metavar="FILE", help="a CSV file to write")
    arguments = parser.parse_args()
    if len(arguments.pairs) % 2:
        parser.error(f"{arguments.pairs[-1]} has no draft: folders come in pairs, a target and its draft.")
    torch.set_num_threads(1)
    rows = []
    for target, draft in zip(arguments.pairs[::2], arguments.pairs[1::2], strict=True):
        rows += measured(target, draft, arguments)
        for row in rows[-2:]:
            print(f"{row.model}, {row.case}: {row.milliseconds:.0f} ms, {row.ratio:.3f}x", flush=True)
    if arguments.output:
        write_results(arguments.output, rows)


if __name__ == "__main__":
    main()
