# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The models of the study: shapes, and one row for each system. Nothing but public interfaces is used."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

import depthmix  # noqa: F401  (registers its model types)

from .static_routing import StaticRouting


@dataclass(frozen=True)
class Shape:
    """A decoder. The head size is `hidden // heads`, since one of the backbones knows no other."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int

    def fields(self, vocab_size: int, length: int) -> dict:
        return {
            "vocab_size": vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": length,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": None,
            "use_cache": False,
        }


# parameters at a vocabulary of 2,048: 0.7M, 5.0M, 10.7M, 19.4M and 76.6M, all but the first deep and narrow; then 12
# and 48 layers of 10.7M
SHAPES = {
    # to propose tokens to the 5M decoders
    "draft": Shape(2, 128, 4, 2, 384),
    "5m": Shape(24, 128, 4, 2, 384),
    "10m": Shape(24, 192, 3, 1, 576),
    "20m": Shape(24, 256, 4, 2, 768),
    "76m": Shape(24, 512, 8, 4, 1536),
    "10m-12-layers": Shape(12, 256, 4, 2, 880),
    "10m-48-layers": Shape(48, 128, 2, 1, 448),
    # to try everything out on any machine
    "tiny": Shape(4, 32, 2, 1, 64),
}


@dataclass(frozen=True)
class System:
    """
    Args:
        fields (callable):
            Its configuration's own fields, for a shape.
        model_type (`str`, *optional*):
            The type of its configuration; left out, the model is a [`StaticRouting`] with these fields.
        control (`str`):
            The system that it is compared with.
        returns_weights (`bool`):
            Whether the model returns depth weights when asked to.
    """

    fields: Callable[[Shape], dict]
    model_type: str | None = None
    control: str = "vanilla"
    returns_weights: bool = False


def _strided(stride: Callable[[Shape], int], **others) -> System:
    return System(lambda shape: {"depth_stride": stride(shape)} | others, "depth_qwen3", returns_weights=True)


def _sources(shape: Shape) -> list[tuple[int, ...]]:
    """What each layer reads in Depth-Attention with a stride of half the layers."""
    stride = max(1, shape.layers // 2)
    return [tuple(range(0, layer, stride)) for layer in range(shape.layers)]


SYSTEMS = {
    "vanilla": System(lambda shape: {"depth_stride": 0}, "depth_qwen3"),
    # the q/k norms of the released Depth-Attention weights, and no mixing
    "norm control": System(lambda shape: {"depth_stride": 0, "key_norm_position": "after_rope"}, "depth_qwen3"),
    "Depth-Attention L/2": _strided(lambda shape: max(1, shape.layers // 2)),
    "Depth-Attention L/4": _strided(lambda shape: max(1, shape.layers // 4)),
    "Depth-Attention 1": _strided(lambda shape: 1),
    "Depth-Attention static": System(lambda shape: {"value_sources": _sources(shape)}),
    "AttnRes block": System(lambda shape: {"attnres_variant": "block"}, "attnres", returns_weights=True),
    "AttnRes full": System(lambda shape: {"attnres_variant": "full"}, "attnres", returns_weights=True),
    "AttnRes static": System(lambda shape: {"block_size": -(-2 * shape.layers // 8)}),
    "DenseFormer": System(lambda shape: {}, "denseformer"),
    "mHC": System(lambda shape: {}, "mhc"),
    "MoDA row 3": System(lambda shape: {"moda_ffn_slots": False}, "moda_qwen3"),
    "MoDA row 4": System(lambda shape: {}, "moda_qwen3"),
    "value residual": System(lambda shape: {}, "value_residual_qwen3"),
    # the operations of the others with half of their layers
    "looped vanilla": System(
        lambda shape: {"depth_stride": 0, "num_loops": 2, "num_hidden_layers": shape.layers // 2},
        "depth_qwen3",
        "looped vanilla",
    ),
    "looped Depth-Attention": System(
        lambda shape: {"num_loops": 2, "num_hidden_layers": shape.layers // 2},
        "depth_qwen3",
        "looped vanilla",
        returns_weights=True,
    ),
}


@dataclass(frozen=True)
class Initialisation:
    """
    Args:
        std (`float`):
            Of all matrices of the vanilla decoder.
        scaled_output (`bool`):
            Whether those that write to the residual stream are smaller by the square root of their number.
        embedding_std (`float`, *optional*):
            Of the embedding, if not the same.
    """

    std: float = 0.02
    scaled_output: bool = True
    embedding_std: float | None = None


def configuration(name: str, shape: str, vocab_size: int, length: int) -> PreTrainedConfig:
    system, size = SYSTEMS[name], SHAPES[shape]
    fields = size.fields(vocab_size, length)
    if system.model_type is None:
        return Qwen3Config(**fields)
    return AutoConfig.for_model(system.model_type, **fields | system.fields(size))


def build(
    name: str, shape: str, vocab_size: int, length: int, *, seed: int = 0, start: Initialisation | None = None
) -> nn.Module:
    """
    The model in fp32 on the CPU. A weight that the vanilla decoder has too starts from the same numbers in all systems
    of a seed, drawn by its name; what a system adds starts as the system says.
    """
    start = start or Initialisation()
    config = configuration(name, shape, vocab_size, length)
    torch.manual_seed(seed)
    if SYSTEMS[name].model_type is None:
        model = StaticRouting(config, **SYSTEMS[name].fields(SHAPES[shape]))
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    writers = 2 * config.num_hidden_layers * getattr(config, "num_loops", 1)
    vanilla = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            *_, module, kind = parameter_name.split(".")
            if module not in vanilla or kind != "weight":
                continue
            std = start.std
            if module == "embed_tokens" and start.embedding_std is not None:
                std = start.embedding_std
            if module in ("o_proj", "down_proj") and start.scaled_output:
                std /= writers**0.5
            digest = hashlib.sha256(f"{seed} {parameter_name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            parameter.normal_(0.0, std, generator=generator)
    return model
