# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
vLLM's Transformers backend, with what the models of this package need beyond it.

A looped model keeps keys and values of each pass. So a layer of it has an attention of vLLM's for each, under the
numbers that the layers would have if the passes were layers of their own.

Merging depth slots takes a log-sum-exp, which vLLM's attention does not return. So layers that read slots get an
attention for twice the queries, half of which have a sink, and `MoDAAttention.merge_slots` does the rest.

With tensor parallelism the heads are divided among the devices, and with them what belongs to a head: its gate, and
its part of each slot.

The classes are called as those that they derive from, by whose names vLLM knows its Transformers backend. The import
of this module, which happens only where they are used, lets the models be built for it.
"""

import re
import types
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models import transformers as backend
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.utils import set_weight_attrs

from depthmix.kernels.depth_precision import accumulation_dtype, mix_dtype
from depthmix.modeling.decoder_layers import DecoderAttention
from depthmix.modeling.mixing_modules import MixingModule
from depthmix.modeling.modeling_attnres import AttnResMixer
from depthmix.modeling.modeling_depth_attention import SERVERS_WITH_PASSES
from depthmix.modeling.modeling_moda import SERVER_IMPLEMENTATIONS, MoDAAttention, MoDALayer


SERVER_IMPLEMENTATIONS.add("vllm")
SERVERS_WITH_PASSES.add("vllm")
# plans with whole heads on each device are for norms over all heads, and vLLM's gather by themselves
DIVIDED = {"colwise_gather_output": "colwise", "rowwise_split_input": "rowwise"}
# projections that are one matrix product, and what vLLM calls them
PARTS = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}


class CompiledMixer(AttnResMixer):
    """
    A mixer as a compiler makes one short kernel of it for a CPU: each source is read once for its logit and once for
    the sum, and the logits are no tensor of their own.
    """

    def forward(
        self,
        partial: torch.Tensor | None,
        update: torch.Tensor | None,
        sources: Sequence[torch.Tensor],
        phase_1: Sequence[torch.Tensor] = (),
        output_norm_weight: torch.Tensor | None = None,
        output_depth_weights: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Takes and returns what the mixer that it derives from does."""
        if phase_1 or output_norm_weight is not None or output_depth_weights:
            return super().forward(partial, update, sources, phase_1, output_norm_weight, output_depth_weights)
        given = [each for each in (partial, update) if each is not None]
        every = [*sources, reduce(torch.add, given)]
        dtype = accumulation_dtype(*every)
        query = self.pseudo_query.to(dtype) * self.norm().to(dtype)
        wide = [source.to(dtype) for source in every]
        logits = [
            (source * query).sum(-1, keepdim=True) * torch.rsqrt(source.square().mean(-1, keepdim=True) + self.eps)
            for source in wide
        ]
        if self.recency_bias is not None:
            logits[-1] = logits[-1] + self.recency_bias.to(dtype)
        highest = reduce(torch.maximum, logits)
        odds = [(logit - highest).exp() for logit in logits]
        factor = len(every) if self.scale == "sum" else 1
        total = reduce(torch.add, (odd * source for odd, source in zip(odds, wide, strict=True)))
        mixed = total * (factor / reduce(torch.add, odds))
        return every[-1], mixed.to(mix_dtype(*every)), None


def project_together(attention: Any, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
    """What `DecoderAttention.project` returns, by one matrix product."""
    merged = attention.qkv_proj
    return merged(hidden_states).split([size // merged.tp_size for size in merged.output_sizes], -1)


class AttentionOfPass(nn.Module):
    """The attention of vLLM's by which a layer reads in one of the later passes, where its function looks for it."""

    def __init__(self, attn: nn.Module):
        super().__init__()
        self.attn = attn


class _WithDepth:
    """What is added to the classes of the backend."""

    compilation_config: Any
    config: Any
    device_config: Any
    hf_to_vllm_mapper: Any
    model: Any
    packed_modules_mapping: dict[str, list[str]]
    parallel_config: Any
    quant_config: Any
    text_config: Any

    def pipeline_parallel(self):
        stages = self.parallel_config.pipeline_parallel_size
        if stages > 1 and self.model.mixes_layers(self.text_config):
            raise ValueError(
                f"pipeline_parallel_size={stages}: must be 1 with depth mixing, since vLLM sends a stage nothing but "
                "the hidden states."
            )
        super().pipeline_parallel()

    def recursive_replace(self):
        ranks = self.parallel_config.tensor_parallel_size
        if ranks > 1:
            self.divide_heads(ranks)
        if self.device_config.device.type == "cpu" and self.compilation_config.mode != CompilationMode.NONE:
            for module in self.model.modules():
                if type(module) is AttnResMixer:
                    module.__class__ = CompiledMixer
        self.merge_projections()
        super().recursive_replace()

    def merge_projections(self) -> None:
        """
        Makes one product of those for queries, keys and values. The backend does it by itself only where a forward
        calls the three by name.
        """
        stacked = {}
        for name, module in [*self.model.named_modules()]:
            if isinstance(module, DecoderAttention):
                path, query, key = f"model.{name}", module.q_proj, module.k_proj
                module.qkv_proj = QKVParallelLinear(
                    hidden_size=query.in_features,
                    head_size=module.head_dim,
                    total_num_heads=query.out_features // module.head_dim,
                    total_num_kv_heads=key.out_features // module.head_dim,
                    bias=query.bias is not None,
                    quant_config=self.quant_config,
                    prefix=f"{path}.qkv_proj",
                    return_bias=False,
                )
                for projection, part in PARTS.items():
                    delattr(module, projection)
                    stacked[f"{path}.{projection}"] = (f"{path}.qkv_proj", part)
                vars(module)["project"] = types.MethodType(project_together, module)
        for packed in filter(None, (self, self.quant_config)):
            packed.packed_modules_mapping["qkv_proj"] = [*PARTS]
        self.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_stacked=stacked)

    def divide_heads(self, ranks: int) -> None:
        """
        Gives this device its part of what belongs to heads.

        Raises:
            `ValueError`: if the heads cannot be divided so.
        """
        kv_heads = self.text_config.num_key_value_heads
        if kv_heads % ranks:
            raise ValueError(
                f"tensor_parallel_size={ranks}: must divide num_key_value_heads={kv_heads}, since each key-value head "
                "needs all its query heads beside it."
            )
        self.model.tp_plan = {
            name: DIVIDED.get(style, style) if ".self_attn." in name else style
            for name, style in self.model.tp_plan.items()
        }
        for name, module in self.model.named_modules():
            if isinstance(module, MixingModule) and module.is_gate:
                heads = len(module.get_parameter("weight")) // ranks
                weight = torch.empty(heads, dtype=torch.float32, device=self.device_config.device)
                module.weight = nn.Parameter(weight, requires_grad=False)
                set_weight_attrs(module.weight, {"weight_loader": sharded_weight_loader(0)})
            elif isinstance(module, MoDALayer):
                self.divide_slots(module, f"model.{name}", ranks)
        if hasattr(self.model, "slot_heads"):
            self.model.slot_heads //= ranks
            self.model.slot_size //= ranks

    def divide_slots(self, layer: MoDALayer, name: str, ranks: int) -> None:
        attention = layer.self_attn
        if attention.reader_norm and attention.qk_norm == "flat":
            raise ValueError(
                f"tensor_parallel_size={ranks}: must be 1 with moda_depth_key_mode='reader_norm' on "
                f"{self.config.model_type}, whose slots would be normalised over all heads."
            )
        for projection in ("attn_depth_kv_proj", "mlp_depth_kv_proj"):
            if hasattr(layer, projection):
                # the key of these heads, then their value
                divided = MergedColumnParallelLinear(
                    layer.hidden_size,
                    [attention.slot_size] * 2,
                    bias=False,
                    quant_config=self.quant_config,
                    prefix=f"{name}.{projection}",
                    return_bias=False,
                )
                setattr(layer, projection, divided)
        attention.slot_size //= ranks

    def _get_attn_cls(self):
        attention_class = super()._get_attn_cls()
        modules = {prefix: self.get_submodule(prefix) for prefix, _ in self.attention_fusers.values()}
        layers, passes = self.text_config.num_hidden_layers, getattr(self.text_config, "num_loops", 1)

        def make(*, prefix: str, **options: Any) -> nn.Module:
            (module,) = (each for name, each in modules.items() if prefix.endswith(f"{name}.attn"))
            if isinstance(module, MoDAAttention) and module.first_slot < module.last_slot:
                sinks = module.sinks(options["num_kv_heads"])
                options |= {"num_heads": 2 * options["num_heads"], "sinks": sinks.to(self.device_config.device)}
            if passes > 1:
                module.later_passes = nn.ModuleList(
                    AttentionOfPass(attention_class(prefix=of_layer(prefix, i * layers + module.layer_idx), **options))
                    for i in range(1, passes)
                )
            return attention_class(prefix=prefix, **options)

        return make


def of_layer(name: str, layer: int) -> str:
    """The name of an attention as it would be in that layer."""
    return re.sub(r"(?<=\.layers\.)\d+(?=\.)", str(layer), name)


class TransformersForCausalLM(_WithDepth, backend.TransformersForCausalLM):
    """The backend's, for a model of this package."""


class TransformersMoEForCausalLM(_WithDepth, backend.TransformersMoEForCausalLM):
    """The backend's, for a model of this package with experts."""
