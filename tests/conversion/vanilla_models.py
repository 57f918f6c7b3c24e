# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The stock models that convert."""

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)


STOCK = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
# every way in which those that convert to every family on the dense decoder differ
VANILLA = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3 with everything": (Qwen3Config, Qwen3ForCausalLM, SLIDING | {"attention_bias": True, "head_dim": 32}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2 sliding and tied": (Qwen2Config, Qwen2ForCausalLM, SLIDING | {"tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"head_dim": None}),
    "llama with everything": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
