# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""One arm: convert the pretrained model, load it, train it further on text that it has not seen, and look at it."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import depthmix
from benchmarks.study.corpus import Corpus, load_corpus
from benchmarks.study.training import Recipe, Run, Trainer, data_order
from benchmarks.study.worker import release
from depthmix.callbacks import gate_summary
from depthmix.conversion import convert
from depthmix.kernels import depth_value_mix_reference
from depthmix.optimizer import mixing_parameters

from .arms import Trial


# AdamW's cosine ends at a tenth of the peak: a continuation starts where the pretraining has stopped
PRETRAINING = Recipe(tokens=60_000_000, batch=32, rate=8e-3)
CONTINUATION = Recipe(tokens=40_000_000, batch=32, rate=8e-4)
# in the folder of a pretrained checkpoint
RECORD = "pretraining.json"


@dataclass(frozen=True)
class Row:
    """A finished trial, one line of `retrofit.csv`. Losses are held-out nats per token."""

    key: str
    system: str
    scale: float
    seed: int
    shape: str
    base_tokens: int
    base_loss: float
    tokens: int
    batch: int
    length: int
    rate: float
    loss_at_start: float
    loss: float
    bits_per_byte: float
    loss_of_mean_weights: float | None
    loss_of_exchanged_weights: float | None
    gate_mean_size: float | None
    mixing_moved: float | None
    parameters: int
    trained_parameters: int
    seconds: float
    step_ms: float
    peak_gib: float
    execution: str
    workers: int
    corpus: str
    gpu: str
    depthmix: str
    torch: str
    transformers: str
    triton: str
    date: str

    @property
    def pairs_by(self) -> tuple:
        """What two trials must share for their difference to be that of their arms."""
        # two pretrained models of one seed differ by the order in which a GPU adds up
        return (
            self.seed,
            self.shape,
            self.base_tokens,
            self.base_loss,
            self.tokens,
            self.batch,
            self.length,
            self.rate,
            self.corpus,
        )


class Pretraining(Trainer):
    """The vanilla model, which is written as a checkpoint of the stock class."""

    def write(self, folder: Path) -> None:
        config = self.model.config.to_dict()
        names = Qwen3Config().to_dict()
        stock = Qwen3ForCausalLM(Qwen3Config(**{name: config[name] for name in names if name in config}))
        stock.load_state_dict(self.model.state_dict())
        stock.bfloat16().save_pretrained(folder)


class Continuation(Trainer):
    """
    Args:
        trial (`Trial`):
            What is trained how.
        base (`Path`):
            The pretrained checkpoint.
        pretraining, run (`Run`):
            What it was trained on, and the recipe and seed of what follows.
        corpus, device, execution:
            Those of [`Trainer`].
    """

    def __init__(
        self, trial: Trial, base: Path, pretraining: Run, run: Run, corpus: Corpus, device: str, execution: str
    ):
        self.trial, self.base, self.pretraining = trial, base, pretraining
        self.gates: list[dict[str, float]] = []
        super().__init__(run, corpus, device, execution)
        names = mixing_parameters(self.model)
        self.start = {name: self.model.get_parameter(name).detach().clone() for name in names}
        self.loss_at_start, _ = self.held_out_loss()

    def build_model(self) -> nn.Module:
        torch.manual_seed(self.run.seed)
        arm = self.trial.arm
        if arm.to is None:
            model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        else:
            with tempfile.TemporaryDirectory() as folder:
                convert(self.base, Path(folder, "model"), to=arm.to, **arm.options)
                model = AutoModelForCausalLM.from_pretrained(Path(folder, "model"), dtype=torch.float32)
        if arm.trains == "adapters":
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
            model = get_peft_model(model, lora).get_base_model()
        elif arm.trains == "mixing":
            mixing = mixing_parameters(model)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in mixing)
        return model

    def parameter_groups(self) -> list[dict]:
        # rates relative to the recipe's, by which the trainer multiplies them
        scale, decay = self.trial.scale, self.recipe.decay
        rate = scale if self.trial.arm.trains == "adapters" else 1.0
        return depthmix.optimizer_groups(self.model, lr=rate, mixing_lr=scale, weight_decay=decay)

    def data_order(self, windows: int) -> Tensor:
        """Sequences that the pretraining has not read, in an order of the seed's own."""
        read = self.pretraining.recipe.steps * self.pretraining.recipe.batch
        unread = data_order(self.pretraining.seed, windows, windows)[read:]
        count = self.recipe.steps * self.recipe.batch
        if count > len(unread):
            raise ValueError(
                f"tokens={self.recipe.tokens}: the pretraining leaves {len(unread)} sequences, and {count} are needed."
            )
        return unread[data_order(self.run.seed + 1, len(unread), count)]

    def add_curve_point(self) -> None:
        super().add_curve_point()
        if gates := gate_summary(self.model):
            self.gates.append({"step": self.step, **gates})

    def depth_weights(self) -> None:
        return None

    @torch.no_grad()
    def mixing_moved(self) -> float | None:
        """Root mean square of how far the mixing parameters are from where they started."""
        squares = [(self.model.get_parameter(name) - start).square().flatten() for name, start in self.start.items()]
        return torch.cat(squares).mean().sqrt().item() if squares else None

    def ablated_loss(self, change: str) -> float:
        """The held-out loss of Depth-Attention with changed depth weights."""
        trained = self.model
        config = type(trained.config).from_dict(trained.config.to_dict() | {"depth_impl": "reference"})
        self.model = type(trained)(config).to(self.device)
        self.model.load_state_dict(trained.state_dict())
        try:
            with changed_depth_weights(change):
                return self.held_out_loss()[0]
        finally:
            self.model = trained


@contextmanager
def changed_depth_weights(change: str) -> Iterator[None]:
    """
    Depth-Attention's reference operation with weights `[B, Hkv, T, n]` that are not chosen by the token: their
    `"mean"` over all tokens of the batch, or those of another token of the same sequence (`"exchanged"`).
    """
    original = depth_value_mix_reference.depth_value_weights_reference
    generator = torch.Generator().manual_seed(0)

    def changed(*args, **kwargs) -> Tensor:
        weights = original(*args, **kwargs)
        if change == "mean":
            return weights.mean((0, 2), keepdim=True).expand_as(weights)
        return weights[:, :, torch.randperm(weights.shape[2], generator=generator).to(weights.device)]

    depth_value_mix_reference.depth_value_weights_reference = changed
    try:
        yield
    finally:
        depth_value_mix_reference.depth_value_weights_reference = original


def pretrain(run: Run, corpus: Path, base: Path, device: str, execution: str) -> None:
    """Trains the vanilla model and writes its checkpoint to the folder `base`."""
    trainer = Pretraining(run, load_corpus(corpus), device, execution)
    outcome = trainer.train(report=lambda message: print(f"pretraining: {message}", file=sys.stderr, flush=True))
    trainer.write(base)
    record = {"key": run.key, "loss": outcome.loss}
    (base / RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
    del trainer
    release()


def read_record(base: Path) -> dict | None:
    """Key and held-out loss of the pretraining that wrote a folder; None if there was none."""
    path = base / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def train(trial: Trial, run: Run, pretraining: Run, corpus: Path, base: Path, device: str, execution: str) -> dict:
    """What is known of a trial when it has ended: fields of its row, its curve and its gates."""
    began = time.monotonic()
    trainer = Continuation(trial, base, pretraining, run, load_corpus(corpus), device, execution)
    outcome = trainer.train()
    values = (
        asdict(run.recipe)
        | asdict(outcome)
        | {
            "key": trial.key,
            "system": trial.arm.name,
            "scale": trial.scale,
            "seed": trial.seed,
            "shape": run.shape,
            "base_tokens": pretraining.recipe.tokens,
            "base_loss": read_record(base)["loss"],
            "loss_at_start": trainer.loss_at_start,
            "loss_of_mean_weights": trainer.ablated_loss("mean") if trial.arm.ablated else None,
            "loss_of_exchanged_weights": trainer.ablated_loss("exchanged") if trial.arm.ablated else None,
            "gate_mean_size": trainer.gates[-1]["gate/mean_size"] if trainer.gates else None,
            "mixing_moved": trainer.mixing_moved(),
            "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            "seconds": time.monotonic() - began,
        }
    )
    details = {"key": trial.key, "curve": outcome.curve, "gates": trainer.gates}
    del trainer
    release()
    return {"values": values, "details": details}
