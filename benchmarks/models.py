# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Whole models: train step, prefill and decoding, against the stock model of the same shape."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from transformers import DynamicCache, Olmo2Config, Olmo2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, StaticCache

from depthmix import (
    AttnResConfig,
    AttnResForCausalLM,
    DenseFormerConfig,
    DenseFormerForCausalLM,
    DepthQwen3Config,
    DepthQwen3ForCausalLM,
    MHCConfig,
    MHCForCausalLM,
    MoDAOlmo2Config,
    MoDAOlmo2ForCausalLM,
    MoDAQwen3Config,
    MoDAQwen3ForCausalLM,
)
from depthmix.modeling.transformers_versions import HOST_CACHE_NAME

from .harness import DEVICE, Measurement, measure, release_memory


# name -> model, configuration, and the fields that make it this model
MODELS = {
    "stock Qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "fused vanilla": (DepthQwen3ForCausalLM, DepthQwen3Config, {"depth_stride": 0}),
    # of the release: its q/k norms, and no mixing
    "control": (DepthQwen3ForCausalLM, DepthQwen3Config, {"depth_stride": 0, "key_norm_position": "after_rope"}),
    "Depth-Attention": (DepthQwen3ForCausalLM, DepthQwen3Config, {}),
    "Depth-Attention, gates": (DepthQwen3ForCausalLM, DepthQwen3Config, {"depth_gate": True}),
    "looped vanilla": (DepthQwen3ForCausalLM, DepthQwen3Config, {"depth_stride": 0, "num_loops": 2}),
    "looped Depth-Attention": (DepthQwen3ForCausalLM, DepthQwen3Config, {"num_loops": 2}),
    "AttnRes": (AttnResForCausalLM, AttnResConfig, {"attnres_variant": "block"}),
    "AttnRes Full": (AttnResForCausalLM, AttnResConfig, {"attnres_variant": "full"}),
    "DenseFormer": (DenseFormerForCausalLM, DenseFormerConfig, {}),
    "mHC": (MHCForCausalLM, MHCConfig, {}),
    "MoDA on Qwen3": (MoDAQwen3ForCausalLM, MoDAQwen3Config, {}),
    "stock OLMo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "fused OLMo2": (MoDAOlmo2ForCausalLM, MoDAOlmo2Config, {"moda_attn_slots": False, "moda_ffn_slots": False}),
    "MoDA row 3": (MoDAOlmo2ForCausalLM, MoDAOlmo2Config, {"moda_ffn_slots": False}),
    "MoDA row 4": (MoDAOlmo2ForCausalLM, MoDAOlmo2Config, {}),
    "MoDA row 4, gates": (MoDAOlmo2ForCausalLM, MoDAOlmo2Config, {"moda_gate": True}),
    "MoDA window 16": (MoDAOlmo2ForCausalLM, MoDAOlmo2Config, {"moda_depth_window": 16}),
}


@dataclass(frozen=True)
class Size:
    """
    A shape, the models that have it, the first of which is the yardstick, those of them that are compiled, and how
    many sequences of how many tokens a train step has. For the gate: the model that is the stock one without kernels,
    and the one that mixes, with the fields that make every layer do so.
    """

    fields: dict
    models: tuple[str, ...]
    compiled: tuple[str, ...]
    batch: int
    tokens: int
    plain: str
    mixing: tuple[str, dict]


def qwen3(batch: int, **fields) -> Size:
    """The shape of the released Depth-Attention weights, scaled."""
    shared = {"vocab_size": 50304, "num_hidden_layers": 48, "head_dim": 64, "max_position_embeddings": 131072}
    models = tuple(name for name, (_, config_class, _) in MODELS.items() if not issubclass(config_class, Olmo2Config))
    mixing = ("Depth-Attention", {"depth_stride": 1})
    return Size(shared | fields, models, (models[0], *models[2:]), batch, 2048, "fused vanilla", mixing)


def olmo2(batch: int, tokens: int, **fields) -> Size:
    models = ("stock OLMo2", "fused OLMo2", "MoDA row 3", "MoDA row 4", "MoDA row 4, gates", "MoDA window 16")
    return Size(fields, models, (models[0], *models[3:]), batch, tokens, "fused OLMo2", ("MoDA row 4", {}))


SIZES = {
    "1.5b": qwen3(8, hidden_size=1536, num_attention_heads=24, num_key_value_heads=6, intermediate_size=5184),
    "3b": qwen3(4, hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, intermediate_size=6912),
    # of the paper of Mixture-of-Depths Attention
    "700m": olmo2(
        4,
        4096,
        vocab_size=100278,
        hidden_size=1024,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=4096,
        max_position_embeddings=131072,
        eos_token_id=100257,
        pad_token_id=100277,
    ),
    # not to be measured, but to see that everything runs, also without a GPU
    "tiny": olmo2(
        2,
        64,
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        eos_token_id=2,
    ),
}

# those to be measured, unless others are asked for
_ON_REQUEST = (
    *("control", "Depth-Attention, gates", "looped vanilla", "looped Depth-Attention", "AttnRes Full", "DenseFormer"),
    *("mHC", "MoDA on Qwen3", "MoDA row 4, gates"),
)
SELECTED = [name for name in MODELS if name not in _ON_REQUEST]


def build(model: str, size: str, **fields):
    """The model in bf16, on the GPU if there is one, with random weights from a fixed seed."""
    model_class, config_class, extra = MODELS[model]
    fields = SIZES[size].fields | extra | fields
    # a looped model has as many layers as the others in all its passes, and so a part of their weights
    fields["num_hidden_layers"] //= fields.get("num_loops", 1)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return model_class(config_class(**fields))
        finally:
            torch.set_default_dtype(torch.float32)


def token_ids(model, batch: int, length: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (batch, length), device=DEVICE)


def train_step(model, batch: int, tokens: int, *, compiled: bool = False) -> Callable[[], torch.Tensor]:
    """Forward, loss, backward and AdamW; the step returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = token_ids(model, batch, tokens)
    model.train()
    forward = torch.compile(model, fullgraph=True) if compiled else model

    def step():
        loss = forward(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def prefill(model, length: int) -> Callable[[], None]:
    """A forward over a prompt, which fills a growing cache."""
    ids = token_ids(model, 1, length)
    model.eval()

    @torch.no_grad()
    def step():
        model(ids, use_cache=True, logits_to_keep=1)

    return step


def decode(model, batch: int, context: int, *, compiled: bool = False) -> Callable[[], None]:
    """One token for each sequence: eager with a growing cache, or compiled to a CUDA graph with a static one."""
    config = model.config
    cache = StaticCache(config=config, max_cache_len=context + 256) if compiled else DynamicCache(config=config)
    ids, last = token_ids(model, batch, context), token_ids(model, batch, 1)
    model.eval()
    with torch.no_grad():
        model(ids, **{HOST_CACHE_NAME: cache}, logits_to_keep=1)
    forward = torch.compile(model, mode="reduce-overhead", fullgraph=True) if compiled else model
    position = torch.full((batch, 1), context, device=DEVICE)

    @torch.no_grad()
    def step():
        torch.compiler.cudagraph_mark_step_begin()
        forward(last, **{HOST_CACHE_NAME: cache}, position_ids=position, logits_to_keep=1)
        if not compiled:
            # at one length only: cuDNN plans attention anew for each, which the first model would pay for all
            cache.crop(-1)

    return step


@torch.no_grad()
def check_function(size: str) -> None:
    """
    The gate before any number. Without kernels and mixing the model is the stock one bit for bit; with mixing on it
    differs; kernels change what rounding changes; decoding with a cache gives what the full forward gives.
    """
    shape, few = SIZES[size], {"size": size, "num_hidden_layers": 4}

    def error(actual, expected):
        return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()

    def require(condition: bool, claim: str):
        if not condition:
            raise RuntimeError(f"It does not hold that {claim}.")

    stock = build(shape.models[0], **few)
    ids = token_ids(stock, 2, 64)
    stock = stock(ids).logits
    plain = build(shape.plain, **few, depth_impl="reference")(ids).logits
    require(torch.equal(plain, stock), "without mixing and kernels the model is the stock one")
    name, awake = shape.mixing
    mixing = build(name, **few, **awake, depth_impl="triton" if DEVICE == "cuda" else "auto")
    reference = build(name, **few, **awake, depth_impl="reference")
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
        if name in SELECTED and name in shape.models:
            results = [logits_and_gradients(name, ids, depth_impl=impl, **fields) for impl in ("triton", "reference")]
            require(
                all(error(*pair) < 1e-3 for pair in zip(*results, strict=True)), f"the kernels of {name} are exact"
            )


@torch.enable_grad()
def logits_and_gradients(name: str, ids: torch.Tensor, **fields) -> list[torch.Tensor]:
    """Logits and gradients of a small model in fp32 whose mixing is awake."""
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
    name: str,
    size: str,
    prepare,
    *,
    together: bool = True,
    compiled: bool = False,
    layers: int | None = None,
    **options,
) -> Iterator[Measurement]:
    """
    Measures `prepare(model)()` for each model, in turns while all are in memory; one after the other where they do
    not fit `together`. Where a model takes long to compile or to run, only those are measured that are `compiled`.
    """
    shape = SIZES[size]
    models = [each for each in (shape.compiled if compiled else shape.models) if each in SELECTED]
    fields = {} if layers is None else {"num_hidden_layers": min(layers, shape.fields["num_hidden_layers"])}
    yardstick = None
    for group in [models] if together else [[model_name] for model_name in models]:
        built = [build(model_name, size, **fields) for model_name in group]
        timings = measure([prepare(model) for model in built], **options)
        for model_name, timing in zip(group, timings, strict=True):
            yardstick = yardstick or timing.median
            yield Measurement(
                *(name, size, model_name, timing.median, min(timing.times), max(timing.times), timing.peak_gib),
                ratio=timing.median / yardstick,
            )
        del built
        release_memory()


def compare_train_steps(name: str, size: str, *, compiled: bool = False, **options) -> Iterator[Measurement]:
    def prepare(model):
        return train_step(model, SIZES[size].batch, SIZES[size].tokens, compiled=compiled)

    yield from compare(name, size, prepare, together=False, compiled=compiled, **options)


def compare_prefills(name: str, size: str, *, length: int, **options) -> Iterator[Measurement]:
    yield from compare(name, size, partial(prefill, length=length), **options)


def compare_decoding(name: str, size: str, *, batch: int, compiled: bool, **options) -> Iterator[Measurement]:
    prepare = partial(decode, batch=batch, context=2048, compiled=compiled)
    yield from compare(name, size, prepare, compiled=compiled, warmup=8, repeats=31, **options)


CASES = {
    "train_step": compare_train_steps,
    "train_step_compiled_16_layers": partial(compare_train_steps, compiled=True, layers=16),
    "prefill_8k": partial(compare_prefills, length=8192),
    "prefill_32k": partial(compare_prefills, length=32768, warmup=1, repeats=5),
    "prefill_128k": partial(compare_prefills, length=131072, warmup=1, repeats=1, compiled=True),
    "decode_eager_batch_1": partial(compare_decoding, batch=1, compiled=False),
    "decode_eager_batch_32": partial(compare_decoding, batch=32, compiled=False),
    "decode_compiled_batch_1_16_layers": partial(compare_decoding, batch=1, compiled=True, layers=16),
    "decode_compiled_batch_1": partial(compare_decoding, batch=1, compiled=True),
    "decode_compiled_batch_32": partial(compare_decoding, batch=32, compiled=True),
}
