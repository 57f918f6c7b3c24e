# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the model families share: the host library's cache argument, projections, output classes, heads."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP, Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, apply_rotary_pos_emb
from transformers.utils.generic import can_return_tuple

from depthmix.kernels.depth_implementations import (
    PLAIN_TENSORS,
    autocast_dtype,
    in_compiled_decoding,
    left_to_compiler,
    triton_obstacle,
    use_triton,
)
from depthmix.kernels.depth_value_mix import depth_value_mix
from depthmix.kernels.norm_rotary_mix import norm_rotary_mix
from depthmix.kernels.shared_input_linear import shared_input_linear


try:
    from transformers.modeling_utils import slice_logits_to_keep
except ImportError:  # before transformers 5.21

    def slice_logits_to_keep(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return hidden_states[:, kept, :]


# transformers 5.24 renamed the argument, the mask functions' keyword and the output field
CACHE_NAMES = ("cache", "past_key_values")
HOST_CACHE_NAME = CACHE_NAMES[0 if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else 1]


def accepts_both_cache_names(forward: Callable) -> Callable:
    """
    Lets a forward take the KV cache under either of its names, and shows it to the host library, which inspects
    signatures, under the name that this version of transformers uses.

    Raises:
        `ValueError`: in the decorated function, if two different caches are given.
    """
    signature = inspect.signature(forward)
    own_name = next(name for name in CACHE_NAMES if name in signature.parameters)
    other_name = next(name for name in CACHE_NAMES if name != own_name)

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        cache = kwargs.get(other_name)
        # before 5.24, continuous batching hands a cache that is no `Cache` to the attention function, as `cache`
        if other_name == HOST_CACHE_NAME or cache is None or isinstance(cache, Cache):
            kwargs.pop(other_name, None)
            if cache is not None:
                if kwargs.get(own_name) not in (None, cache):
                    raise ValueError("`cache` and `past_key_values` are two names of one argument: give only one.")
                kwargs[own_name] = cache
        return forward(self, *args, **kwargs)

    # Compilers bind a call by the signature of the function itself. The renamed one therefore belongs to the function
    # that `inspect.signature` comes to next, and the wrapper shows compilers the arguments that it really has.
    @functools.wraps(forward)
    def shown(*args, **kwargs):
        return forward(*args, **kwargs)

    shown.__signature__ = signature.replace(
        parameters=[
            parameter.replace(name=HOST_CACHE_NAME) if name == own_name else parameter
            for name, parameter in signature.parameters.items()
        ]
    )
    wrapper.__wrapped__ = shown
    # `wraps` copies the one that the decorated function may have
    vars(wrapper).pop("__signature__", None)
    return wrapper


def cache_update_keywords(kwargs: dict) -> dict:
    """What `Cache.update` gets besides keys, values and layer: from 5.24 on, the attention's keywords (to change)."""
    return {"kwargs": kwargs} if HOST_CACHE_NAME == "cache" else {}


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than its forward."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or nn.modules.module._has_any_global_hook()
    )


def is_exactly(module: object, *classes: type) -> bool:
    """
    Whether the type is one of these, none derived from it. Of a comparison of types a compiler would check before
    each call, in Python, that those of all modules are the same.
    """
    return any(isinstance(module, each) and issubclass(each, type(module)) for each in classes)


def has_its_forward(module: nn.Module) -> bool:
    """Whether the forward is that of the class, and not one that was put in its place."""
    # of what is looked up, but not of keys of `__dict__`, a compiler checks before later calls that it is the same
    return "forward" not in module.__dict__ and hasattr(module, "forward")


def calls_its_forward(module: nn.Module, *classes: type) -> bool:
    """Whether calling this module is nothing but the forward of one of these classes."""
    return is_exactly(module, *classes) and has_its_forward(module) and not has_hooks(module)


def has_local_weight(module: nn.Module) -> bool:
    # fake ones stand for parameters when a model is exported
    return type(module.weight) in (*PLAIN_TENSORS, FakeTensor)


def runs_plainly(norm: nn.Module) -> bool:
    """
    Whether calling this RMS norm is nothing but its class's forward with a local weight. If so a fused operation may
    take the weight and do its work; hooks, adapters, sharding, quantization and replaced forwards must be called.
    """
    return calls_its_forward(norm, Qwen3RMSNorm, Olmo2RMSNorm) and has_local_weight(norm)


LOW_PRECISION = (torch.float16, torch.bfloat16)


class MixingModule(nn.Module):
    """
    A module that holds parameters by which layers are mixed: what this class is says which parameters these are.

    There are few of them, their values are large beside a step of training, and in 16 bits most steps would be
    rounded away. So they are fp32 wherever the model is built, loaded or cast in fp16 or bf16, and the operations take
    them as such beside activations of another dtype.

    Weight decay would pull them to zero, which is no special value of them, unlike of a matrix: what decays all the
    same is named in `decayed_parameters`.
    """

    decayed_parameters: tuple[str, ...] = ()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.dtype in LOW_PRECISION:
            param = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
        super().register_parameter(name, param)

    def _apply(self, fn: Callable, recurse: bool = True):
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            # not cast back, which would give rounded values
            return tensor.to(result.device, torch.float32) if result.dtype in LOW_PRECISION else result

        return super()._apply(keep, recurse)


def apply_norm(norm: nn.Module, hidden_states: torch.Tensor, impl: str) -> torch.Tensor:
    """
    The norm of hidden states `[B, T, hidden]`, as one kernel of torch's on a GPU, unless `impl` is `"reference"`. The
    module's own forward rounds twice there, takes six kernels and keeps fp32 copies of its input for the backward.
    """
    if (
        impl != "reference"
        and hidden_states.is_cuda
        and runs_plainly(norm)
        # for a weight of another dtype torch has no such kernel, and returns a dtype that the module does not
        and hidden_states.dtype is norm.weight.dtype
    ):
        return nn.functional.rms_norm(hidden_states, norm.weight.shape, norm.weight, norm.variance_epsilon)
    return norm(hidden_states)


def apply_linears(linears: Sequence[nn.Module], hidden_states: torch.Tensor, impl: str) -> list[torch.Tensor]:
    """
    These linear maps of the same hidden states `[B, T, hidden]`. In compiled decoding of one sequence they are one
    kernel where kernels are wanted and can work, and the modules do nothing else.
    """
    if (
        linears
        and impl != "reference"
        and in_compiled_decoding(hidden_states)
        and hidden_states.shape[0] == 1
        and autocast_dtype(hidden_states) is None
        and all(
            calls_its_forward(linear, nn.Linear)
            and linear.bias is None
            and has_local_weight(linear)
            and linear.weight.dtype is hidden_states.dtype
            for linear in linears
        )
    ):
        weights = [linear.weight for linear in linears]
        if use_triton(impl, "shared_input_linear", triton_obstacle((hidden_states, *weights))):
            return shared_input_linear(hidden_states, weights, impl=impl)
    return [linear(hidden_states) for linear in linears]


def apply_mlp(
    mlp: nn.Module, hidden_states: torch.Tensor, impl: str, beside: Sequence[nn.Module] = ()
) -> tuple[torch.Tensor, ...]:
    """The gated network's output `[B, T, hidden]`, and linear maps of its input, which are computed beside its own."""
    if in_compiled_decoding(hidden_states) and calls_its_forward(mlp, LlamaMLP, Qwen3MLP, Olmo2MLP):
        gate, up, *others = apply_linears((mlp.gate_proj, mlp.up_proj, *beside), hidden_states, impl)
        return *apply_linears((mlp.down_proj,), mlp.act_fn(gate) * up, impl), *others
    return mlp(hidden_states), *apply_linears(beside, hidden_states, impl)


class AttentionProjections:
    """
    How an attention layer gets query, key and value: projections, norms (if it has any), rotation and, with source
    layers, Depth-Attention. All but the projections is one operation where kernels are wanted and can work.
    """

    def project(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        source_keys: Sequence[torch.Tensor] = (),
        source_values: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query `[B, Hq, T, d]`, key and value `[B, Hkv, T, d]` of these tokens, as attention reads them."""
        head_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (x.view(head_shape) for x in apply_linears(projections, hidden_states, self.depth_impl))
        value = value.transpose(1, 2)
        norms = () if self.key_norm_position is None else (self.q_norm, self.k_norm)
        # hooks and replacements of a norm must be called
        if (
            self.depth_impl != "reference"
            and all(map(runs_plainly, norms))
            and len({norm.variance_epsilon for norm in norms}) < 2
        ):
            weights = {f"{name}_norm_weight": norm.weight for name, norm in zip(("query", "key"), norms, strict=False)}
            options = {"eps": norms[0].variance_epsilon, "key_norm_position": self.key_norm_position} if norms else {}
            triton = use_triton(self.depth_impl, "norm_rotary_mix", triton_obstacle((query, key, value)))
            if triton and (source_keys or not left_to_compiler(self.depth_impl, hidden_states)):
                return norm_rotary_mix(
                    query.transpose(1, 2),
                    key.transpose(1, 2),
                    value,
                    *position_embeddings,
                    **weights,
                    **options,
                    source_keys=source_keys,
                    source_values=source_values,
                    scaling=self.scaling,
                    impl=self.depth_impl,
                )
        if norms:
            query = self.q_norm(query)
        if self.key_norm_position == "before_rope":
            key = self.k_norm(key)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        if self.key_norm_position == "after_rope":
            key = self.k_norm(key)
        if source_keys:
            value = depth_value_mix(
                query, [*source_keys, key], [*source_values, value], scaling=self.scaling, impl=self.depth_impl
            )
        return query, key, value


class DecoderInputs:
    """What a decoder makes of the arguments of its forward before its first layer."""

    def prepare(
        self,
        input_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
        position_ids: torch.LongTensor | None,
        past_key_values: Cache | None,
        inputs_embeds: torch.Tensor | None,
        use_cache: bool | None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | None], dict]:
        """The embeddings `[B, T, hidden]`, the mask for each kind of attention, and what all layers get alike."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids or inputs_embeds.")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            start = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + start).unsqueeze(0)

        masks = attention_mask
        # `generate` may have made them already
        if not isinstance(masks, dict):
            mask_arguments = {
                "config": self.config,
                "inputs_embeds": hidden_states,
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                HOST_CACHE_NAME: past_key_values,
            }
            masks = {"full_attention": create_causal_mask(**mask_arguments)}
            if self.has_sliding_layers:
                masks["sliding_attention"] = create_sliding_window_causal_mask(**mask_arguments)
        shared = {
            "position_embeddings": self.rotary_emb(hidden_states, position_ids),
            "position_ids": position_ids,
            "use_cache": use_cache,
            HOST_CACHE_NAME: past_key_values,
        }
        return hidden_states, masks, shared


def refuse_pipeline_parallelism(config: PreTrainedConfig) -> None:
    """
    Raises:
        `ValueError`: if the model is to be split into stages, which the host library does without asking for a plan.
    """
    stages = getattr(getattr(config, "distributed_config", None), "pp_size", None)
    if stages is not None and stages > 1:
        raise ValueError(
            f"pp_size={stages}: pipeline parallelism is not supported with depth mixing, since a stage would need "
            "tensors of earlier stages' layers besides the hidden states."
        )


def refuse_depth_weights(config: PreTrainedConfig, kwargs: dict, reason: str) -> None:
    """
    Takes the argument away that a family has no use for.

    Raises:
        `ValueError`: if depth weights are asked for, by argument or in the configuration.
    """
    asked = kwargs.pop("output_depth_weights", None)
    if getattr(config, "output_depth_weights", False) if asked is None else asked:
        raise ValueError(f"output_depth_weights=True: {type(config).__name__} has none to return; {reason}.")


def foreign_layer(layer_idx: int) -> RuntimeError:
    return RuntimeError(
        f"Layer {layer_idx} is not the one that the model was built with. Replacing, removing or skipping layers and "
        "pipeline parallelism are not supported with depth mixing."
    )


@dataclass
class DepthModelOutputWithPast(BaseModelOutputWithPast):
    """
    [`~transformers.modeling_outputs.BaseModelOutputWithPast`] with the weights of the mixing.

    Args:
        depth_weights (`tuple(torch.Tensor)`, *optional*, returned when `output_depth_weights=True`):
            How much each source contributes at each token, fp32. With Depth-Attention, one tensor per layer,
            `[B, Hkv, T, number of sources + 1]`: the source layers (ascending), and last the layer itself. With
            Attention Residuals, one tensor per sub-layer and one for the mix before the final norm,
            `[B, T, number of sources]`: oldest source first. None with the other families.
    """

    depth_weights: tuple[torch.Tensor, ...] | None = None


@dataclass
class DepthCausalLMOutputWithPast(CausalLMOutputWithPast):
    """[`~transformers.modeling_outputs.CausalLMOutputWithPast`] with the `depth_weights` of the base model."""

    depth_weights: tuple[torch.Tensor, ...] | None = None


def enter_table(table: dict[str, str], model_class: type) -> None:
    """
    Enters a class into a table of class names of the host library. The Trainer goes by these when it shifts labels for
    label smoothing, servers, pipelines and model cards when they ask what a model does. The Auto classes' registration
    does not reach them, nor does it know subclasses, those of FSDP2 among them, or the code of saved models.
    """
    # a model type as the key would be taken for one that the Auto classes look up
    table[model_class.__name__] = model_class.__name__


class DepthCausalLM:
    """A language-model head on a base model, which a family sets as `model_class`. It hands on the depth weights."""

    model_class: type[PreTrainedModel]

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        enter_table(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, cls)

    def __init__(self, config: PreTrainedConfig):
        # not the constructor of a stock head, which would build and initialise a stock base model first
        PreTrainedModel.__init__(self, config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @accepts_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> DepthCausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{HOST_CACHE_NAME: past_key_values},
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return DepthCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            depth_weights=outputs.get("depth_weights"),
            **{HOST_CACHE_NAME: outputs.get(HOST_CACHE_NAME)},
        )


class DepthSequenceClassification(GenericForSequenceClassification):
    """A generic classifier on a base model, set as `model_class`, without a place for depth weights in its outputs."""

    model_class: type[PreTrainedModel]

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        enter_table(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, cls)

    def __init__(self, config: PreTrainedConfig):
        # the generic constructor would look the base model up in the Auto classes, where remote code is not registered
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = self.model_class(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()

    @accepts_both_cache_names
    @functools.wraps(GenericForSequenceClassification.forward)
    def forward(self, *args, output_depth_weights: bool | None = None, **kwargs):
        if output_depth_weights is None:
            output_depth_weights = getattr(self.config, "output_depth_weights", False)
        if output_depth_weights:
            raise ValueError(
                "output_depth_weights=True, by argument or in the configuration: a classifier has none to return."
            )
        return super().forward(*args, output_depth_weights=False, **kwargs)
