# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What the configurations of all methods share."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import WeakValueDictionary

from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.olmo2.configuration_olmo2 import Olmo2Config
from transformers.utils import is_torch_available, logging


logger = logging.get_logger(__name__)

# a configuration of a few bytes must not take minutes or all memory, so counts from which lists are made have a limit
MAX_LAYERS = 4096
MAX_LABELS = 2**20
MAX_EXPERTS = 2**14
_MAX_SIZE = 2**31 - 1
# of fp32, in which parameters and norms are computed
_MAX_FLOAT = 3.4e38

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
_ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
# one entry for each layer, or for some
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "mlp_only_layers")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OTHER_SIZES = (
    *("moe_intermediate_size", "decoder_sparse_step", "no_rope_layer_interval", "kv_lora_rank", "q_lora_rank"),
    *("v_head_dim", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"),
)
_CHECKED = (
    *_SIZES,
    *("num_key_value_heads", "max_position_embeddings", "max_window_layers", "sliding_window", "layer_types"),
    *("rms_norm_eps", "initializer_range", "attention_dropout", "hidden_act", "pad_token_id", "num_labels", "dtype"),
    "id2label",
    *("torch_dtype", "use_sliding_window", *_ROPE_FIELDS),
    *_LAYER_LISTS,
    *_EXPERT_COUNTS,
    *_OTHER_SIZES,
    "num_experts_per_tok",
)
# what the host divides by, or takes a power or logarithm of
_POSITIVE_ROPE_KEYS = (
    *("rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
    *("low_freq_factor", "high_freq_factor", "attention_factor", "short_factor", "long_factor"),
)
_DTYPES = ("float32", "bfloat16", "float16", "float64", "float", "half", "double", "float8_e4m3fn", "float8_e5m2")
# whose fields these are. A configuration that does not declare one would keep it as an attribute without effect
_DENSE = "the models of Qwen3, Qwen2 and Llama in one"
_OWNERS = {
    **dict.fromkeys(("depth_stride", "depth_window", "depth_gate", "num_loops"), "Depth-Attention"),
    "key_norm_position": f"Depth-Attention and {_DENSE}",
    **dict.fromkeys(("use_qk_norm", "attention_output_bias"), _DENSE),
    "output_depth_weights": "Depth-Attention and Attention Residuals",
}
_OWNERS_BY_PREFIX = {
    "attnres_": "Attention Residuals",
    "dwa_": "DenseFormer",
    "mhc_": "mHC",
    "moda_": "Mixture-of-Depths Attention",
    "value_residual_": "value residuals",
}


class _Configurations(WeakValueDictionary):
    """Configurations by their `id`, since they cannot be hashed, each for as long as it lives."""

    def __reduce__(self):
        # servers hand a configuration of remote code to their processes with its class and the globals of its
        # methods, by value; no model has been built with it there
        return type(self), ()


_IN_USE = _Configurations()
_ATTENTION_KINDS = ("full_attention", "sliding_attention", "linear_attention")


# a method derives from it and adds its own; the documentation of the made classes ends with this one
@dataclass(kw_only=True)
class DepthMixingFields:
    """
    depth_impl (`str`, *optional*, defaults to `"auto"`):
        Implementation of the operations of [`~depthmix.kernels`]: `"triton"`, fused kernels, and an error where they
        cannot run; `"reference"`, stock arithmetic and pure PyTorch; `"auto"`, kernels on a GPU where Triton is
        installed.
    prefill_chunk_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`):
        How many tokens of a prompt the layers take at a time when no gradients are wanted and there is a
        `DynamicCache`. What they hand each other exists for these only, and results differ by rounding. `"auto"`
        cuts a prompt where that would take more than 8 GiB, into chunks for which it takes 512 MiB; None never does.
    """

    if TYPE_CHECKING:
        # from the configuration of the backbone, which comes after the fields of a method in every class
        depth_backbone: ClassVar[Any]
        num_hidden_layers: int
        shape_fields: ClassVar[tuple[str, ...]]
        start_fields: ClassVar[tuple[str, ...]]

    # fields that decide which tensors there are, and of which shape. Without an annotation, with which a dataclass
    # would count it among the fields
    shape_fields = ()
    # fields that say what new parameters start at, and nothing to those of a checkpoint
    start_fields = ()

    depth_impl: Literal["auto", "triton", "reference"] = "auto"
    prefill_chunk_tokens: int | Literal["auto"] | None = "auto"

    def __post_init__(self, **kwargs):
        take_model_type(self, kwargs)
        refuse_foreign_fields(type(self), kwargs)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """
        As for every configuration.

        Raises:
            `ValueError`: for a keyword that is a field of another method, which would end up elsewhere.
        """
        refuse_foreign_fields(cls, kwargs)
        return super().from_dict(config_dict, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_foreign_fields(type(self), {name: value})
        fixed = name == "depth_impl" or (name != "output_depth_weights" and _owner(name) is not None)
        if fixed and _IN_USE.get(id(self)) is self and value != getattr(self, name):
            logger.warning(
                f"{name}={shown(value)} has no effect on the model that has been built with this configuration, but "
                "is saved with it: what is loaded then is another model. Pass it to `from_pretrained`, or build a "
                "model of a copy of the configuration."
            )
        super().__setattr__(name, value)

    def note_model(self) -> None:
        """Called when a model has been built: says which values have no effect there, and later ones have none."""
        for remark in self.ineffective_values():
            logger.warning_once(remark)
        _IN_USE[id(self)] = self

    def ineffective_values(self) -> Iterator[str]:
        """What a model that is built would take no notice of, one sentence for each field."""
        yield from ()

    def validate_depth_mixing(self):
        """Part of the `@strict` validation, which runs on construction and before saving."""
        try:
            check_decoder_shape(self)
        except ValueError as error:
            raise _under_own_name(self, error) from None
        check_layer_kinds(self)
        check_values_that_act(self)
        if self.prefill_chunk_tokens != "auto":
            check_count("prefill_chunk_tokens", self.prefill_chunk_tokens)


def refuse_foreign_fields(config_class: type[DepthMixingFields], values: Mapping[str, Any]) -> None:
    """
    Raises:
        `ValueError`: for a field of this package's that the configuration does not have; the message says whose it is.
    """
    declared = config_class.__dataclass_fields__
    for name, value in values.items():
        owner = None if name in declared else _owner(name)
        if owner is not None:
            own = [
                each for each in declared if _owner(each) is not None or each in DepthMixingFields.__dataclass_fields__
            ]
            # with the prefix of its own method it is no field of another one, but misspelt
            misspelt = name not in _OWNERS and any(_owner(each) == owner for each in own)
            raise ValueError(
                f"{name}={shown(value)}: {config_class.__name__} has no such field"
                + (". " if misspelt else f", which belongs to {owner}. ")
                + f"Its own are {', '.join(own)}."
            )


def _owner(name: str) -> str | None:
    """Which models have a field of this name that stock models do not have."""
    by_prefix = (owner for prefix, owner in _OWNERS_BY_PREFIX.items() if name.startswith(prefix))
    return _OWNERS.get(name) or next(by_prefix, None)


def check_decoder_shape(config: PreTrainedConfig | Mapping[str, Any]) -> None:
    """
    Checks a configuration, or the fields that one is to be made from, without making anything of their size.

    Raises:
        `ValueError`: if no decoder has such a shape or computes with such numbers; the message names the field, the
            value and the rule.
    """
    given = config if isinstance(config, Mapping) else _checked_values(config)
    values = {name: value for name in _CHECKED if (value := given.get(name)) is not None}
    check_count("num_hidden_layers", values.get("num_hidden_layers"), most=MAX_LAYERS)
    for name in (*_SIZES, "max_position_embeddings", *_OTHER_SIZES):
        check_count(name, values.get(name))
    _check_layer_lists(values)
    # fields under other names are not on the configuration yet while it is made
    _check_experts(values, chosen=None if isinstance(config, Mapping) else values.get("num_experts_per_tok"))
    check_count("num_key_value_heads", values.get("num_key_value_heads"), least=-_MAX_SIZE)
    if values.get("head_dim", 0) % 2:
        raise ValueError(f"head_dim={values['head_dim']}: must be even, since the rotation turns pairs of numbers.")
    hidden, heads, kv_heads = (
        values.get(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    # latent attention has widths of its own
    if hidden and heads and "head_dim" not in values and "kv_lora_rank" not in values and hidden // heads % 2 != 0:
        raise ValueError(
            f"hidden_size={hidden}: must give each of num_attention_heads={heads} an even number, since the rotation "
            "turns pairs of numbers."
        )
    if hidden and heads and "head_dim" not in values and hidden < heads:
        raise ValueError(f"hidden_size={hidden}: must be at least num_attention_heads={heads}.")
    if kv_heads is not None and (kv_heads < 1 or (heads is not None and heads % kv_heads)):
        raise ValueError(
            f"num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}, since each key-value head "
            "has a group of query heads of its own."
        )
    check_count("num_labels", values.get("num_labels"), most=MAX_LABELS)
    _check_labels(values.get("id2label"))
    check_number("rms_norm_eps", values.get("rms_norm_eps"), least=0)
    check_number("initializer_range", values.get("initializer_range"), least=0)
    check_number("attention_dropout", values.get("attention_dropout"), least=0, most=1)
    _check_padding(values.get("pad_token_id"), values.get("vocab_size"))
    _check_windows(values)
    _check_activation(values.get("hidden_act"))
    for name in ("dtype", "torch_dtype"):
        _check_dtype(name, values.get(name))
    for name in _ROPE_FIELDS:
        _check_rope(name, values.get(name))


def _under_own_name(config: PreTrainedConfig, error: ValueError) -> ValueError:
    """The error with the name that a field has in this configuration, where the common one stands for it."""
    name, equals, rest = str(error).partition("=")
    # in files of Kimi Linear many fields have names of their own, and one is made of another
    aliases = {**config.attribute_map, "head_dim": "qk_rope_head_dim"}
    return error if config.depth_backbone.softmax_only else ValueError(f"{aliases.get(name, name)}{equals}{rest}")


def _checked_values(config: PreTrainedConfig) -> dict[str, Any]:
    # the host warns whoever looks the old name of `dtype` up
    return {name: getattr(config, name, None) for name in _CHECKED if name != "torch_dtype"}


def check_count(name: str, value: int | None, *, least: int = 1, most: int = _MAX_SIZE) -> None:
    """
    Raises:
        `ValueError`: if a field is neither None nor a whole number in this range.
    """
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)}: must be a whole number.")
    if value < least:
        raise ValueError(
            f"{name}={shown(value)}: must be positive."
            if least == 1
            else f"{name}={shown(value)}: must be at least {least}."
        )
    if value > most:
        raise ValueError(f"{name}={shown(value)}: must be at most {most}.")


def check_number(name: str, value: float | None, *, least: float = -math.inf, most: float = math.inf) -> None:
    """
    Raises:
        `ValueError`: if a field is neither None nor a finite number in this range.
    """
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)}: must be a number.")
    # the comparison of an integer with infinity is exact
    if not (-math.inf < value < math.inf) or abs(value) > _MAX_FLOAT:
        raise ValueError(f"{name}={shown(value)}: must be a finite number, as fp32 has them.")
    if value < least:
        raise ValueError(f"{name}={shown(value)}: must be at least {least}.")
    if value > most:
        raise ValueError(f"{name}={shown(value)}: must be at most {most}.")


def shown(value: Any) -> str:
    """A value as a message shows it: not longer than a line."""
    # writing a number of many digits out takes time that grows with their square, and Python refuses it
    if isinstance(value, int) and value.bit_length() > 128:
        return "(a number of more than 38 digits)"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_layer_lists(values: dict[str, Any]) -> None:
    # first of all, since the host looks at every entry
    for name in _LAYER_LISTS:
        entries = values.get(name)
        if isinstance(entries, list | tuple) and len(entries) > MAX_LAYERS:
            raise ValueError(f"{name} has {len(entries)} entries: must have at most {MAX_LAYERS}.")
    layers = values.get("num_hidden_layers")
    for name in ("no_rope_layers", "layer_types", "mlp_layer_types"):
        entries = values.get(name)
        if isinstance(entries, list | tuple) and isinstance(layers, int) and len(entries) < layers:
            raise ValueError(f"{name} has {len(entries)} entries: must have one for each of {layers} layers.")


def _check_experts(values: dict[str, Any], chosen: int | None) -> None:
    for name in _EXPERT_COUNTS:
        count = values.get(name)
        check_count(name, count, least=0, most=MAX_EXPERTS)
        if count:
            check_count("num_experts_per_tok", chosen, most=count)


def _check_labels(labels: dict | None) -> None:
    if labels is None:
        return
    if not isinstance(labels, dict) or len(labels) > MAX_LABELS:
        raise ValueError(f"id2label={shown(labels)}: must be an object of at most {MAX_LABELS} labels.")
    for key in labels:
        if not isinstance(key, int) and not (isinstance(key, str) and key.isdecimal() and len(key) < 20):
            raise ValueError(f"id2label has the key {shown(key)}: must be the number of a label.")


def _check_padding(token: int | None, vocab_size: int | None) -> None:
    if not isinstance(token, int) or vocab_size is None:
        return
    # torch takes a negative one, which old checkpoints have, from the end
    if not -vocab_size <= token < vocab_size:
        raise ValueError(f"pad_token_id={shown(token)}: must be less than vocab_size={vocab_size}.")


def _check_windows(values: dict[str, Any]) -> None:
    window, kinds = values.get("sliding_window"), values.get("layer_types")
    used = bool(values.get("use_sliding_window"))
    check_count("sliding_window", window, least=1 if used else 0)
    check_count("max_window_layers", values.get("max_window_layers"), least=0)
    if kinds is None:
        return
    if not isinstance(kinds, list | tuple):
        raise ValueError(f"layer_types={shown(kinds)}: must be a list with the kind of each layer's attention.")
    for kind in kinds:
        if kind not in _ATTENTION_KINDS:
            raise ValueError(f"layer_types has {shown(kind)}: must be one of {', '.join(_ATTENTION_KINDS)}.")


def _check_activation(name: str | None) -> None:
    if name is None or not is_torch_available():
        return
    # not at the top, since the host's module of activations needs torch
    from transformers.activations import ACT2FN

    if not isinstance(name, str) or name not in ACT2FN:
        raise ValueError(f"hidden_act={shown(name)}: must be an activation of transformers, such as 'silu' or 'gelu'.")


def _check_dtype(name: str, value: Any) -> None:
    # a model has the dtype of torch under the name that its file has
    name_of_dtype = value if isinstance(value, str) else str(value).removeprefix("torch.")
    if value is not None and not isinstance(value, dict) and name_of_dtype not in _DTYPES:
        raise ValueError(f"{name}={shown(value)}: must be a floating dtype of torch, such as 'bfloat16'.")


def _check_rope(name: str, value: Any) -> None:
    """Numbers of the rotation, which the host checks, if at all, with a warning."""
    if isinstance(value, dict):
        kind = value.get("rope_type", value.get("type"))
        if kind is not None and kind != "default" and (not isinstance(kind, str) or kind not in ROPE_INIT_FUNCTIONS):
            known = ", ".join(("default", *ROPE_INIT_FUNCTIONS))
            raise ValueError(f"{name}: rope_type={shown(kind)}: must be one of {known}.")
        for key, entry in value.items():
            _check_rope(str(key), entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            _check_rope(name, entry)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        check_number(name, value)
        if name in _POSITIVE_ROPE_KEYS and value <= 0:
            raise ValueError(f"{name}={shown(value)}: must be positive.")
    elif value is not None and name in _POSITIVE_ROPE_KEYS:
        raise ValueError(f"{name}={shown(value)}: must be a number.")


def check_layer_kinds(config: PreTrainedConfig) -> None:
    """
    Raises:
        `ValueError`: if there are fields of other models, which caches and masks would take notice of, and which the
            backbone's own model ignores.
    """
    declared = {each.name for each in fields(config)}
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None) or ()
    # where the last layers are cut off, those of the others
    kinds = set(kinds[: config.num_hidden_layers])
    if kinds == {"linear_attention"}:
        raise ValueError(
            "layer_types has 'linear_attention' only: must have 'full_attention' for one layer at least, since no "
            "other knows how many tokens a cache has."
        )
    if ("sliding_window" not in declared and window is not None) or (
        "layer_types" not in declared and kinds - {"full_attention", *(["sliding_attention"] if window else [])}
    ):
        raise ValueError(
            f"sliding_window={window}, layer_types={sorted(kinds)}: must not be set, since "
            f"{config.depth_backbone.title} attends to all earlier tokens in every layer."
        )


def check_values_that_act(config: PreTrainedConfig) -> None:
    """
    Raises:
        `ValueError`: for a value with which the stock model fails in its forward. A file may leave such fields to
            their defaults, so that a whole configuration is looked at.
    """
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None) or ()
    switch = getattr(config, "use_sliding_window", None)
    if (switch is None and window == 0) or ("sliding_attention" in kinds and not window):
        raise ValueError(f"sliding_window={window}: must be positive where a layer has a window.")
    check_number("clip_qkv", getattr(config, "clip_qkv", None))
    experts, chosen = getattr(config, "num_experts", None), getattr(config, "num_experts_per_tok", None)
    if experts and chosen is None:
        raise ValueError(f"num_experts_per_tok={chosen}: must be a whole number where there are experts.")
    heads = config.num_attention_heads
    if not config.depth_backbone.softmax_only and config.num_key_value_heads not in (None, heads):
        raise ValueError(
            f"num_key_value_heads={config.num_key_value_heads}: must be num_attention_heads={heads} in latent "
            "attention, which expands its keys and values for each head."
        )


def plan_with_whole_heads(plan: dict[str, str]) -> dict[str, str]:
    """
    A backbone's plan of tensor parallelism, but with all heads on every device: the attention is distributed as that
    of OLMo2 is, which gathers what its projections give.
    """
    attention = "layers.*.self_attn."
    whole = {name: style for name, style in Olmo2Config.base_model_tp_plan.items() if name.startswith(attention)}
    return {name: style for name, style in plan.items() if not name.startswith(attention)} | whole


def take_model_type(config: PreTrainedConfig, values: dict[str, Any]) -> None:
    """
    Takes `model_type` out of the values that a configuration is read from, since that of a vanilla checkpoint must not
    stay on the instance, and checks the others before anything is made of their size.

    Raises:
        `huggingface_hub.errors.StrictDataclassError`: for a value out of range.
        `ValueError`: if it is neither the configuration's own nor its backbone's. Other models have the same fields
            with other defaults, or the same weights and another function, and have to be converted.
    """
    classes, model_type = type(config).__mro__, values.pop("model_type", None)
    if model_type not in (None, *(getattr(each, "model_type", None) for each in classes)):
        stock = next(each for each in classes if each.__module__.startswith("transformers.models."))
        raise ValueError(
            f"model_type={model_type!r}: {classes[0].__name__} reads configurations of its own and of "
            f"{stock.__name__.removesuffix('Config')}. To get a {config.model_type} model from another checkpoint, "
            f"convert it: depthmix convert SOURCE DEST --to {config.model_type}"
        )
    try:
        check_decoder_shape(_checked_values(config) | values)
    except ValueError as error:
        error = _under_own_name(config, error)
        raise StrictDataclassClassValidationError(validator="validate_depth_mixing", cause=error) from error
