# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Supervised fine-tuning with LoRA, in which the mixing parameters are trained too, of any model of this package.

With the defaults it converts the small checkpoint beside it and takes seconds on a CPU:

    python examples/finetune.py --output tuned

A vanilla checkpoint with your own prompts and completions, on a GPU; on several with `accelerate launch`:

    python examples/finetune.py --output tuned --model Qwen/Qwen3-0.6B --to attnres --data pairs.jsonl \\
        --length 2048 --batch-size 8 --steps 2000 --learning-rate 1e-4 --mixing-rate 1e-3 --save-every 500

`--trl` leaves the work to TRL's SFTTrainer, if it is installed; the losses are the same.
"""

import argparse
import ast
from collections.abc import Sequence
from pathlib import Path

import torch
from packed_training import (
    GroupedTrainer,
    MixingRate,
    add_training_options,
    held_out_loss,
    part_off,
    read_lines,
    read_texts,
    save_whole,
    training_arguments,
)
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

import depthmix
from depthmix.families import FAMILIES


SMALL_MODEL = Path(__file__).with_name("tiny_qwen3_python")
# of the standard library, where no data is named
DOCUMENTS = 60
MEASURED_ROWS = 256


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_training_options(parser)
    parser.set_defaults(steps=10, batch_size=4, learning_rate=1e-4, mixing_rate=1e-3, weight_decay=0.0)
    parser.add_argument("--model", default=str(SMALL_MODEL), help="folder or Hub id; a vanilla model is converted")
    parser.add_argument("--to", default="depth_attention", help="the method of a vanilla model")
    parser.add_argument("--data", type=Path, help="JSON lines with `prompt` and `completion`")
    parser.add_argument(
        "--length", type=int, default=256, help="tokens of a prompt and its completion; the rest is cut"
    )
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of transformers")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument(
        "--targets", nargs="+", default=["q_proj", "k_proj", "v_proj", "o_proj"], help="what gets adapters"
    )
    parser.add_argument("--trl", action="store_true", help="train with TRL's SFTTrainer")
    return parser.parse_args(argv)


def functions_of(text: str) -> list[dict[str, str]]:
    """Prompts of signature and docstring, and the body of the function as completion."""
    lines, found = text.splitlines(keepends=True), []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            end = node.body[0].end_lineno
            rows = "".join(lines[node.lineno - 1 : end]), "".join(lines[end : node.end_lineno])
            found.append(dict(zip(("prompt", "completion"), rows, strict=True)))
    return found


def read_pairs(path: Path | None) -> tuple[list[dict], list[dict]]:
    """Pairs to train on and pairs to measure with; without a path, functions of the standard library."""
    if path is not None:
        return part_off(read_lines(path, "prompt", "completion"))
    return part_off([row for text in read_texts(None)[0][:DOCUMENTS] for row in functions_of(text)])


def encode(pairs: list[dict], tokenizer: PreTrainedTokenizerBase, length: int) -> list[dict[str, list[int]]]:
    """Ids and labels; the prompt is read, and only the completion and its end are learned."""
    rows = []
    for pair in pairs:
        prompt, completion = (
            tokenizer(pair[name], add_special_tokens=False, verbose=False)["input_ids"]
            for name in ("prompt", "completion")
        )
        ids = [*prompt, *completion, tokenizer.eos_token_id]
        labels = [-100] * len(prompt) + ids[len(prompt) :]
        # where the prompt alone is too long there is nothing to learn
        if len(prompt) < length:
            rows.append({"input_ids": ids[:length], "labels": labels[:length]})
    return rows


def own_model(options: argparse.Namespace, arguments: TrainingArguments) -> str:
    """The model, or what it is converted to, in the folder `base` of the output."""
    if AutoConfig.from_pretrained(options.model).model_type in FAMILIES:
        return options.model
    base = options.output / "base"
    with arguments.main_process_first(local=False):
        # the run that goes on has made it
        if arguments.process_index == 0 and not options.resume:
            print(depthmix.convert(options.model, base, to=options.to, progress=False))
    return str(base)


def added_modules(model: PreTrainedModel) -> list[str]:
    """
    What to train beside the adapters, by the ends of the names as PEFT wants them: whatever the vanilla model of the
    same backbone does not have.
    """
    stock = FAMILIES[model.config.model_type].backbone.stock_class("ForCausalLM")
    with torch.device("meta"):
        known = {name.rpartition(".")[2] for name, _ in stock(stock.config_class()).named_modules()}
    own = {
        name
        for name, module in model.named_modules()
        if not (name.rpartition(".")[2] in known or name[-1:].isdigit()) and any(True for _ in module.parameters())
    }
    # a module within one that is named already has no adapter of its own
    outermost = {name for name in own if not any(name.startswith(f"{other}.") for other in own)}
    return sorted({name.rpartition(".")[2] for name in outermost})


def add_adapters(model: PreTrainedModel, options: argparse.Namespace) -> PeftModel:
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=options.targets,
        modules_to_save=added_modules(model),
    )
    return get_peft_model(model, lora)


def make_trainer(options: argparse.Namespace) -> tuple[Trainer, list[dict], str]:
    """The trainer, the rows to measure with, and the folder of the model that it adds to."""
    more = {}
    if options.trl:
        try:
            from datasets import Dataset
            from trl import SFTConfig, SFTTrainer
        except ImportError:
            raise SystemExit("--trl: TRL is not installed (pip install trl).") from None
        # the pairs of a batch in one row, as in the other way; they are cut already
        more |= {"kind": SFTConfig, "max_length": None, "padding_free": True, "remove_unused_columns": True}
        if not options.activation_checkpointing:
            # which TRL does by default
            more["gradient_checkpointing"] = False
    arguments = training_arguments(options, **more)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    base = own_model(options, arguments)
    set_seed(options.seed)
    # frozen weights may be in bf16; what is trained beside them is in fp32
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation=options.attention)
    kwargs = {"model": add_adapters(model, options), "args": arguments, "mixing_lr": options.mixing_rate}
    train, held_out = read_pairs(options.data)
    train, held_out = (encode(pairs, tokenizer, options.length) for pairs in (train, held_out[:MEASURED_ROWS]))
    if not train or not held_out:
        raise SystemExit(f"--data {options.data}: must have pairs to train on, and a twentieth more to measure with.")
    if options.trl:
        trainer_class = type("GroupedSFTTrainer", (MixingRate, SFTTrainer), {})
        trainer = trainer_class(**kwargs, train_dataset=Dataset.from_list(train), processing_class=tokenizer)
    else:
        # the pairs of a batch in one row, which do not see each other, so that nothing is padded
        trainer = GroupedTrainer(**kwargs, train_dataset=train, data_collator=DataCollatorWithFlattening())
    return trainer, held_out, base


def main(argv: Sequence[str] | None = None) -> Trainer:
    options = parse_args(argv)
    trainer, held_out, base = make_trainer(options)
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.activation_checkpointing:
        raise SystemExit(
            "fsdp_activation_checkpointing: PEFT cannot save what is trained beside the adapters in layers that are "
            "wrapped so. Take fsdp2.yaml, and --activation-checkpointing of this script."
        )
    trainer.train(resume_from_checkpoint=options.resume)
    loss = held_out_loss(trainer, held_out)
    save_whole(trainer, options.output / "adapter")
    if trainer.is_world_process_zero():
        # merged where it is whole, with the weights as they were stored
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        merged = PeftModel.from_pretrained(model, options.output / "adapter").merge_and_unload()
        merged.save_pretrained(options.output / "model")
        AutoTokenizer.from_pretrained(options.model).save_pretrained(options.output / "model")
        print(f"held-out loss {loss:.4f} nats per token of completions; model in {options.output / 'model'}")
    return trainer


if __name__ == "__main__":
    main()
