# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What `pretrain.py` and `finetune.py` share: packed documents that do not see each other, rates, and precision."""

import argparse
import json
from pathlib import Path

import torch
from accelerate.utils import send_to_device
from text_corpus import read_corpus
from transformers import DataCollatorWithFlattening, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import depthmix


Row = list[list[int]]


def read_lines(path: Path, *keys: str) -> list[dict]:
    """The objects of a file of JSON lines, of which each must have these keys, with text."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: must be JSON ({error}).") from None
        for key in keys:
            if not isinstance(row, dict) or not isinstance(row.get(key), str):
                raise ValueError(f"{path}, line {number}: must be an object with text under {key!r}.")
        rows.append(row)
    return rows


def read_texts(path: Path | None) -> tuple[list[str], list[str]]:
    """
    Documents to train on and documents to measure with. `path` is a folder with Python source, by default that of the
    standard library, of which some files are held out, by their names; or JSON lines with `text`, and then each
    twentieth is.
    """
    if path is None or path.is_dir():
        corpus = read_corpus(path)
        return corpus.train, corpus.held_out
    return part_off([row["text"] for row in read_lines(path, "text")])


def part_off(rows: list) -> tuple[list, list]:
    """What is trained on, and each twentieth, which is measured with."""
    return [row for i, row in enumerate(rows) if i % 20 != 19], rows[19::20]


def pack_documents(texts: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> list[Row]:
    """
    Rows of `length` tokens, each a list of the documents in it, or of the parts of documents that fit there.

    A document begins and ends with the end-of-text token. A part that is continued in the next row begins there with
    the last token of this one, so that every token but the first of a document is predicted once. The last row, which
    is not full, is left out.
    """
    if length < 2:
        raise ValueError(f"length={length}: must be two tokens or more.")
    end = tokenizer.eos_token_id
    rows, row, room = [], [], length
    for tokens in tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]:
        rest = [end, *tokens, end]
        while rest:
            part = rest[:room]
            rest = rest[room - 1 :] if len(rest) > room else []
            row.append(part)
            room -= len(part)
            if not room:
                rows.append(row)
                row, room = [], length
    return rows


class PackedDocuments(DataCollatorWithFlattening):
    """
    Batches of packed rows, in which documents do not see each other: positions begin anew with each, and by that
    attention tells them apart, as long as there is no cache and no attention mask. No document predicts the next.

    Attention with a mask (sdpa, eager, flex) gets a row of the batch for each row, `[B, length]`. Flash attention
    tells documents apart in a batch of one only, so with `one_row` all are joined, `[1, B * length]`.
    """

    def __init__(self, one_row: bool):
        super().__init__()
        self.one_row = one_row

    def __call__(self, rows: list[Row], return_tensors=None, separator_id=None) -> dict[str, torch.Tensor]:
        groups = [[part for row in rows for part in row]] if self.one_row else rows
        flat = [super(PackedDocuments, self).__call__([{"input_ids": part} for part in group]) for group in groups]
        return {name: torch.cat([batch[name] for batch in flat]) for name in flat[0]}


class MixingRate:
    """
    Before a Trainer among the bases of a class: the mixing parameters get the rate `mixing_lr`. They are told apart
    before the model is sharded, which an optimizer that is made outside would not survive.
    """

    def __init__(self, *args, mixing_lr: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.mixing_lr = mixing_lr

    def create_optimizer(self, *args, **kwargs):
        if self.optimizer is None:
            arguments = self.args
            groups = depthmix.optimizer_groups(
                self.model, arguments.learning_rate, self.mixing_lr, weight_decay=arguments.weight_decay
            )
            self.optimizer = torch.optim.AdamW(groups, betas=(arguments.adam_beta1, arguments.adam_beta2))
        return self.optimizer


class GroupedTrainer(MixingRate, Trainer):
    """The Trainer with a rate for the mixing parameters."""


@torch.no_grad()
def held_out_loss(trainer: Trainer, rows: list) -> float:
    """
    The mean loss per token. Each process looks at all rows, so that the number does not depend on how they are dealt,
    nor on how many there are: the Trainer weights by batches, and over several processes the last one falsely.
    """
    model, size = trainer.model.eval(), trainer.args.per_device_train_batch_size
    nats = tokens = 0
    for i in range(0, len(rows), size):
        batch = send_to_device(trainer.data_collator(rows[i : i + size]), trainer.args.device)
        count = int((batch["labels"][:, 1:] != -100).sum())
        nats += model(**batch, use_cache=False).loss.item() * count
        tokens += count
    return nats / tokens


def save_whole(trainer: Trainer, folder: Path) -> None:
    """Saves what the Trainer trains as one, also where checkpoints are in shards."""
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(folder))


def add_training_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, help="folder for checkpoints and the model")
    parser.add_argument("--steps", type=int, help="steps of the optimizer")
    parser.add_argument("--batch-size", type=int, help="rows in a step on each device")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in a step of the optimizer")
    parser.add_argument("--learning-rate", type=float, help="peak rate of everything but the mixing")
    parser.add_argument("--mixing-rate", type=float, help="peak rate of the mixing parameters")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument(
        "--precision",
        choices=("bf16", "fp32"),
        default="bf16" if torch.cuda.is_available() else "fp32",
        help="of the arithmetic; weights that are trained stay in fp32 with both",
    )
    parser.add_argument("--activation-checkpointing", action="store_true", help="less memory for a second forward")
    parser.add_argument("--save-every", type=int, help="steps between checkpoints; without it there are none")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output")
    parser.add_argument("--seed", type=int, default=0)


def training_arguments(options: argparse.Namespace, kind=TrainingArguments, **more) -> TrainingArguments:
    """Arguments of this `kind` from the options; checkpoints that are there are an error unless they are wanted."""
    newest = get_last_checkpoint(options.output) if options.output.is_dir() else None
    if options.resume and newest is None:
        raise SystemExit(f"--resume: {options.output} has no checkpoint to go on from.")
    if newest is not None and not options.resume:
        raise SystemExit(f"--output {options.output}: has a checkpoint; go on with --resume, or name another folder.")
    if options.steps < 1:
        raise SystemExit(f"--steps {options.steps}: must be one or more.")
    on_gpu = torch.cuda.is_available()
    defaults = {
        "output_dir": str(options.output),
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch_size,
        "gradient_accumulation_steps": options.accumulate,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 0.05,
        "weight_decay": options.weight_decay,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        # weights stay in fp32, and autocast does the arithmetic: bf16 weights would not move at most rates
        "bf16": options.precision == "bf16",
        "save_strategy": "no" if options.save_every is None else "steps",
        "save_steps": options.save_every or 500,
        "logging_steps": max(1, options.steps // 20),
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "seed": options.seed,
        "data_seed": options.seed,
        # the collator reads all that a row has
        "remove_unused_columns": False,
        # what is frozen has no gradients, and the rest always has
        "ddp_find_unused_parameters": False,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
    }
    if options.activation_checkpointing:
        # its name before transformers 5.23
        name = "activation" if hasattr(kind, "activation_checkpointing") else "gradient"
        defaults |= {f"{name}_checkpointing": True, f"{name}_checkpointing_kwargs": {"use_reentrant": False}}
    return kind(**defaults | more)
