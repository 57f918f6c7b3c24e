# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The main job from end to end, on a small trained Qwen3: convert, load, measure, fine-tune, generate, save, share.

Takes about three minutes on two CPU cores and no network.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed
from safetensors.torch import load_file
from text_corpus import TokenBlocks, mean_loss, pack, read_corpus
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    ProgressCallback,
    Trainer,
    TrainingArguments,
    logging,
    set_seed,
)

import depthmix
from depthmix.conversion import convert


EXAMPLES = Path(__file__).resolve().parent
VANILLA = EXAMPLES / "tiny_qwen3_python"
# trained from scratch alike, on text that this package is not a part of
TWINS = {
    "vanilla": EXAMPLES / "trained_pair" / "vanilla",
    "Depth-Attention": EXAMPLES / "trained_pair" / "depth_attention",
}
# Python source that every installation has and that the checkpoint was not trained on
FINE_TUNING_TEXT = Path(torch.distributed.__file__).parent
MARKER = ".depthmix_demo"
BLOCK_SIZE = 256
MEASURED_BLOCKS = 128
TWINS_BLOCK_SIZE, TWINS_BLOCKS = 512, 32
PROMPT = "def read_file(path"
NEW_TOKENS = 60


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the models made here")
    parser.add_argument("--steps", type=int, default=150, help="fine-tuning steps, of 8 blocks of 256 tokens each")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def heading(text: str) -> None:
    heading.number = getattr(heading, "number", 0) + 1
    print(f"\n{heading.number}. {text}", flush=True)


def empty_folder(folder: Path) -> Path:
    """Makes the folder, or empties it if an earlier run made it; a folder with anything else in it is refused."""
    if folder.exists() and not (folder / MARKER).exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"--output {folder}: exists and was not made by this demo; name another folder.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    return folder


class LossInBar(ProgressCallback):
    """The Trainer's progress bar with the current loss in it, instead of a line per log entry."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.3f}")


def fine_tune(model: PreTrainedModel, data: TokenBlocks, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            weight_decay=0.1,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=args.seed,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(LossInBar)
        trainer.train()
    model.eval()


def load_without_depthmix(folder: Path) -> dict[str, torch.Tensor]:
    """What a fresh Python process in which depthmix does not exist gets from the folder: logits and tokens."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "result.safetensors")
        # -S: no .pth files, so no editable installs; of the packages only the plain folders remain
        packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(packages),
            "HF_HOME": scratch,
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": str(Path(scratch, "modules")),
        }
        program = [sys.executable, "-S", EXAMPLES / "load_without_depthmix.py"]
        run = subprocess.run(
            [*program, folder.resolve(), PROMPT, str(NEW_TOKENS), result],
            cwd=scratch,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if run.returncode:
            sys.exit(f"FAILED: the process without depthmix could not load {folder}:\n{run.stdout}")
        print(run.stdout, end="")
        return load_file(result)


def compare_twins() -> None:
    """The losses of two models that were trained from scratch alike, one of them with mixing."""
    own_source = [path.read_text(encoding="utf-8") for path in sorted(Path(depthmix.__file__).parent.glob("*.py"))]
    for name, folder in TWINS.items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        blocks = pack(own_source, tokenizer, TWINS_BLOCK_SIZE).spread(TWINS_BLOCKS)
        print(f"{name:<16} {model.num_parameters():,} parameters, {mean_loss(model, blocks):.3f} nats per token")


def main() -> None:
    args = parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    set_seed(args.seed)
    output = empty_folder(args.output)
    converted, fine_tuned = output / "converted", output / "fine_tuned"

    heading("What mixing is for: two models trained from scratch alike, on text that neither has seen")
    compare_twins()

    heading("A vanilla Qwen3 checkpoint, trained on the source of Python's standard library")
    tokenizer = AutoTokenizer.from_pretrained(VANILLA)
    vanilla = AutoModelForCausalLM.from_pretrained(VANILLA, dtype=torch.float32)
    print(
        f"{type(vanilla).__name__}: {vanilla.num_parameters():,} parameters, {vanilla.config.num_hidden_layers} layers"
    )

    heading("Convert it to Depth-Attention")
    print(convert(VANILLA, converted, to="depth_qwen3"))

    heading("Load the result through the Auto class")
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    print(f"{type(model).__name__} (depthmix {depthmix.__version__}): {model.num_parameters():,} parameters")
    for layer, sources in enumerate(model.config.depth_sources):
        if sources:
            print(f"  layer {layer} mixes its value with those of layers {', '.join(map(str, sources))}")

    heading(
        f"Held-out loss on new text, the source of torch.distributed ({MEASURED_BLOCKS} blocks of {BLOCK_SIZE} tokens)"
    )
    corpus = read_corpus(FINE_TUNING_TEXT)
    data = pack(corpus.train, tokenizer, BLOCK_SIZE)
    held_out = pack(corpus.held_out, tokenizer, BLOCK_SIZE).spread(MEASURED_BLOCKS)
    before = {"vanilla Qwen3": mean_loss(vanilla, held_out), "Depth-Attention": mean_loss(model, held_out)}
    for name, loss in before.items():
        print(f"{name:<16} {loss:.3f} nats per token")

    heading(f"Fine-tune with Trainer: {args.steps} steps for each model, so that the comparison is fair")
    after = {}
    for name, candidate in zip(before, (vanilla, model), strict=True):
        print(name, flush=True)
        fine_tune(candidate, data, args)
        after[name] = mean_loss(candidate, held_out)

    heading("Held-out loss, before and after")
    print(f"{'':<16} {'before':>8} {'after':>8}")
    for name in before:
        print(f"{name:<16} {before[name]:>8.3f} {after[name]:>8.3f}")

    heading("Generate")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    with torch.inference_mode():
        logits = model(**inputs).logits
    text = tokenizer.decode(tokens[0])
    print(text)

    heading("Save")
    model.save_pretrained(fine_tuned)
    tokenizer.save_pretrained(fine_tuned)
    print(f"{fine_tuned}:", ", ".join(sorted(path.name for path in fine_tuned.iterdir())))

    heading("Load it in a process without depthmix, with trust_remote_code=True")
    other = load_without_depthmix(fine_tuned)
    if not torch.equal(other["logits"], logits):
        sys.exit(f"FAILED: the logits differ by up to {(other['logits'] - logits).abs().max():.3g}.")
    if tokenizer.decode(other["tokens"][0]) != text:
        sys.exit(f"FAILED: the text differs: {tokenizer.decode(other['tokens'][0])!r}.")
    print("same logits, bit for bit; same text")


if __name__ == "__main__":
    main()
