# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
One run: a model from its first step to its held-out loss.

On a GPU a step is recorded as a CUDA graph, since small models are otherwise bound by the host. The steps before the
recording, which warm up kernels, are steps of the training as all others are. A run that has to stop keeps everything
that its later steps depend on; continued, it takes the same steps.
"""

import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .corpus import END_OF_TEXT, Corpus
from .systems import SYSTEMS, Initialisation, build


EXECUTIONS = ("eager", "graph", "compiled")
# steps before a graph is recorded, and between two looks at the clock
WARM_UP_CALLS = 3
STEPS_PER_LOOK = 20
CURVE_POINTS = 16


@dataclass(frozen=True)
class Recipe:
    """
    AdamW with linear warm-up and a cosine down to a part of the peak rate; bf16 autocast on a GPU.

    Args:
        tokens (`int`):
            How many to train on.
        batch, length (`int`):
            Sequences in a step, and tokens in each.
        rate (`float`):
            The peak.
        warm_up, last (`float`):
            Part of the steps over which the rate rises, and part of the peak at which it ends.
        decay, beta_1, beta_2, clip (`float`):
            Weight decay (of matrices), decay of both moments, and the largest norm of a gradient.
        start (`Initialisation`):
            How the weights start.
    """

    tokens: int
    batch: int = 64
    length: int = 1024
    rate: float = 1e-3
    warm_up: float = 0.05
    last: float = 0.1
    decay: float = 0.1
    beta_1: float = 0.9
    beta_2: float = 0.95
    clip: float = 1.0
    start: Initialisation = field(default_factory=Initialisation)

    @property
    def steps(self) -> int:
        return max(1, round(self.tokens / (self.batch * self.length)))

    def rate_at(self, step: int) -> float:
        """The learning rate of the step with this index, of which the first is 0."""
        rising = max(1, round(self.warm_up * self.steps))
        if step < rising:
            return self.rate * (step + 1) / rising
        part = (step - rising) / max(1, self.steps - rising)
        return self.rate * (self.last + (1 - self.last) * 0.5 * (1 + math.cos(math.pi * part)))


def unusual_fields(settings: object) -> dict:
    """The fields of a dataclass, and of those in it, that are not at their defaults."""
    found = {}
    for each in fields(settings):
        value = getattr(settings, each.name)
        usual = each.default_factory() if each.default_factory is not MISSING else each.default
        if value != usual:
            found[each.name] = unusual_fields(value) if is_dataclass(value) else value
    return found


@dataclass(frozen=True)
class Run:
    """What is trained; two runs with equal fields are the same run, wherever they are."""

    system: str
    shape: str
    recipe: Recipe
    seed: int = 0
    vocab_size: int = 2048

    @property
    def key(self) -> str:
        # of what is not as usual, so that a new field does not make all runs new ones
        return sha256(json.dumps(unusual_fields(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        recipe = self.recipe
        return f"{self.shape} {self.system}, rate {recipe.rate:g}, {recipe.tokens / 1e6:g}M tokens, seed {self.seed}"

    @classmethod
    def from_dict(cls, settings: dict) -> "Run":
        recipe = settings["recipe"]
        recipe = Recipe(**recipe | {"start": Initialisation(**recipe["start"])})
        return cls(**settings | {"recipe": recipe})


@dataclass
class Outcome:
    """
    What a run gave. Losses are held-out nats per token; the curve has the tokens, the seconds of training, the loss on
    a part of what is held out and that on the training tokens since the point before. Depth weights are, for each
    layer or site, the means over tokens by source (and head), and the deviations over tokens.
    """

    parameters: int
    steps: int
    loss: float
    bits_per_byte: float
    train_loss: float
    seconds: float
    step_ms: float
    peak_gib: float
    execution: str
    curve: list[tuple[int, float, float, float]]
    depth_weights: dict | None = None


class Paused(Exception):
    """The run stopped in time and can be continued; or it was seen that it cannot end in time, and it stopped."""


def data_order(seed: int, windows: int, count: int) -> torch.Tensor:
    """
    Indices of windows, one for each sequence of a training, from the seed alone: all windows in a random order, then
    all of them in another.
    """
    generator = torch.Generator().manual_seed(seed)
    epochs = [torch.randperm(windows, generator=generator) for _ in range(-(-count // windows))]
    return torch.cat(epochs)[:count]


def parameter_groups(model: nn.Module, decay: float) -> list[dict]:
    """Matrices decay. Gains, and the logits of static weights, which decay would draw to equality, do not."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decays = {name for name, p in named if p.ndim > 1 and "_logits." not in name}
    return [
        {"params": [p for name, p in named if name in decays], "weight_decay": decay},
        {"params": [p for name, p in named if name not in decays], "weight_decay": 0.0},
    ]


class Trainer:
    """
    A run's model, optimizer and data on a device, between two steps.

    Args:
        run (`Run`), corpus (`Corpus`), device (`str`):
            What is trained, on what, where.
        execution (`str`):
            `"eager"`; `"graph"`, which records a step as a CUDA graph; or `"compiled"`, which compiles the layers
            before. The last two need a GPU.
    """

    def __init__(self, run: Run, corpus: Corpus, device: str, execution: str = "eager"):
        if execution not in EXECUTIONS:
            raise ValueError(f"execution={execution!r}: must be one of {', '.join(EXECUTIONS)}.")
        if execution != "eager" and device == "cpu":
            raise ValueError(f"execution={execution!r}: must be 'eager' on a CPU, which has no graphs.")
        if run.vocab_size != corpus.description.vocab_size:
            raise ValueError(
                f"vocab_size={run.vocab_size}: must be that of the corpus, {corpus.description.vocab_size}."
            )
        recipe = run.recipe
        self.run, self.recipe, self.corpus, self.device, self.execution = run, recipe, corpus, device, execution
        self.model = self.build_model().to(device)
        self.on_gpu = torch.device(device).type == "cuda"
        groups = self.parameter_groups()
        self.relative_rates = [group.pop("lr", 1.0) for group in groups]
        self.optimizer = torch.optim.AdamW(
            groups, lr=0.0, betas=(recipe.beta_1, recipe.beta_2), fused=True, capturable=self.on_gpu
        )
        self.put_rates_on_device()
        self.length = recipe.length
        windows = len(corpus.train) // self.length
        if windows < recipe.batch:
            raise ValueError(f"batch={recipe.batch}: the corpus has {windows} sequences of {self.length} tokens.")
        self.order = self.data_order(windows).view(recipe.steps, recipe.batch)
        # both streams are small beside what a GPU has, and the host need not wait for a batch
        self.train_tokens = self.tokens_of(corpus.train).view(-1, self.length)
        self.held_out_tokens = self.tokens_of(corpus.held_out).view(-1, self.length)
        if not len(self.held_out_tokens):
            raise ValueError(f"length={self.length}: what is held out has {len(corpus.held_out)} tokens only.")
        self.token_bytes = torch.from_numpy(corpus.token_bytes).to(device)
        self.order = self.order.to(device)
        self.ids = torch.zeros(recipe.batch, self.length, dtype=torch.long, device=device)
        self.losses = torch.zeros(recipe.steps, device=device)
        self.loss: torch.Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm_up_stream = torch.cuda.Stream() if self.on_gpu else None
        self.calls, self.step, self.seconds = 0, 0, 0.0
        self.curve: list[tuple[int, float, float, float]] = []
        self.step_times: list[float] = []
        if execution == "compiled":
            self.compile_layers()

    def build_model(self) -> nn.Module:
        """The model on the CPU, in fp32."""
        run, recipe = self.run, self.recipe
        return build(run.system, run.shape, run.vocab_size, recipe.length, seed=run.seed, start=recipe.start)

    def parameter_groups(self) -> list[dict]:
        """Those of the optimizer; a group's `lr`, 1 if left out, is what the recipe's rate is multiplied with."""
        return parameter_groups(self.model, self.recipe.decay)

    def data_order(self, windows: int) -> torch.Tensor:
        """Which of so many windows each sequence of the training is, in their order."""
        return data_order(self.run.seed, windows, self.recipe.steps * self.recipe.batch)

    def put_rates_on_device(self) -> None:
        # a recorded step reads them there
        if self.on_gpu:
            for group in self.optimizer.param_groups:
                group["lr"] = torch.tensor(0.0, device=self.device)

    def tokens_of(self, stream) -> torch.Tensor:
        whole = len(stream) // self.length * self.length
        return torch.from_numpy(stream[:whole].astype("int16" if self.run.vocab_size <= 2**15 else "int32")).to(
            self.device
        )

    def compile_layers(self) -> None:
        # one program for all layers that are alike; those of a model differ by how many sources they read
        torch._dynamo.config.recompile_limit = 128
        torch._dynamo.config.accumulated_recompile_limit = 1024
        for layer in self.model.model.layers:
            layer.compile(dynamic=False)

    def autocast(self):
        return torch.autocast("cuda", torch.bfloat16) if self.on_gpu else contextlib.nullcontext()

    def uncompiled(self):
        """For what runs seldom, which is not worth a program of its own."""
        is_compiled = self.execution == "compiled"
        return torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext()

    def forward(self, ids: torch.Tensor, **kwargs):
        # an explicit "no mask": where a graph is recorded, models cannot look whether there is padding
        return self.model(ids, attention_mask={"full_attention": None}, use_cache=False, **kwargs)

    def forward_backward_update(self) -> None:
        with self.autocast():
            loss = self.forward(self.ids, labels=self.ids).loss
        loss.backward()
        # without its history, whose nodes would be used again by the next call on another stream
        self.loss = loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()

    def take_step(self) -> None:
        rate = self.recipe.rate_at(self.step)
        for group, relative in zip(self.optimizer.param_groups, self.relative_rates, strict=True):
            if self.on_gpu:
                group["lr"].fill_(rate * relative)
            else:
                group["lr"] = rate * relative
        self.ids.copy_(self.train_tokens[self.order[self.step]])
        if self.graph is not None:
            self.graph.replay()
        elif self.execution == "eager":
            self.forward_backward_update()
            self.optimizer.zero_grad()
        elif self.calls < WARM_UP_CALLS:
            self.warm_up_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.warm_up_stream):
                self.forward_backward_update()
                self.optimizer.zero_grad()
            torch.cuda.current_stream().wait_stream(self.warm_up_stream)
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.warm_up_stream):
                self.forward_backward_update()
            self.graph = graph
            self.graph.replay()
        self.losses[self.step] = self.loss
        self.calls += 1
        self.step += 1

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    @torch.no_grad()
    def held_out_loss(self, windows: int | None = None) -> tuple[float, float]:
        """
        Nats per token and bits per byte of (the first `windows` sequences of) what is held out. All tokens but the
        first of a sequence are predicted; that which ends a document counts as a token and has no bytes.
        """
        sequences = self.held_out_tokens[:windows]
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        count = total_bytes = 0
        for ids in sequences.split(self.recipe.batch):
            ids = ids.long()
            with self.autocast(), self.uncompiled():
                logits = self.forward(ids).logits
            targets = ids[:, 1:].flatten()
            nats += functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum").double()
            count += targets.numel()
            total_bytes += self.token_bytes[targets].sum()
        return nats.item() / count, nats.item() / math.log(2) / int(total_bytes)

    def add_curve_point(self) -> None:
        since = self.curve[-1][0] // (self.recipe.batch * self.length) if self.curve else 0
        loss, _ = self.held_out_loss(2 * self.recipe.batch)
        train_loss = self.losses[since : self.step].mean().item()
        self.curve.append((self.step * self.recipe.batch * self.length, self.seconds, loss, train_loss))

    @torch.no_grad()
    def depth_weights(self) -> dict | None:
        """Means and deviations over tokens of one batch of what is held out, if the system has depth weights."""
        if isinstance(weights := getattr(self.model, "depth_weights", None), Callable):
            return {"mean": [each.tolist() for each in weights()], "deviation": None}
        if not SYSTEMS[self.run.system].returns_weights:
            return None
        ids = self.held_out_tokens[: max(1, self.recipe.batch // 8)].long()
        with self.autocast(), self.uncompiled():
            weights = self.forward(ids, output_depth_weights=True).depth_weights
        # of Depth-Attention by head: `[B, Hkv, T, n]`, else `[B, T, n]`
        over = [(0, each.ndim - 2) for each in weights]
        return {
            "mean": [each.float().mean(dims).tolist() for each, dims in zip(weights, over, strict=True)],
            "deviation": [
                each.float().std(dims, correction=0).tolist() for each, dims in zip(weights, over, strict=True)
            ],
        }

    def state(self) -> dict:
        return {
            "key": self.run.key,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
            "step_times": self.step_times,
            "corpus": self.corpus.description.checksum,
        }

    def load_state(self, state: dict) -> None:
        expected = {"key": self.run.key, "corpus": self.corpus.description.checksum}
        for name, value in expected.items():
            if state[name] != value:
                raise ValueError(f"The checkpoint is of another run: its {name} is {state[name]}, not {value}.")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.put_rates_on_device()
        self.losses.copy_(state["losses"])
        for name in ("step", "seconds", "curve", "step_times"):
            setattr(self, name, state[name])

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".partial.{os.getpid()}")
        torch.save(self.state(), partial)
        partial.replace(path)

    def save_model(self, folder: Path, tokenizer: Path) -> None:
        """
        The model in bf16, whose mixing parameters stay fp32, and the tokenizer of its corpus. Ends the training.

        Raises:
            `ValueError`: for a control of the study's own, which no library could load.
        """
        if not isinstance(self.model, PreTrainedModel):
            raise ValueError(f"--models: {self.run.label} is a {type(self.model).__name__}, which cannot be saved.")
        # nothing was cached in training
        self.model.config.use_cache = self.model.generation_config.use_cache = True
        self.model.to(torch.bfloat16).save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token=END_OF_TEXT).save_pretrained(folder)

    def train(
        self,
        *,
        deadline: float | None = None,
        checkpoint: Path | None = None,
        report: Callable[[str], None] = lambda message: None,
    ) -> Outcome:
        """
        Args:
            deadline (`float`, *optional*):
                What `time.monotonic()` must not pass.
            checkpoint (`Path`, *optional*):
                Where the run is continued from, and kept if it has to stop.
            report (callable):
                Gets messages on how it goes.

        Raises:
            `Paused`: at the deadline; without a checkpoint as soon as it is seen that the run will not end in time.
        """
        if checkpoint is not None and checkpoint.exists():
            self.load_state(torch.load(checkpoint, map_location=self.device, weights_only=True))
            report(f"continues after step {self.step} of {self.recipe.steps}")
        steps = self.recipe.steps
        points = {max(1, round(steps * (i + 1) / CURVE_POINTS)) for i in range(CURVE_POINTS)}
        self.model.train()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.synchronize()
        began, looked, since = time.monotonic(), time.monotonic(), self.step
        while self.step < steps:
            self.take_step()
            if self.step in points or (self.step - since) >= STEPS_PER_LOOK or self.step == steps:
                self.synchronize()
                now = time.monotonic()
                self.seconds += now - looked
                # those with compilation and recording are no measure of a step
                if self.calls - (self.step - since) > WARM_UP_CALLS:
                    self.step_times.append((now - looked) / (self.step - since))
                if self.step in points:
                    self.add_curve_point()
                    tokens, _, held_out, train = self.curve[-1]
                    report(f"{tokens / 1e6:.1f}M tokens: held-out {held_out:.4f}, training {train:.4f}")
                    if not math.isfinite(train):
                        break
                if deadline is not None and self.step < steps:
                    self.stop_in_time(deadline, checkpoint)
                looked, since = time.monotonic(), self.step
        loss, bits = self.held_out_loss()
        outcome = Outcome(
            parameters=sum(p.numel() for p in self.model.parameters()),
            steps=self.step,
            loss=loss,
            bits_per_byte=bits,
            train_loss=self.losses[max(0, self.step - max(1, steps // 20)) : self.step].mean().item(),
            seconds=self.seconds,
            step_ms=1000 * statistics.median(self.step_times) if self.step_times else math.nan,
            peak_gib=torch.cuda.max_memory_allocated() / 2**30 if self.on_gpu else math.nan,
            execution=self.execution,
            curve=self.curve,
            depth_weights=self.depth_weights(),
        )
        report(f"done in {time.monotonic() - began:.0f} s: held-out {loss:.4f} nats, {bits:.4f} bits per byte")
        if checkpoint is not None:
            checkpoint.unlink(missing_ok=True)
        return outcome

    def stop_in_time(self, deadline: float, checkpoint: Path | None) -> None:
        # what is left to do after the last step takes as long as few steps
        usual = statistics.median(self.step_times) if self.step_times else 0.0
        left = deadline - time.monotonic()
        if checkpoint is None:
            needed = usual * (self.recipe.steps - self.step)
            # others may end and leave it more of the GPU
            if left < 0 or (len(self.step_times) >= 3 and needed > 1.3 * left):
                raise Paused(f"needs {needed:.0f} s more and has {left:.0f}; nothing is kept")
        elif left < max(2.0, 2 * usual * STEPS_PER_LOOK):
            self.save(checkpoint)
            raise Paused(f"kept after step {self.step} of {self.recipe.steps}")
