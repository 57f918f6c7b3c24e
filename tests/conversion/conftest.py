# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Source checkpoints for the conversion."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen3Config, Qwen3ForCausalLM


# lets the tests of this folder import what lies beside them
sys.path.append(str(Path(__file__).parent))

from vanilla_models import STOCK, VANILLA


@pytest.fixture
def vanilla_source(tmp_path, tiny):
    """`vanilla_source(kind, **fields)` saves an awake stock model of `VANILLA` and returns its folder."""

    def make(kind, **more):
        config_class, model_class, fields = VANILLA[kind]
        torch.manual_seed(0)
        if config_class is Qwen2Config:
            del tiny["head_dim"]
        model = model_class(config_class(**(tiny | fields | more)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / "source")
        return tmp_path / "source"

    return make


@pytest.fixture
def stock_source(tmp_path, tiny):
    """`stock_source(kind)` saves a small awake model of `STOCK` and returns its folder."""

    def make(kind):
        config_class, model_class = STOCK[kind]
        torch.manual_seed(0)
        shape = {"num_hidden_layers": 2, "intermediate_size": 32}
        if kind in ("qwen2", "olmo2"):
            del tiny["head_dim"]
        model = model_class(config_class(**tiny | shape))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return make


@pytest.fixture
def qwen3_source(tmp_path, tiny):
    """`qwen3_source(**fields)` saves an awake vanilla Qwen3 and returns its folder; `shard_size` splits it."""

    def make(name="source", *, shard_size="5GB", **fields):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**(tiny | fields)))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name or "bias" in parameter_name:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / name, max_shard_size=shard_size)
        return tmp_path / name

    return make


@pytest.fixture
def edit_config():
    """`edit_config(folder, **fields)` sets fields of a config.json; `...` removes one."""

    def edit_config(folder, **fields):
        path = folder / "config.json"
        config = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))

    return edit_config


@pytest.fixture
def layer_shapes():
    """`layer_shapes(hidden, inner, heads, kv_heads, width)` gives a layer's tensors in the release's order."""

    def layer_shapes(hidden, inner, heads, kv_heads, width):
        return {
            "self_attn.q_proj": (heads * width, hidden),
            "self_attn.k_proj": (kv_heads * width, hidden),
            "self_attn.v_proj": (kv_heads * width, hidden),
            "self_attn.o_proj": (hidden, heads * width),
            "self_attn.q_norm": (width,),
            "self_attn.k_norm": (width,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }

    return layer_shapes


@pytest.fixture
def released_tensors(layer_shapes):
    """The weights of the whole-model vector: every tensor is a sine of its place in the list and its indices."""
    vocab, hidden, inner, heads, kv_heads, width = 11, 8, 12, 4, 2, 4
    shapes_of_layer = layer_shapes(hidden, inner, heads, kv_heads, width)
    shapes = {"model.embed_tokens": (vocab, hidden)}
    for layer in range(4):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in shapes_of_layer.items()}
    shapes |= {"model.norm": (hidden,), "lm_head": (vocab, hidden), "lm_head_layernorm": (hidden,)}

    def fill(place, shape):
        row = torch.arange(shape[0], dtype=torch.float64)
        if len(shape) == 1:
            return 1 + 0.3 * torch.sin(1.1 * row + 0.5 * place)
        column = torch.arange(shape[1], dtype=torch.float64)
        return 0.4 * torch.sin(0.7 * row[:, None] + 1.3 * column + 0.9 * place + 0.2)

    tensors = {f"{name}.weight": fill(place, shape) for place, (name, shape) in enumerate(shapes.items())}
    assert len(tensors) == 48
    assert math.isclose(tensors["lm_head.weight"][0, 0].item(), -0.275364, abs_tol=1e-6)
    return tensors


@pytest.fixture
def released_source(tmp_path, released_tensors):
    """`released_source(**method_keys)` writes these weights in the layout of the Depth-Attention release."""

    def make(name="released", *, without=(), **method_keys):
        folder = tmp_path / name
        folder.mkdir()
        kept = {key: tensor for key, tensor in released_tensors.items() if not any(part in key for part in without)}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 11,
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "initializer_range": 0.01,
            "rms_norm_eps": 1e-5,
            "pretraining_tp": 1,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "tie_word_embeddings": False,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "use_qk_norm": True,
            "scale_embeds": False,
            "torch_dtype": "float64",
            "transformers_version": "4.46.1",
            "use_cache": True,
        } | method_keys
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
        return folder

    return make
