# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Mixture-of-Depths Attention in vLLM. Merging depth slots takes a log-sum-exp, which vLLM's attention does not return.
So layers that read slots get an attention for twice the queries, half of which have a sink, and
`MoDAAttention.merge_slots` does the rest.

The classes are called as those that they derive from, by whose names vLLM knows its Transformers backend.
"""

from typing import Any

from vllm.model_executor.models import transformers as backend

from depthmix.modeling.modeling_moda import MoDAAttention


class _WithSlots:
    """How a layer's attention is made; mixed into the classes of the backend."""

    device_config: Any

    def _get_attn_cls(self):
        attention_class = super()._get_attn_cls()
        if self.parallel_config.tensor_parallel_size > 1:
            raise ValueError("tensor_parallel_size: must be 1 with Mixture-of-Depths Attention.")
        readers = {}
        for prefix, _ in self.attention_fusers.values():
            module = self.get_submodule(prefix)
            if isinstance(module, MoDAAttention) and module.first_slot < module.last_slot:
                readers[prefix] = module

        def make(**options: Any):
            for prefix, module in readers.items():
                if options["prefix"].endswith(f"{prefix}.attn"):
                    options["num_heads"] *= 2
                    options["sinks"] = module.sinks(options["num_kv_heads"]).to(self.device_config.device)
            return attention_class(**options)

        return make


class TransformersForCausalLM(_WithSlots, backend.TransformersForCausalLM):
    """The backend's, for a model with depth slots."""


class TransformersMoEForCausalLM(_WithSlots, backend.TransformersMoEForCausalLM):
    """The backend's, for a model with depth slots and experts."""
