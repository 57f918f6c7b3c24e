# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Trains the small vanilla Qwen3 checkpoint that the demo starts from, on the source of Python's standard library.

On a GPU: python examples/train_tiny_qwen3.py --output examples/tiny_qwen3_python
A try on a CPU: python examples/train_tiny_qwen3.py --output scratch --max-steps 20 --batch-size 8
"""

import argparse
import platform
import tempfile
import time
from pathlib import Path

import tokenizers
import torch
import transformers
from text_corpus import Corpus, TokenBlocks, mean_loss, pack, read_corpus
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)


END_OF_TEXT = "<|endoftext|>"
MAX_LENGTH = 1024


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--max-steps", type=int, default=5000, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=32, help="blocks per step")
    parser.add_argument("--block-size", type=int, default=512, help="tokens per block")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens that the tokenizer learns")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text round-trips, and runs of spaces become single tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    tokens = {f"{name}_token_id": tokenizer.eos_token_id for name in ("bos", "eos", "pad")}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        **tokens,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**tokens)
    return model


def train(
    model: Qwen3ForCausalLM, data: TokenBlocks, held_out: TokenBlocks, args: argparse.Namespace
) -> Qwen3ForCausalLM:
    """Trains and returns the model as it was at the evaluation with the lowest held-out loss, in bfloat16."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, args.max_steps // 30),
            weight_decay=args.weight_decay,
            adam_beta2=0.95,
            bf16=torch.cuda.is_available(),
            logging_steps=max(1, args.max_steps // 30),
            eval_strategy="steps",
            eval_steps=max(1, args.max_steps // 10),
            prediction_loss_only=True,
            save_strategy="best",
            save_only_model=True,
            save_total_limit=1,
            metric_for_best_model="eval_loss",
            seed=args.seed,
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to="none",
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=held_out)
        trainer.train()
        best = Qwen3ForCausalLM.from_pretrained(trainer.state.best_model_checkpoint, dtype=torch.bfloat16)
    best.config.use_cache = True  # the Trainer turns it off
    return best


def model_card(args: argparse.Namespace, corpus: Corpus, blocks: int, loss: float, parameters: int) -> str:
    tokens = args.max_steps * args.batch_size * args.block_size
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
tags:
- qwen3
---

# tiny_qwen3_python

A vanilla Qwen3 language model of {parameters / 1e6:.2f} million parameters (8 layers, hidden size 128, tied
embeddings) with a byte-level BPE tokenizer of {args.vocab_size} tokens. It exists to show a conversion on real,
trained weights: it writes Python that looks right and means little.

Made by `examples/train_tiny_qwen3.py` of depthmix, from random weights.

| | |
|---|---|
| text | the source of Python {platform.python_version()}'s standard library, without tests and tables |
| training files | {len(corpus.train)}, {blocks} blocks of {args.block_size} tokens |
| training | {args.max_steps} steps of {args.batch_size} blocks ({tokens / 1e6:.1f} million tokens), seed {args.seed} |
| optimizer | AdamW, weight decay {args.weight_decay:g}, cosine schedule, peak rate {args.learning_rate:g} |
| weights kept | those of the evaluation with the lowest held-out loss, saved in bfloat16 |
| held-out loss | {loss:.3f} nats per token, on {len(corpus.held_out)} files chosen by a hash of their path |
| made with | transformers {transformers.__version__}, tokenizers {tokenizers.__version__}, torch {torch.__version__} |

The training text is the work of the Python Software Foundation and contributors, under the PSF licence version 2.
"""


def main() -> None:
    args = parse_args()
    started = time.monotonic()
    set_seed(args.seed)

    corpus = read_corpus()
    tokenizer = train_tokenizer(corpus.train, args.vocab_size)
    data = pack(corpus.train, tokenizer, args.block_size)
    held_out = pack(corpus.held_out, tokenizer, args.block_size)
    print(f"{len(corpus.train)} files, {len(data)} blocks to train on; {len(held_out)} blocks held out")

    model = train(build_model(tokenizer), data, held_out, args)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)

    # what is reported is measured on what a user will load
    model = AutoModelForCausalLM.from_pretrained(args.output, dtype=torch.float32, device_map="auto")
    data_loss, loss = mean_loss(model, data.spread(len(held_out))), mean_loss(model, held_out)
    card = model_card(args, corpus, len(data), loss, model.num_parameters())
    (args.output / "README.md").write_text(card, encoding="utf-8")

    tokenizer = AutoTokenizer.from_pretrained(args.output)
    prompt = tokenizer("def read_", return_tensors="pt").to(model.device)
    sample = tokenizer.decode(model.generate(**prompt, max_new_tokens=60, do_sample=False)[0])
    print(f"\nsaved to {args.output} after {time.monotonic() - started:.0f} s")
    print(f"held-out loss {loss:.4f}, training loss {data_loss:.4f} (nats per token, bfloat16 weights)")
    print(f"sample: {sample!r}")


if __name__ == "__main__":
    main()
