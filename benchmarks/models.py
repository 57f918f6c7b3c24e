# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Whole models: train step, prefill and decoding, against stock Qwen3 of the same shape."""

from collections.abc import Iterator
from functools import partial

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

from depthmix import (
    AttnResConfig,
    AttnResForCausalLM,
    DenseFormerConfig,
    DenseFormerForCausalLM,
    DepthQwen3Config,
    DepthQwen3ForCausalLM,
    MHCConfig,
    MHCForCausalLM,
)

from .harness import Measurement, measure, release_memory


# 48-layer models of 1.5 and 3 billion parameters, the latter in the shape of the released Depth-Attention weights
SHARED = {"vocab_size": 50304, "num_hidden_layers": 48, "head_dim": 64, "max_position_embeddings": 131072}
SIZES = {
    "1.5b": {"hidden_size": 1536, "num_attention_heads": 24, "num_key_value_heads": 6, "intermediate_size": 5184},
    "3b": {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 6912},
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRAIN_BATCH = {"1.5b": 8, "3b": 4}
MODELS = {
    "stock Qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "fused vanilla": (DepthQwen3ForCausalLM, DepthQwen3Config, {"depth_stride": 0}),
    "Depth-Attention": (DepthQwen3ForCausalLM, DepthQwen3Config, {}),
    "AttnRes": (AttnResForCausalLM, AttnResConfig, {"attnres_variant": "block"}),
    "AttnRes Full": (AttnResForCausalLM, AttnResConfig, {"attnres_variant": "full"}),
    "DenseFormer": (DenseFormerForCausalLM, DenseFormerConfig, {}),
    "mHC": (MHCForCausalLM, MHCConfig, {}),
}


# those to be measured unless others are asked for; the first of them is the yardstick
SELECTED = ["stock Qwen3", "fused vanilla", "Depth-Attention", "AttnRes"]


def build(model: str, size: str, **fields):
    """The model in bf16, on the GPU if there is one, with random weights from a fixed seed."""
    model_class, config_class, extra = MODELS[model]
    torch.manual_seed(0)
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return model_class(config_class(**SHARED | SIZES[size] | extra | fields))
        finally:
            torch.set_default_dtype(torch.float32)


def token_ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(SHARED["vocab_size"], (batch, length), device=DEVICE)


@torch.no_grad()
def check_function() -> None:
    """
    The gate before any number. Without kernels and mixing the model is stock Qwen3 bit for bit; with mixing on it
    differs; kernels change what rounding changes; decoding with a cache gives what the full forward gives.
    """
    ids = token_ids(2, 64)
    small = {"size": "1.5b", "num_hidden_layers": 4}

    def error(actual, expected):
        return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()

    def require(condition: bool, claim: str):
        if not condition:
            raise RuntimeError(f"It does not hold that {claim}.")

    stock = build("stock Qwen3", **small)(ids).logits
    plain = build("fused vanilla", **small, depth_impl="reference")(ids).logits
    require(torch.equal(plain, stock), "without mixing and kernels the model is stock Qwen3")
    mixing = build("Depth-Attention", **small, depth_stride=1, depth_impl="triton")
    reference = build("Depth-Attention", **small, depth_stride=1, depth_impl="reference")
    exact = reference.double()(ids).logits
    require(error(exact, stock) > 0.05, "mixing changes the logits")
    low_precision = error(reference.bfloat16()(ids).logits, exact)
    require(error(mixing(ids).logits, exact) < 1.5 * low_precision, "the kernels lose no more than plain bf16 does")
    mixing.float()
    require(error(mixing(ids).logits, exact) < 1e-4, "the kernels are exact in fp32")
    cache = DynamicCache(config=mixing.config)
    steps = [mixing(ids[:, i : i + 1], past_key_values=cache).logits for i in range(ids.shape[1])]
    require(error(torch.cat(steps, 1), exact) < 1e-4, "decoding with a cache gives the logits of the full forward")
    for name, fields in (("AttnRes", {"attnres_block_size": 3}), ("DenseFormer", {}), ("mHC", {})):
        if name in SELECTED:
            results = [logits_and_gradients(name, ids, depth_impl=impl, **fields) for impl in ("triton", "reference")]
            require(
                all(error(*pair) < 1e-3 for pair in zip(*results, strict=True)), f"the kernels of {name} are exact"
            )


@torch.enable_grad()
def logits_and_gradients(name: str, ids: torch.Tensor, **fields) -> list[torch.Tensor]:
    """Of a small model in fp32 whose mixing is awake."""
    model = build(name, "1.5b", num_hidden_layers=4, **fields).float()
    own = ("mixer", "depth_average", "connection", "readout")
    mixing = {name: p for name, p in model.named_parameters() if any(part in name for part in own)}
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in mixing.values():
            parameter.add_(0.02 * torch.randn_like(parameter))
    output = model(ids, labels=ids)
    output.loss.backward()
    # the first sub-layer has nothing to mix
    grads = [parameter.grad for name, parameter in mixing.items() if "layers.0.attn" not in name]
    return [output.logits, *grads, model.model.embed_tokens.weight.grad]


def compare(
    name: str, size: str, prepare, *, together: bool = True, models=tuple(MODELS), layers: int = 48, **options
) -> Iterator[Measurement]:
    """
    Measures `prepare(model)()` for each model, in turns while both are in memory; one after the other where they do
    not fit `together`.
    """
    models = [model_name for model_name in models if model_name in SELECTED]
    yardstick = None
    for group in [models] if together else [[model_name] for model_name in models]:
        built = [build(model_name, size, num_hidden_layers=layers) for model_name in group]
        timings = measure([prepare(model) for model in built], **options)
        for model_name, timing in zip(group, timings, strict=True):
            yardstick = yardstick or timing.median
            yield Measurement(
                *(name, size, model_name, timing.median, min(timing.times), max(timing.times), timing.peak_gib),
                ratio=timing.median / yardstick,
            )
        del built
        release_memory()


def train_step(name: str, size: str, *, compiled: bool = False, **options) -> Iterator[Measurement]:
    """Forward, loss, backward and AdamW, on sequences of 2048 tokens."""

    def prepare(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        ids = token_ids(TRAIN_BATCH[size], 2048)
        model.train()
        forward = torch.compile(model, fullgraph=True) if compiled else model

        def step():
            forward(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    yield from compare(name, size, prepare, together=False, **options)


def prefill(name: str, size: str, *, length: int, **options) -> Iterator[Measurement]:
    """A forward over a prompt, which fills a growing cache."""

    def prepare(model):
        ids = token_ids(1, length)

        @torch.no_grad()
        def step():
            model(ids, use_cache=True, logits_to_keep=1)

        return step

    yield from compare(name, size, prepare, **options)


def decode(
    name: str, size: str, *, batch: int, compiled: bool, context: int = 2048, **options
) -> Iterator[Measurement]:
    """One token for each sequence: eager with a growing cache, or compiled to a CUDA graph with a static one."""

    def prepare(model):
        cache = StaticCache(config=model.config, max_cache_len=context + 256) if compiled else DynamicCache()
        ids, last = token_ids(batch, context), token_ids(batch, 1)
        with torch.no_grad():
            model(ids, past_key_values=cache, logits_to_keep=1)
        forward = torch.compile(model, mode="reduce-overhead", fullgraph=True) if compiled else model
        position = torch.full((batch, 1), context, device="cuda")

        @torch.no_grad()
        def step():
            torch.compiler.cudagraph_mark_step_begin()
            forward(last, past_key_values=cache, position_ids=position, logits_to_keep=1)
            if not compiled:
                # at one length only: cuDNN plans attention anew for each, which the first model would pay for all
                cache.crop(-1)

        return step

    yield from compare(name, size, prepare, warmup=8, repeats=31, **options)


# where a model takes long to compile or to run
STOCK_AND_OURS = ("stock Qwen3", "Depth-Attention")
CASES = {
    "train_step": train_step,
    "train_step_compiled_16_layers": partial(train_step, compiled=True, layers=16, models=STOCK_AND_OURS),
    "prefill_8k": partial(prefill, length=8192),
    "prefill_32k": partial(prefill, length=32768, warmup=1, repeats=5),
    "prefill_128k": partial(prefill, length=131072, warmup=1, repeats=1, models=STOCK_AND_OURS),
    "decode_eager_batch_1": partial(decode, batch=1, compiled=False),
    "decode_eager_batch_32": partial(decode, batch=32, compiled=False),
    "decode_compiled_batch_1": partial(decode, batch=1, compiled=True),
    "decode_compiled_batch_32": partial(decode, batch=32, compiled=True),
}
