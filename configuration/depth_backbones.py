# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
The backbones: stock decoders of transformers that a method can be put on, each described by one record, and the
configuration classes of a method, one for each backbone.

Importing this module needs transformers, not torch.
"""

import textwrap
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_depth_common import DepthMixingFields
from .liger_entry import enter_into_liger


# the norms of a decoder layer: before and after its attention, before and after its feed-forward network
PRE_NORM = ("input_layernorm", None, "post_attention_layernorm", None)
POST_NORM = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


@dataclass(frozen=True)
class Backbone:
    """
    What distinguishes a stock decoder from the others. Where a bias is text, it is the name of the configuration
    field that says whether there is one.

    Args:
        model_type (`str`), prefix (`str`), title (`str`):
            Its model type in transformers, what the names of its classes begin with there, and what people call it.
        norms (`tuple`):
            Names of the norms of a layer: before and after its attention, before and after its feed-forward network.
        qk_norm (`str`, *optional*):
            How queries and keys are normalised: each `"head"` by itself, or all heads of a token as one `"flat"`
            vector.
        qkv_bias, output_bias, mlp_bias (`bool` or `str`):
            Whether the projections of the attention, its output projection and the feed-forward network have biases.
        norms_round_last (`bool`):
            Whether a norm multiplies by its gain before it rounds to the dtype of its input, and not after.
        rotary (`str`, *optional*):
            `"shared"`: one table of angles for all layers; `"by_layer_type"`: one for each kind of layer; None: no
            rotation.
        rotary_in_fp32 (`bool`):
            Whether cosines and sines stay fp32, and are not rounded to the dtype of the hidden states.
        has_experts (`bool`):
            Whether feed-forward networks can be mixtures of experts.
        softmax_only (`bool`):
            Whether every layer attends by a softmax over keys of one width. Methods that work inside of the attention
            need it.
        since (`str`, *optional*):
            The release of transformers that brought it, if that is newer than the oldest supported one.
    """

    model_type: str
    prefix: str
    title: str
    norms: tuple[str | None, str | None, str | None, str | None] = PRE_NORM
    qk_norm: Literal["head", "flat"] | None = None
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    norms_round_last: bool = False
    rotary: Literal["shared", "by_layer_type"] | None = "shared"
    rotary_in_fp32: bool = False
    has_experts: bool = False
    softmax_only: bool = True
    since: str | None = None

    @property
    def is_available(self) -> bool:
        """Whether the installed transformers has it."""
        return self.model_type == "dense" or find_spec(f"transformers.models.{self.model_type}") is not None

    @property
    def stock_type(self) -> str:
        """The model type whose stock classes are taken where the module of the backbone is of no consequence."""
        return "qwen3" if self.model_type == "dense" else self.model_type

    def stock_class(self, name: str) -> Any:
        """
        A class of the backbone's modeling module in transformers, named without the prefix.

        Raises:
            `ImportError`: if the installed transformers does not have the backbone.
        """
        self.check_available()
        module = import_module(f"transformers.models.{self.stock_type}.modeling_{self.stock_type}")
        return getattr(module, ("Qwen3" if self.model_type == "dense" else self.prefix) + name)

    def stock_config_class(self) -> type[PreTrainedConfig]:
        """
        The configuration class that those of the methods derive from.

        Raises:
            `ImportError`: if the installed transformers does not have the backbone.
        """
        self.check_available()
        if self.model_type == "dense":
            from .configuration_dense_decoder import DenseDecoderConfig

            return DenseDecoderConfig
        module = import_module(f"transformers.models.{self.model_type}.configuration_{self.model_type}")
        return getattr(module, f"{self.prefix}Config")

    def check_available(self) -> None:
        """
        Raises:
            `ImportError`: if the installed transformers does not have the backbone; the message names the release.
        """
        if not self.is_available:
            raise ImportError(
                f"This version of transformers has no {self.model_type}: it needs transformers {self.since} or newer."
            )


# stock decoders that the backbone `dense` stands for
DENSE_TYPES = ("qwen3", "qwen2", "llama")
OLMO2 = Backbone(
    "olmo2", "Olmo2", "OLMo2", norms=POST_NORM, qk_norm="flat", norms_round_last=True, rotary_in_fp32=True
)
BACKBONES = {
    backbone.model_type: backbone
    for backbone in (
        # Qwen3, Qwen2 and Llama in one: fields of the configuration say which norms and biases there are
        Backbone(
            "dense",
            "",
            "Qwen3, Qwen2 and Llama",
            qk_norm="head",
            output_bias="attention_output_bias",
            mlp_bias="mlp_bias",
        ),
        Backbone("qwen3", "Qwen3", "Qwen3", qk_norm="head"),
        Backbone("qwen2", "Qwen2", "Qwen2", qkv_bias=True, output_bias=False),
        Backbone("llama", "Llama", "Llama", mlp_bias="mlp_bias"),
        Backbone("mistral", "Mistral", "Mistral", qkv_bias=False, output_bias=False),
        Backbone("smollm3", "SmolLM3", "SmolLM3", mlp_bias="mlp_bias"),
        OLMO2,
        replace(OLMO2, model_type="olmo3", prefix="Olmo3", title="OLMo3", rotary="by_layer_type"),
        Backbone("qwen3_moe", "Qwen3Moe", "Qwen3-MoE", qk_norm="head", has_experts=True),
        Backbone("olmoe", "Olmoe", "OLMoE", qk_norm="flat", has_experts=True),
        Backbone(
            "kimi_linear",
            "KimiLinear",
            "Kimi Linear",
            rotary=None,
            has_experts=True,
            softmax_only=False,
            since="5.17.0",
        ),
    )
}


_RAISES = """\
Raises:
    `huggingface_hub.errors.StrictDataclassError`: for a value of the wrong type or out of range; the message names the
        field, the value and the rule. (`ValueError` from the model, for one that was set later.)
    `ValueError`: if the fields are those of a model type that is neither this one nor the backbone's. Such a
        checkpoint has to be converted."""


def has_bias(config: PreTrainedConfig, said: bool | str) -> bool:
    """What a backbone's record says of a bias: the answer, or the name of the configuration field that has it."""
    return bool(getattr(config, said)) if isinstance(said, str) else said


def is_sparse(config: PreTrainedConfig, layer_idx: int) -> bool:
    """Whether the feed-forward network of a layer is a mixture of experts, by the rule of Qwen3-MoE and OLMoE."""
    return (
        layer_idx not in (getattr(config, "mlp_only_layers", None) or ())
        and config.num_experts > 0
        and (layer_idx + 1) % getattr(config, "decoder_sparse_step", 1) == 0
    )


_MAKING = threading.RLock()


class ConfigurationClasses:
    """
    The configuration classes of a method: one for each backbone, made when it is asked for.

    A class derives from the method's fields and from the stock configuration of the backbone, so that everything which
    holds for that one (validation, aliases, tensor-parallel plans, caches) holds for it too.

    Args:
        module (`str`):
            Name of the module that has the classes as attributes.
        prefix (`str`), model_type (`str`):
            What their names and their model types begin with; the name and the model type of the backbone follow.
        fields (`type`):
            The method's fields, a dataclass whose fields are keyword-only.
        backbones (`tuple` of `str`):
            Model types of the backbones that the method can be put on.
        special_fields (`Mapping`, *optional*):
            Fields for single backbones in place of `fields`, by model type.
    """

    def __init__(
        self,
        module: str,
        prefix: str,
        model_type: str,
        fields: type,
        backbones: tuple[str, ...],
        special_fields: Mapping[str, type] | None = None,
    ):
        self.module, self.prefix, self.model_type = module, prefix, model_type
        self.fields, self.special_fields = fields, special_fields or {}
        self.backbones = {name: BACKBONES[name] for name in backbones}
        self._made: dict[str, type[PreTrainedConfig]] = {}

    def model_type_of(self, backbone: Backbone) -> str:
        """The model type of the method on a backbone."""
        return self.model_type if backbone.model_type == "dense" else f"{self.model_type}_{backbone.model_type}"

    def names(self) -> list[str]:
        """Names of the classes that the installed transformers allows."""
        return [f"{self.prefix}{each.prefix}Config" for each in self.backbones.values() if each.is_available]

    def find(self, name: str, endings: tuple[str, ...] = ("Config",)) -> Backbone | None:
        """The backbone of the class of this name, which has one of these endings; None if there is no such class."""
        for backbone in self.backbones.values():
            if name in [f"{self.prefix}{backbone.prefix}{ending}" for ending in endings]:
                return backbone
        return None

    def of(self, backbone: Backbone) -> type[PreTrainedConfig]:
        """The configuration class of the method on a backbone."""
        # a class is made once, whichever threads ask for it
        with _MAKING:
            if backbone.model_type not in self._made:
                self._made[backbone.model_type] = self._make(backbone)
        return self._made[backbone.model_type]

    def module_getattr(self) -> Callable[[str], type[PreTrainedConfig]]:
        """`__getattr__` for the module, by which its classes are found by name."""

        def __getattr__(name: str) -> type[PreTrainedConfig]:
            backbone = self.find(name)
            if backbone is None:
                raise AttributeError(f"module {self.module!r} has no attribute {name!r}")
            return self.of(backbone)

        return __getattr__

    def _make(self, backbone: Backbone) -> type[PreTrainedConfig]:
        stock, mixin = backbone.stock_config_class(), self.special_fields.get(backbone.model_type, self.fields)
        base = f"{self.prefix}{backbone.prefix}"
        text, *examples = textwrap.dedent(mixin.__doc__ or "").strip().partition("\n\n```python")
        shared = textwrap.indent(textwrap.dedent(DepthMixingFields.__doc__ or "").strip(), "    ")
        documentation = (
            f"Configuration of [`{base}Model`]: every field of [`{stock.__name__}`], and the following.\n\n"
            f"{text}\n{shared}\n\n{_RAISES}{''.join(examples)}"
        )
        members = {
            "__module__": self.module,
            "__qualname__": f"{base}Config",
            "__doc__": documentation,
            "model_type": self.model_type_of(backbone),
            "depth_backbone": backbone,
            # a stage of a pipeline would need tensors of earlier layers besides the hidden states
            "base_model_pp_plan": None,
        }
        made: type[PreTrainedConfig] = strict(type(f"{base}Config", (mixin, stock), members))
        enter_into_liger(made.model_type)
        return made


__all__ = ["BACKBONES", "DENSE_TYPES", "Backbone", "ConfigurationClasses"]
