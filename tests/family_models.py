# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Tiny models of every method on every backbone, and their vanilla ones."""

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast


CACHE_NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
# fields that bring out what is peculiar to a backbone
BACKBONE_FIELDS = {
    "dense": {"head_dim": 16},
    "qwen3": {"head_dim": 24, "use_sliding_window": True, **SLIDING},
    "qwen2": {"use_sliding_window": True, **SLIDING},
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 6, "head_dim": 24},
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, **SLIDING},
    "olmo2": {"attention_bias": True},
    "olmo3": SLIDING,
    "qwen3_moe": {"head_dim": 24, "moe_intermediate_size": 32, "mlp_only_layers": [1], **EXPERTS},
    "olmoe": {"clip_qkv": 1.0, **EXPERTS},
    "kimi_linear": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
}
# stock models that the backbone `dense` stands for, with what is peculiar to each
DENSE_SOURCES = {
    "qwen3": BACKBONE_FIELDS["qwen3"],
    "qwen2": BACKBONE_FIELDS["qwen2"],
    "llama": BACKBONE_FIELDS["llama"] | {"head_dim": 24},
}
# with these fields a new model computes what its vanilla one does: bit for bit, or up to rounding
VANILLA_FIELDS = {
    "depth_attention": {"depth_stride": 0},
    "attnres": {"attnres_scale": "sum", "attnres_block_size": 3},
    "denseformer": {},
    "mhc": {"mhc_num_streams": 3},
    "moda": {"moda_attn_slots": False, "moda_ffn_slots": False},
    "value_residual": {"value_residual_init": "identity"},
}
ROUNDED = ("attnres", "mhc")
AWAKE_FIELDS = {
    "depth_attention": {"depth_stride": 2},
    "attnres": {"attnres_block_size": 3},
    "denseformer": {},
    "mhc": {"mhc_num_streams": 3, "mhc_sinkhorn_iters": 3},
    "moda": {},
    "value_residual": {},
}
# the recurrence of Kimi Linear adds up in another order with a cache
# and the tied embeddings of SmolLM3 make large logits
TOLERANCE = {"llama": 5e-5, "kimi_linear": 5e-5, "qwen3_moe": 3e-5, "olmoe": 3e-5, "smollm3": 1e-4}


def fields_of(pair):
    return TINY | BACKBONE_FIELDS[pair.backbone.model_type]


def new_model(pair, **fields):
    torch.manual_seed(0)
    return pair.find_class("ForCausalLM")(pair.find_class("Config")(**fields_of(pair) | fields)).eval()


def new_vanilla(pair):
    torch.manual_seed(0)
    head = pair.backbone.stock_class("ForCausalLM")
    fields = fields_of(pair)
    return head(head.config_class(**fields)).eval()


def wake(model):
    """Moves what starts at zero or one, so that a lost mixing or a wrong source would be noticed."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        # padding starts as zeros, on which norms without a norm before them multiply gradients by eps ** -0.5
        model.get_input_embeddings().weight[0].normal_(generator=generator)
    return model


def ids_of(batch, length, seed=1):
    return torch.randint(3, TINY["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))
