# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Trains a model from random weights: any method on any backbone, packed documents, checkpoints to go on from.

With the defaults it takes seconds on a CPU:

    python examples/pretrain.py --output tiny

The decoder of docs/study.md, at its rate for Depth-Attention and with its 100 million tokens, on your own text:

    python examples/pretrain.py --output run --size 5m --data text.jsonl --steps 3052 --save-every 500 \\
        --field depth_stride=12

On several devices (docs/several_devices.md), after a stop, with another method:

    accelerate launch --config_file examples/accelerate/fsdp2.yaml examples/pretrain.py --output run --size 1.5b \\
        --model-type attnres --field attnres_block_size=12 --data text.jsonl --tokenizer Qwen/Qwen3-0.6B \\
        --activation-checkpointing --save-every 1000 --resume
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from packed_training import (
    GroupedTrainer,
    PackedDocuments,
    Row,
    add_training_options,
    held_out_loss,
    pack_documents,
    read_texts,
    save_whole,
    training_arguments,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)
from transformers.distributed import DistributedConfig

import depthmix  # noqa: F401  (registers its model types)


SMALL_TOKENIZER = Path(__file__).with_name("tiny_qwen3_python")
MEASURED_ROWS = 256


class Size(NamedTuple):
    """A decoder, and settings for it. `documents` is how many are read, of all where it is None."""

    fields: dict
    length: int
    batch_size: int
    steps: int
    learning_rate: float
    documents: int | None = None


def decoder(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, **fields) -> dict:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        **fields,
    }


SIZES = {
    # to see that everything runs
    "tiny": Size(decoder(4, 64, 4, 2, 16, 128, tie_word_embeddings=True), 64, 4, 10, 4e-3, documents=20),
    # of docs/study.md, where the rate was the best of two for Depth-Attention; others stand there
    "5m": Size(decoder(24, 128, 4, 2, 32, 384, tie_word_embeddings=True), 1024, 32, 3052, 4e-3),
    # the shape of docs/numbers.md; nobody has looked for its best rate
    "1.5b": Size(decoder(48, 1536, 24, 6, 64, 5184), 2048, 8, 20_000, 3e-4),
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_training_options(parser)
    parser.add_argument("--size", choices=SIZES, default="tiny", help="the decoder, and defaults of what is left out")
    parser.add_argument("--model-type", default="depth_qwen3", help="a method and a backbone")
    parser.add_argument(
        "--field", action="append", default=[], metavar="NAME=VALUE", help="a field of the configuration"
    )
    parser.add_argument("--data", type=Path, help="JSON lines with `text`, or a folder of Python source")
    parser.add_argument("--tokenizer", default=str(SMALL_TOKENIZER), help="folder or Hub id")
    parser.add_argument("--length", type=int, help="tokens in a row")
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of transformers")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="over how many processes layers are split")
    parser.add_argument("--shards", type=int, default=1, help="beside it, over how many FSDP2 shards parameters")
    options = parser.parse_args(argv)
    size = SIZES[options.size]
    for name in ("length", "batch_size", "steps", "learning_rate"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(size, name))
    if options.mixing_rate is None:
        # what starts from random numbers learns with one rate; a multiple is for models that are trained already
        options.mixing_rate = options.learning_rate
    options.is_sharded_by_host = options.tensor_parallel > 1 or options.shards > 1
    if options.is_sharded_by_host and options.save_every is not None:
        parser.error("--save-every: transformers saves no optimizer that can be loaded where it splits the model.")
    return options


def field_of(text: str) -> tuple[str, object]:
    """`NAME=VALUE` as a field; a value that is no JSON is text."""
    name, given, value = text.partition("=")
    if not (name and given):
        raise SystemExit(f"--field {text}: must be NAME=VALUE.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def build_model(
    options: argparse.Namespace, arguments: TrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    fields = SIZES[options.size].fields | {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": options.length,
        # a document begins and ends with it
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        # nothing is padded, and the embedding of a padding token, which often is that of the end, learns nothing
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(options.model_type, **fields | dict(map(field_of, options.field)))
    set_seed(options.seed)
    # fp32, as every new model
    model = AutoModelForCausalLM.from_config(config, attn_implementation=options.attention)
    if not options.is_sharded_by_host:
        return model
    # only what is loaded is split
    initial = options.output / "initial"
    with arguments.main_process_first(local=False):
        if arguments.process_index == 0:
            model.save_pretrained(initial)
    split = DistributedConfig(tp_size=options.tensor_parallel, fsdp_size=options.shards)
    return AutoModelForCausalLM.from_pretrained(
        initial, dtype=torch.float32, attn_implementation=options.attention, distributed_config=split
    )


def make_trainer(options: argparse.Namespace) -> tuple[GroupedTrainer, list[Row]]:
    """The trainer, and the rows to measure with."""
    arguments = training_arguments(options)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    documents = SIZES[options.size].documents if options.data is None else None
    train, held_out = (
        pack_documents(texts[:documents], tokenizer, options.length) for texts in read_texts(options.data)
    )
    if not train or not held_out:
        raise SystemExit(f"--data {options.data}: must have {options.length} tokens to train on and as many held out.")
    trainer = GroupedTrainer(
        model=build_model(options, arguments, tokenizer),
        args=arguments,
        train_dataset=train,
        data_collator=PackedDocuments(one_row="flash" in options.attention),
        mixing_lr=options.mixing_rate,
    )
    return trainer, held_out[:MEASURED_ROWS]


def main(argv: Sequence[str] | None = None) -> GroupedTrainer:
    options = parse_args(argv)
    trainer, held_out = make_trainer(options)
    trainer.train(resume_from_checkpoint=options.resume)
    loss = held_out_loss(trainer, held_out)
    save_whole(trainer, options.output / "model")
    if trainer.is_world_process_zero():
        AutoTokenizer.from_pretrained(options.tokenizer).save_pretrained(options.output / "model")
    trainer.accelerator.print(f"held-out loss {loss:.4f} nats per token; model in {options.output / 'model'}")
    return trainer


if __name__ == "__main__":
    main()
