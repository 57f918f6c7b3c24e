# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
What vLLM calls in each of its processes where depthmix is installed. It makes the models known to vLLM's Transformers
backend, which asks no Auto class: without it a folder has to bring its code, for `trust_remote_code`.
"""

from depthmix.families import FAMILIES


BACKEND = "depthmix.vllm_models"


def register() -> None:
    """Registers every causal language model by the name that its saved configuration has."""
    # vLLM calls this, so it is there, and may not be imported before it
    from vllm.model_executor.models import ModelRegistry

    for family in FAMILIES.values():
        backend_class = "TransformersMoEForCausalLM" if family.backbone.has_experts else "TransformersForCausalLM"
        # a name is imported when such a model is served
        ModelRegistry.register_model(f"{family.prefix}ForCausalLM", f"{BACKEND}:{backend_class}")
