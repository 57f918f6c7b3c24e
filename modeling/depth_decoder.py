# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The decoder that all methods and all backbones share: the only forward of a base model, the heads, the outputs, and the
making of the classes of a method on a backbone.

What layers hand each other besides the hidden states is kept by a ledger, one object per call. The forward opens it
with the embeddings, asks it what each layer reads, gives it what each layer returned, and closes it into the final
state. Tensors of other layers travel outside of modules, as flat positional arguments and flat outputs: hooks,
activation checkpointing, offloading and FSDP see tensors only; they copy or detach what hides in containers.
"""

import functools
import logging
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn.attention.bias import CausalBias
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from depthmix.configuration.depth_backbones import Backbone, ConfigurationClasses
from depthmix.configuration.liger_entry import check_liger_options, enter_into_liger, options_of_new_models

from .decoder_layers import DecoderLayer, DepthRotaryEmbedding
from .lean_loss import (
    can_be_lean,
    lean_causal_lm_loss,
    liger_causal_lm_loss,
    liger_function,
    skips_logits,
)
from .lent_weights import DepthRMSNorm, apply_norm
from .mixing_modules import MixingModule
from .prompt_chunks import cuts_long_prompts
from .transformers_versions import HOST_CACHE_NAME, accepts_both_cache_names, slice_logits_to_keep


logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    # in every class that is made the stock base class follows, on which these rely
    Base = PreTrainedModel
else:
    Base = object


class Ledger:
    """
    What the layers of one call hand each other. This one is that of a decoder that only adds: a layer gets the hidden
    states and returns them. Methods derive theirs from it.

    Args:
        model (`DepthDecoderModel`):
            The model whose forward runs.
        embeddings (`torch.Tensor` of shape `[B, T, hidden]`):
            What the first layer gets.
        kwargs (`dict`):
            The keywords of the forward, which all layers get; a ledger may take some out, and add others.
    """

    # whether a layer that returns what it was given, as one that was skipped does, would change the meaning of others
    needs_every_layer: ClassVar[bool] = False

    def __init__(self, model: "DepthDecoderModel", embeddings: torch.Tensor, kwargs: dict[str, Any]):
        self.model = model
        self.hidden_states = embeddings

    def read(self, step: int) -> Sequence[torch.Tensor]:
        """The positional arguments of the layer that is the next to run: the hidden states, then others' tensors."""
        return (self.hidden_states,)

    def keep(self, step: int, outputs: tuple[torch.Tensor, ...]) -> None:
        """
        Takes what that layer returned.

        Raises:
            `RuntimeError`: if it is not what this layer has to return.
        """
        (self.hidden_states,) = self.expect(step, outputs, 1)

    def close(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        """The final state `[B, T, hidden]`, after the final norm, and the depth weights that are not recorded."""
        return apply_norm(self.model.norm, self.hidden_states, self.model.depth_impl), None

    def give(self, item: int) -> tuple[torch.Tensor, ...]:
        """An item that layers hand each other, as tensors `[B, T, ..]`; `handed_on` of the model has their numbers."""
        raise NotImplementedError

    def take(self, items: Mapping[int, tuple[torch.Tensor, ...]]) -> None:
        """What earlier layers have handed on, as `give` gives it, where they ran elsewhere."""

    def expect(self, step: int, outputs: tuple[torch.Tensor, ...], count: int) -> tuple[torch.Tensor, ...]:
        """The outputs, if they are as many as this layer has to return, and not from a layer that was skipped."""
        if len(outputs) != count or (self.needs_every_layer and outputs[0] is self.hidden_states):
            raise foreign_layer(step % len(self.model.layers))
        return outputs


class DepthDecoderModel(Base):
    """
    A base model on any backbone, with the ledger of a method. The forward takes what those of the stock base models
    take, the KV cache under either of its names, and returns a [`DepthModelOutputWithPast`].
    """

    layer_class: ClassVar[type[DecoderLayer]]
    ledger_class: ClassVar[type[Ledger]] = Ledger
    # why there are no depth weights to return; None where there are
    no_depth_weights: ClassVar[str | None] = None

    def __init__(self, config: PreTrainedConfig):
        config.validate_depth_mixing()
        if self.mixes_layers(config):
            refuse_pipeline_parallelism(config)
        super().__init__(config)
        backbone = config.depth_backbone
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.depth_impl = config.depth_impl
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = DepthRMSNorm(config.hidden_size, config.rms_norm_eps, backbone.norms_round_last)
        if backbone.rotary is not None:
            self.rotary_emb = DepthRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.num_loops = getattr(config, "num_loops", 1)
        self.add_modules(config)
        self.post_init()
        config.note_model()

    @staticmethod
    def mixes_layers(config: PreTrainedConfig) -> bool:
        """Whether layers hand each other anything besides the hidden states."""
        return True

    def add_modules(self, config: PreTrainedConfig) -> None:
        """
        What a method adds to the model itself: modules, and facts of the configuration. They are fixed there, since
        early exit changes `config.num_hidden_layers` during a call.
        """

    @accepts_both_cache_names
    @cuts_long_prompts
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> "DepthModelOutputWithPast":
        """
        Args:
            input_ids (`torch.LongTensor` of shape `[B, T]`, *optional*):
                The tokens. Exactly one of these and `inputs_embeds` has to be given.
            attention_mask (`torch.Tensor` of shape `[B, S]` or `[B or 1, 1 or Hq, T, S]`, or `dict`, *optional*):
                Which of all S tokens so far count: 1 for those, 0 for padding. A mask of four dimensions is taken as
                it is, and a dictionary has one for each kind of layer.
            position_ids (`torch.LongTensor` of shape `[B or 1, T]`, *optional*):
                Positions of the tokens; left out, they go on from the cache.
            past_key_values (`Cache`, *optional*):
                Keys and values of the tokens so far, which also takes those of this call. `cache` is another name of
                this argument.
            inputs_embeds (`torch.Tensor` of shape `[B, T, hidden]`, *optional*):
                Embeddings in place of the tokens.
            use_cache (`bool`, *optional*):
                Whether to return a cache; left out, what the configuration says.
            kwargs (*optional*):
                `output_hidden_states`, `output_attentions`, `output_router_logits` and `output_depth_weights` ask for
                more outputs; `return_dict=False` for a tuple. Others are for the attention function.

        Returns:
            [`DepthModelOutputWithPast`], whose `last_hidden_state` is `[B, T, hidden]`, in the dtype of the model.

        Raises:
            `ValueError`: if not exactly one of `input_ids` and `inputs_embeds` is given; for two different caches; if
                depth weights are asked for that the method does not have; or if a cache that cannot grow is too small
                for the passes of a looped model.
            `RuntimeError`: if layers have been replaced, removed or skipped.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids or inputs_embeds.")
        self.check_call(kwargs)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            start = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + start).unsqueeze(0)
        layers = [*self.layers[: self.config.num_hidden_layers]]
        # with fewer layers than there are, early exit leaves in the first pass
        passes = self.num_loops if len(layers) == len(self.layers) else 1
        if passes > 1:
            check_looped_cache(past_key_values, passes * len(layers))
        kwargs |= {"position_ids": position_ids, "use_cache": use_cache, HOST_CACHE_NAME: past_key_values}
        ledger = self.open_ledger(hidden_states, kwargs)
        self.run_layers(ledger, layers, range(passes * len(layers)), hidden_states, attention_mask, kwargs)
        hidden_states, depth_weights = ledger.close()
        kept: dict[str, Any] = {HOST_CACHE_NAME: past_key_values if use_cache else None}
        return DepthModelOutputWithPast(last_hidden_state=hidden_states, depth_weights=depth_weights, **kept)

    def run_layers(
        self,
        ledger: Ledger,
        layers: Sequence[nn.Module],
        steps: range,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Runs these steps, each of which is a layer in one of the passes, from the ledger into the ledger."""
        position_ids = kwargs["position_ids"]
        masks = attention_mask
        # `generate` may have made them already, and later chunks of a prompt need none
        if not isinstance(masks, (dict, CausalBias)):
            masks = create_masks_for_generate(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **{HOST_CACHE_NAME: kwargs[HOST_CACHE_NAME]},
            )
        positions = self.embed_positions(hidden_states, position_ids)
        kinds = getattr(self.config, "layer_types", None) or ()
        for step in steps:
            i = step % len(layers)
            layer = layers[i]
            if getattr(layer, "layer_idx", i) != i:
                raise foreign_layer(i)
            if positions is not None:
                kwargs["position_embeddings"] = positions[kinds[i]] if isinstance(positions, dict) else positions
            if self.num_loops > 1:
                kwargs["cache_slot"] = step
            mask = masks[kinds[i]] if isinstance(masks, dict) else masks
            outputs = layer(*ledger.read(step), attention_mask=mask, **kwargs)
            ledger.keep(step, outputs if isinstance(outputs, tuple) else (outputs,))

    def open_ledger(self, embeddings: torch.Tensor, kwargs: dict[str, Any]) -> Ledger:
        """The ledger of one call, from what the first layer gets and the keywords that all layers get."""
        return self.ledger_class(self, embeddings, kwargs)

    def handed_on(self) -> dict[int, tuple[int, frozenset[int]]]:
        """
        What layers hand each other besides the hidden states: for each item, by its number, the layer from which on
        there is one, and the layers that read it; the final norm counts as one layer more.

        Raises:
            `NotImplementedError`: if its ledger can hand nothing from one part of the layers to another.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its layers hand each other.")

    def item_widths(self) -> tuple[int, ...]:
        """The tensors `[B, T, width]` that each such item consists of."""
        raise NotImplementedError

    def handed_on_per_token(self) -> int:
        """How many numbers per token layers hand each other, beyond the hidden states and what the cache holds."""
        return 0

    def embed_positions(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | dict[str, tuple[torch.Tensor, torch.Tensor]] | None:
        """Cosines and sines of the rotation, of all layers or by kind of layer; None where nothing rotates."""
        rotary = self.config.depth_backbone.rotary
        if rotary == "by_layer_type":
            kinds = dict.fromkeys(self.config.layer_types)
            return {kind: self.rotary_emb(hidden_states, position_ids, kind) for kind in kinds}
        return self.rotary_emb(hidden_states, position_ids) if rotary else None

    def check_call(self, kwargs: dict[str, Any]) -> None:
        """
        Sets the keyword `output_depth_weights` for the layers of methods that have some, and removes it for others.

        Raises:
            `ValueError`: if depth weights are asked for, by argument or in the configuration, and there are none.
        """
        asked = bool(kwargs.pop("output_depth_weights", getattr(self.config, "output_depth_weights", False)))
        if self.no_depth_weights is None:
            kwargs["output_depth_weights"] = asked
        elif asked:
            raise ValueError(
                f"output_depth_weights=True: {type(self.config).__name__} has none to return; {self.no_depth_weights}."
            )


def check_looped_cache(cache: Cache | None, num_layers: int) -> None:
    """
    Raises:
        `ValueError`: if a cache that cannot grow has fewer layers than all passes together.
    """
    layers = getattr(cache, "layers", None)
    if layers and len(layers) < num_layers and getattr(cache, "layer_class_to_replicate", None) is None:
        raise ValueError(
            f"The cache has {len(layers)} layers: must have num_loops * num_hidden_layers = {num_layers}. For prefix "
            f"tuning: PrefixTuningConfig(num_layers={num_layers}). In a model, num_loops cannot be changed."
        )


def refuse_pipeline_parallelism(config: PreTrainedConfig) -> None:
    """
    Raises:
        `ValueError`: if the model is to be split into stages, which the host library does without asking for a plan.
    """
    stages = getattr(getattr(config, "distributed_config", None), "pp_size", None)
    if stages is not None and stages > 1:
        raise ValueError(
            f"pp_size={stages}: pipeline parallelism is not supported with depth mixing, since a stage would need "
            "tensors of earlier stages' layers besides the hidden states. In training, depthmix.pipeline sends them."
        )


def foreign_layer(layer_idx: int) -> RuntimeError:
    return RuntimeError(
        f"Layer {layer_idx} is not the one that the model was built with. Replacing, removing or skipping layers and "
        "pipeline parallelism are not supported with depth mixing."
    )


@dataclass
class DepthModelOutputWithPast(MoeModelOutputWithPast):
    """
    [`~transformers.modeling_outputs.MoeModelOutputWithPast`] with the weights of the mixing. Router logits are there
    on backbones with experts only.

    Args:
        depth_weights (`tuple(torch.Tensor)`, *optional*, returned when `output_depth_weights=True`):
            How much each source contributes at each token, fp32. With Depth-Attention, one tensor per layer,
            `[B, Hkv, T, number of sources + 1]`: the source layers (ascending), and last the layer itself. With
            Attention Residuals, one tensor per sub-layer and one for the mix before the final norm,
            `[B, T, number of sources]`: oldest source first. None with the other methods.
    """

    depth_weights: tuple[torch.Tensor, ...] | None = None


@dataclass
class DepthCausalLMOutputWithPast(MoeCausalLMOutputWithPast):
    """[`~transformers.modeling_outputs.MoeCausalLMOutputWithPast`] with the `depth_weights` of the base model."""

    depth_weights: tuple[torch.Tensor, ...] | None = None


def enter_table(table: dict[str, str], model_class: type) -> None:
    """
    Enters a class into a table of class names of the host library. The Trainer goes by these when it shifts labels for
    label smoothing, servers, pipelines and model cards when they ask what a model does. The Auto classes' registration
    does not reach them, nor does it know subclasses, those of FSDP2 among them, or the code of saved models.
    """
    # a model type as the key would be taken for one that the Auto classes look up
    table[model_class.__name__] = model_class.__name__


class DepthCausalLM(Base):
    """
    A language-model head on a base model. Its forward takes what those of the stock heads take, the KV cache under
    either of its names, and `output_depth_weights`, and returns a [`DepthCausalLMOutputWithPast`].
    """

    # of the base class of the method
    apply_liger_kernel: ClassVar[Callable[..., dict[str, str]]]
    model_class: ClassVar[type[PreTrainedModel]]
    # of a backbone with experts whose head adds their auxiliary loss
    load_balancing_loss: ClassVar[Callable | None] = None
    # whether the loss in training is computed without all logits in memory, which are then not returned
    fused_linear_cross_entropy: bool = False

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        enter_table(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, cls)

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        # the host library takes it from the name of the class, which of a subclass can be any
        self.loss_type = self.loss_type or "ForCausalLM"
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        # that of a user's subclass of the configuration is known from here on
        enter_into_liger(config.model_type)
        if options := options_of_new_models(config.model_type):
            self.apply_liger_kernel(**options)

    @accepts_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool | None = None,
        **kwargs,
    ) -> DepthCausalLMOutputWithPast:
        """
        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, kwargs:
                What the forward of the base model takes. `num_items_in_batch`, `shift_labels` (labels that are shifted
                already, to be used instead) and other keywords are for the loss.
            labels (`torch.LongTensor` of shape `[B, T]`, *optional*):
                The token at each place, as in `input_ids`, or -100 where it does not count. They are shifted here.
            logits_to_keep (`int` or `torch.Tensor` of whole numbers, *optional*, defaults to 0):
                For how many of the last tokens, or for which ones, to compute logits; 0 is for all.
            skip_logits (`bool`, *optional*):
                Whether to compute the loss without all logits in memory, and return none. Left out, it is done in
                training, given labels, after [`depthmix.apply_liger_kernel`].

        Returns:
            [`DepthCausalLMOutputWithPast`], whose `logits` are `[B, T or fewer, vocab_size]`, in the dtype of the
            head, or None if they are skipped. With `labels` there is a `loss`, fp32, which includes the auxiliary loss
            of experts if router logits are returned.

        Raises:
            `ValueError`, `RuntimeError`: where the base model does.
            `ValueError`: if logits shall be skipped without labels, or for labels or options of a loss without logits
                that do not fit.
        """
        shift_labels = kwargs.pop("shift_labels", None)
        has_labels = labels is not None or shift_labels is not None
        without_logits = skips_logits(
            skip_logits, self.training and self.fused_linear_cross_entropy, has_labels, kwargs
        )
        load_balancing_loss = type(self).load_balancing_loss
        if load_balancing_loss is not None and kwargs.get("output_router_logits") is None:
            kwargs["output_router_logits"] = self.config.output_router_logits
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{HOST_CACHE_NAME: past_key_values},
            **kwargs,
        )
        kept = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = loss = aux_loss = None
        if without_logits and can_be_lean(self.loss_function):
            with_liger = self.fused_linear_cross_entropy
            loss = lean_causal_lm_loss(
                self.lm_head, kept, labels, shift_labels=shift_labels, with_liger=with_liger, **kwargs
            )
        else:
            logits = self.lm_head(kept)
            if has_labels:
                shifted = {} if shift_labels is None else {"shift_labels": shift_labels.contiguous()}
                loss = self.loss_function(
                    logits=logits, labels=labels, vocab_size=self.config.vocab_size, **shifted, **kwargs
                )
            if without_logits:
                logits = None
        if load_balancing_loss is not None and kwargs["output_router_logits"]:
            aux_loss = load_balancing_loss(
                outputs.router_logits, self.config.num_experts, self.config.num_experts_per_tok, attention_mask
            )
            if loss is not None:
                loss = loss + self.config.router_aux_loss_coef * aux_loss.to(loss.device)
        return DepthCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.get("router_logits"),
            depth_weights=outputs.get("depth_weights"),
            **{HOST_CACHE_NAME: outputs.get(HOST_CACHE_NAME)},
        )

    def choose_loss(self, cross_entropy: bool, fused_linear_cross_entropy: bool) -> str:
        """Sets how the loss is computed."""
        loss = "all logits"
        if cross_entropy:
            if liger_function("liger_cross_entropy") is None:
                raise ImportError("cross_entropy=True needs liger-kernel: `pip install liger-kernel`")
            self.loss_function, loss = liger_causal_lm_loss, "all logits, liger-kernel"
        elif getattr(self, "_loss_function", None) is liger_causal_lm_loss:
            del self._loss_function
        self.fused_linear_cross_entropy = fused_linear_cross_entropy
        if fused_linear_cross_entropy:
            has_liger = liger_function("liger_fused_linear_cross_entropy") is not None
            loss = "without logits, " + ("liger-kernel on a GPU" if has_liger else "depthmix")
        return loss


class DepthSequenceClassification(GenericForSequenceClassification, Base):
    """
    A classification head on the last token that is not padding. Its outputs have no place for depth weights.
    """

    model_class: ClassVar[type[PreTrainedModel]]

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        enter_table(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, cls)

    def __init__(self, config: PreTrainedConfig):
        # the generic constructor would look the base model up in the Auto classes, where remote code is not registered
        PreTrainedModel.__init__(self, config)
        self.loss_type = self.loss_type or "ForSequenceClassification"
        self.num_labels = config.num_labels
        self.model = self.model_class(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()

    @accepts_both_cache_names
    @functools.wraps(GenericForSequenceClassification.forward, assigned=())
    def forward(self, *args, output_depth_weights: bool | None = None, **kwargs):
        """
        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, kwargs:
                What the forward of the base model takes.
            labels (`torch.Tensor` of shape `[B]`, or `[B, num_labels]` for several labels at once, *optional*):
                Classes, or numbers to regress, by `config.problem_type`.

        Returns:
            `SequenceClassifierOutputWithPast`, whose `logits` are `[B, num_labels]`, and with `labels` a `loss`.

        Raises:
            `ValueError`: if depth weights are asked for, or for a batch of several rows without a padding token.
        """
        if output_depth_weights is None:
            output_depth_weights = getattr(self.config, "output_depth_weights", False)
        if output_depth_weights:
            raise ValueError(
                "output_depth_weights=True, by argument or in the configuration: a classifier has none to return."
            )
        return super().forward(*args, output_depth_weights=False, **kwargs)


class DepthPreTrainedModel(Base):
    """What all models of a method have in common, before the stock base class of the backbone."""

    _pp_plan = None

    def apply_liger_kernel(
        self,
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        swiglu: bool = True,
    ) -> dict[str, str]:
        """
        What `TrainingArguments(use_liger_kernel=True)` calls; [`depthmix.apply_liger_kernel`] describes it. What does
        the work of each operation is returned and logged.
        """
        check_liger_options(cross_entropy, fused_linear_cross_entropy)
        loss = self.choose_loss(cross_entropy, fused_linear_cross_entropy)
        choice = dict.fromkeys(("rope", "rms_norm", "swiglu"), "depthmix") | {"loss": loss}
        logger.info(f"{type(self).__name__}: {', '.join(f'{name}: {who}' for name, who in choice.items())}.")
        return choice

    def choose_loss(self, cross_entropy: bool, fused_linear_cross_entropy: bool) -> str:
        """How the loss is computed, in words. A base model has none and a classifier keeps its own."""
        if cross_entropy:
            raise ValueError(f"cross_entropy=True: {type(self).__name__} has no loss over a vocabulary.")
        return "as before"

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """
        As for every model of the host library.

        Raises:
            `ValueError`: for a value of a field with which the model would not have the tensors of the checkpoint, or
                read other layers than it was trained with; or if the checkpoint is that of another model.
        """
        saved: dict[str, Any] = {}
        if kwargs.get("state_dict") is None and kwargs.get("gguf_file") is None:
            saved = read_saved_fields(cls.config_class, pretrained_model_name_or_path, config, kwargs)
            check_saved_fields(cls.config_class, pretrained_model_name_or_path, saved, config, kwargs)
        asked = kwargs.pop("output_loading_info", False)
        model, found = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, config=config, output_loading_info=True, **kwargs
        )
        check_tensors(pretrained_model_name_or_path, saved, model, found)
        check_gates(pretrained_model_name_or_path, model, found)
        warn_of_starts(pretrained_model_name_or_path, saved, model)
        return (model, found) if asked else model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, DepthRotaryEmbedding):
            module.reset()


# what says where a configuration lies
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")


def read_saved_fields(config_class: Any, source: Any, config: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """The configuration beside the weights of a checkpoint, as it is in the file; empty if there is none."""
    if source is None or not (config is None or isinstance(config, PreTrainedConfig)):
        return {}
    try:
        place = {name: overrides[name] for name in _HUB_ARGUMENTS if name in overrides}
        saved, _ = config_class.get_config_dict(source, **place)
    # the host library reports what is not there, or cannot be read
    except (OSError, ValueError):
        return {}
    return saved


def check_saved_fields(
    config_class: Any, source: Any, saved: dict[str, Any], config: Any, overrides: dict[str, Any]
) -> None:
    """
    Compares what is asked for with what a checkpoint was saved with.

    Raises:
        `ValueError`: for a field that decides which parameters there are, or of which shape, or which layers are read,
            with another value.
    """
    if not saved:
        return

    def asked(name: str, otherwise: Any) -> Any:
        return overrides.get(name, otherwise if config is None else getattr(config, name, otherwise))

    names = getattr(config_class, "decoder_shape_fields", ())
    defaults = config_class.__dataclass_fields__
    # a vanilla checkpoint has no tensors of the method
    if saved.get("model_type") == config_class.model_type:
        names = (*names, *getattr(config_class, "shape_fields", ()))
    for name in names:
        before = saved.get(name, defaults[name].default)
        value = asked(name, before)
        # None stands for the value of another field
        if before is not None and value is not None and value != before:
            raise ValueError(
                f"{name}={value!r}: must be {before!r}, with which {source} was saved, since its tensors are those of "
                "such a model. Convert the vanilla checkpoint with another value, or build a new model."
            )
    layers, loops = saved.get("num_hidden_layers"), saved.get("num_loops", 1)
    if loops != 1 and (value := asked("num_hidden_layers", layers)) != layers:
        raise ValueError(
            f"num_hidden_layers={value!r}: must be {layers!r}, with which {source} was saved: in a looped model "
            f"(num_loops={loops!r}) sources are counted over all passes, and would be other layers."
        )


def warn_of_starts(source: Any, saved: dict[str, Any], model: PreTrainedModel) -> None:
    """Says which values only a new model takes notice of, where they are others than the checkpoint was saved with."""
    config: Any = model.config
    if saved.get("model_type") != config.model_type:
        return
    # these have been said when the model was built
    said = [remark for remark in config.ineffective_values() if "has no effect" in remark]
    for name in config.start_fields:
        before, value = saved.get(name, config.__dataclass_fields__[name].default), getattr(config, name)
        if value != before and not any(remark.startswith(f"{name}=") for remark in said):
            logger.warning(
                f"{name}={value!r} has no effect: a new model starts with it, and {source} has weights. They started "
                f"with {before!r}."
            )


def check_tensors(source: Any, saved: dict[str, Any], model: PreTrainedModel, found: Mapping[str, Any]) -> None:
    """
    Raises:
        `ValueError`: if the tensors are those of another model, of which this one has some names, or the same model
            type. `found` is what the host library says of loading, and `saved` the configuration beside the tensors.
    """
    others, missing = sorted(found["unexpected_keys"]), set(found["missing_keys"])
    if not others:
        return
    reason = None
    # of another head's model everything but the head is read
    is_body = any(name.split(".")[0] not in ("lm_head", "score") for name in others)
    if all(name in missing for name, _ in model.named_parameters()):
        reason = f"{type(model).__name__} has none of these names"
    elif is_body and saved.get("model_type") == model.config.model_type:
        mixing = [
            f"{prefix}.{name}"
            for prefix, module in model.named_modules()
            if isinstance(module, MixingModule) and not module.is_gate
            for name, _ in module.named_parameters(recurse=False)
        ]
        lacking = [name for name in mixing if name in missing]
        if lacking:
            reason = f"not {lacking[0]}, of {len(lacking)} by which {type(model).__name__} mixes layers"
        # every model of this package is saved with it
        elif "depth_impl" not in saved:
            reason = f"its config.json has no depth_impl, which {type(model.config).__name__} is saved with"
    if reason is not None:
        shown = ", ".join(repr(name)[:100] for name in others[:3])
        raise ValueError(
            f"{str(source)!r} has {len(others)} tensors that {type(model).__name__} has no place for ({shown}, ...), "
            f"and {reason}. It is the checkpoint of another model."
        )


def check_gates(source: Any, model: PreTrainedModel, found: Mapping[str, Any]) -> None:
    """
    Raises:
        `ValueError`: if a checkpoint has gates that the layers of the model do not have, so that their mixing would be
            open where they may be closed. `found` is what the host library says of loading.
    """
    gates = [re.fullmatch(r".*layers\.(\d+)\..*\.depth_gate\..*", name) for name in sorted(found["unexpected_keys"])]
    # those of layers that are cut off are not missed
    dropped = [gate[0] for gate in gates if gate is not None and int(gate[1]) < model.config.num_hidden_layers]
    if dropped:
        raise ValueError(
            f"{source} has {dropped[0]}, of {len(dropped)} gates that a model with this configuration does not have. "
            "Its fields must be those that the gates were trained with: depth_gate or moda_gate, and what decides "
            "which layers mix."
        )


_MAKING = threading.RLock()
ENDINGS = ("DecoderLayer", "PreTrainedModel", "Model", "ForCausalLM", "ForSequenceClassification")


@dataclass(frozen=True)
class ModelClasses:
    """
    The model classes of a method: five for each backbone, made when one of them is asked for.

    Args:
        module (`str`):
            Name of the module that has the classes as attributes.
        configurations (`ConfigurationClasses`):
            The method's configurations.
        layer, model (`type`):
            The method's decoder layer and base model.
        pretrained (`type`, *optional*):
            The method's part of the base class: its initialisation, and what it supports.
        tags (`tuple` of `str`):
            Tags for the Hub.
        recorded (`dict`, *optional*):
            Outputs that are recorded besides hidden states, attentions and router logits.
    """

    module: str
    configurations: ConfigurationClasses
    layer: type[DecoderLayer]
    model: type[DepthDecoderModel]
    tags: tuple[str, ...]
    pretrained: type[DepthPreTrainedModel] = DepthPreTrainedModel
    recorded: tuple[tuple[str, OutputRecorder], ...] = ()

    def module_getattr(self, members: dict[str, Any]) -> Callable[[str], type]:
        """`__getattr__` for the module, by which its classes are found by name; it adds them to the module's own."""

        def __getattr__(name: str) -> type:
            backbone = self.configurations.find(name, ENDINGS)
            if backbone is None:
                raise AttributeError(f"module {self.module!r} has no attribute {name!r}")
            # classes are made once, whichever threads ask for them
            with _MAKING:
                if name not in members:
                    members.update(self.make(backbone))
            made: type = members[name]
            return made

        return __getattr__

    def make(self, backbone: Backbone) -> dict[str, type]:
        """
        The classes on a backbone, by name.

        Raises:
            `ImportError`: if the installed transformers does not have the backbone.
        """
        stock_base, stock_head = backbone.stock_class("PreTrainedModel"), backbone.stock_class("ForCausalLM")
        config_class = self.configurations.of(backbone)
        base = f"{self.configurations.prefix}{backbone.prefix}"

        def make(ending: str, bases: tuple[type, ...], **members) -> type:
            members |= {"__module__": self.module, "__qualname__": f"{base}{ending}"}
            members.setdefault("__doc__", f"{bases[0].__doc__}\n\nOf [`{config_class.__name__}`].")
            return type(f"{base}{ending}", bases, members)

        layer_bases: tuple[type, ...] = (self.layer,)
        attention: type = self.layer.attention_class
        if not backbone.softmax_only:
            from .kimi_linear_layers import KimiLinearSubLayers

            layer_bases, attention = (KimiLinearSubLayers, self.layer), backbone.stock_class("Attention")
        layer = make("DecoderLayer", layer_bases, __doc__=self.layer.__doc__)
        pretrained = make(
            "PreTrainedModel",
            (self.pretrained, stock_base),
            __doc__=f"What the models with a [`{config_class.__name__}`] share: how they start and what they support.",
            config_class=config_class,
            _no_split_modules=[layer.__name__],
            model_tags=list(self.tags),
            _can_record_outputs=stock_base._can_record_outputs
            | {"hidden_states": layer, "attentions": attention}
            | dict(self.recorded),
            # the host library's own answer depends on the text of the module that defines a class
            _can_set_experts_implementation=classmethod(lambda cls: stock_base._can_set_experts_implementation()),
        )
        model = make("Model", (self.model, pretrained), layer_class=layer)
        head = make(
            "ForCausalLM",
            (DepthCausalLM, pretrained, GenerationMixin),
            model_class=model,
            load_balancing_loss=getattr(sys.modules[stock_head.__module__], "load_balancing_loss_func", None),
            **{name: getattr(stock_head, name) for name in ("_tied_weights_keys", "_tp_plan", "_fsdp_plan")},
        )
        classifier = make("ForSequenceClassification", (DepthSequenceClassification, pretrained), model_class=model)
        renamings = get_checkpoint_conversion_mapping(backbone.stock_type)
        if renamings is not None:
            # vanilla folders store every expert by itself, and custom classes are not looked up by their base's type
            register_checkpoint_conversion_mapping(config_class.model_type, renamings, overwrite=True)
        return {each.__name__: each for each in (layer, pretrained, model, head, classifier)}
