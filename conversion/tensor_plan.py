# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Which tensor of the source becomes which tensor of the target."""

from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from depthmix.configuration.configuration_depth_common import shown

from .checkpoint_io import FLOAT_DTYPES, Checkpoint, StoredTensor, TensorWrite, same_values
from .conversion_target import JoinedTensors, NewTensorsFn
from .errors import ConversionError, raise_problems
from .source_configs import config_errors
from .weight_maps import WeightMap


if TYPE_CHECKING:
    from transformers import PreTrainedModel


# of a decoder layer: seven projections and two norms
_LEAST_TENSORS = 9


@dataclass
class TensorPlan:
    """
    The tensors to write, in the model's order, and how they came about (by target name; dropped by source name).
    `function_note` is set if the tensors, and not the configuration, decide whether the function stays the same;
    `learns` says whether there are new parameters of the mixing.
    """

    writes: list[TensorWrite] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    function_note: str | None = None
    learns: bool = False


def plan_tensors(
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    model_class: "type[PreTrainedModel]",
    config: PreTrainedConfig,
    new_tensors: NewTensorsFn,
    dtype: str | None,
) -> TensorPlan:
    """
    Matches a checkpoint with the model that `config` describes.

    Raises:
        [`ConversionError`]: listing the tensors that are missing, not expected, of another shape, or quantised.
    """
    check_layers(checkpoint, config.num_hidden_layers)
    with config_errors():
        shapes, tied, kept_in_fp32 = _expected_tensors(model_class, config)
        # by name only: a checkpoint may claim sizes of which the values do not fit in memory
        with torch.device("meta"):
            starts = new_tensors(config)

    # made with the first of them that is written
    @cache
    def start_values() -> "dict[str, Callable[[], torch.Tensor]]":
        made = new_tensors(config)
        return {name: start for name, start in made.items() if not isinstance(start, JoinedTensors)}

    start_dtype = dtype or _most_common_dtype(checkpoint)
    plan = TensorPlan()
    problems = []

    sources: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        target_name = weight_map.to_target(name)
        # a release has empty tensors for what a layer does not have
        if target_name is None or (target_name not in shapes and 0 in tensor.shape):
            plan.dropped.append(name)
        elif target_name not in shapes:
            problems.append(f"{name} in {tensor.file.name} is not part of this model")
        elif target_name in sources:
            problems.append(f"{name} and {sources[target_name].name} are two names of one tensor")
        else:
            sources[target_name] = tensor

    for name, shape in shapes.items():
        stored = sources.get(name)
        if name in tied:
            if stored is not None:
                plan.dropped.append(stored.name)
                partner = sources.get(tied[name])
                if partner is not None and not same_values(stored, partner):
                    plan.warnings.append(
                        f"{stored.name} differs from {partner.name}, but the config ties them. The config was "
                        f"followed and {stored.name} was dropped, where stock transformers would use it. To keep it, "
                        "set tie_word_embeddings to false in the source's config.json."
                    )
                    plan.function_note = (
                        "The converted model computes another function than the source in stock transformers, which "
                        f"would use its separate {stored.name} and not tie it to {partner.name}. Fine-tune it before "
                        "use, or set tie_word_embeddings to false in the source's config.json and convert again."
                    )
        elif stored is None and name in starts:
            new_dtype = "F32" if name in kept_in_fp32 else start_dtype
            start = starts[name]
            if isinstance(start, JoinedTensors):
                parts = [sources[part] for part in start if part in sources]
                # a part that is missing or of another kind is named by itself
                if len(parts) == len(start) and all(part.dtype in FLOAT_DTYPES for part in parts):
                    plan.writes.append(TensorWrite.joined(name, parts, new_dtype, shape))
            else:
                make = partial(lambda name: start_values()[name](), name)
                plan.writes.append(TensorWrite.from_function(name, make, new_dtype, shape))
            plan.new.append(name)
            plan.learns |= name in kept_in_fp32
        elif stored is None:
            problems.append(f"{weight_map.to_source(name)} {_where_missing(name, model_class, checkpoint)}")
        # a scalar of the source may be one element in the target, since FSDP2 shards no scalars, and the weight of a
        # linear layer to one feature a vector
        elif stored.shape != shape and (stored.shape, shape) != ((), (1,)) and stored.shape != (1, *shape):
            problems.append(f"{stored.name} in {stored.file.name} has shape {list(stored.shape)}, not {list(shape)}")
        elif stored.dtype not in FLOAT_DTYPES:
            problems.append(
                f"{stored.name} in {stored.file.name} is quantised or no weight: its dtype is {stored.dtype}"
            )
        else:
            plan.writes.append(replace(TensorWrite.from_stored(name, stored, dtype), shape=shape))
            (plan.kept if stored.name == name else plan.renamed).append(name)
    raise_problems(f"The tensors of {checkpoint.folder} do not fit its config.json", problems)
    return plan


def check_layers(checkpoint: Checkpoint, layers: Any) -> None:
    """
    Compares the number of layers that a config.json claims with the headers, before anything of that size is made.

    Raises:
        [`ConversionError`]: if a few bytes claim many more layers than there are tensors for. Small differences are
            named tensor by tensor later, and what is no number by the configuration.
    """
    count = len(checkpoint.tensors)
    if isinstance(layers, int) and layers * _LEAST_TENSORS > 2 * count + 100:
        raise ConversionError(
            f"The tensors of {checkpoint.folder} do not fit its config.json: num_hidden_layers={shown(layers)} needs "
            f"at least {_LEAST_TENSORS} each, and there are {count}."
        )


def _expected_tensors(
    model_class: "type[PreTrainedModel]", config: PreTrainedConfig
) -> tuple[dict[str, tuple[int, ...]], dict[str, str], set[str]]:
    """Shapes by name as a saved model has them, which names are tied to which, and the names that stay in fp32."""
    # not at the top: they need torch, and `inspect` seldom does
    from transformers.core_model_loading import revert_weight_conversion

    from depthmix.modeling.mixing_modules import MixingModule

    # the attention that needs nothing, whatever is installed: a model that is not run has no use for another
    config = copy(config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = model_class(config)
        # stock models store each expert by itself, and hold them as one tensor
        saved = revert_weight_conversion(model, model.state_dict())
    tied = model._tied_weights_keys if config.tie_word_embeddings else {}
    # the start of a mixing can depend on digits that 16 bits do not have
    in_fp32 = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, MixingModule)
        for name, _ in module.named_parameters(recurse=False)
    }
    return {name: tuple(tensor.shape) for name, tensor in saved.items()}, tied, in_fp32


def _most_common_dtype(checkpoint: Checkpoint) -> str:
    counts = Counter(stored.dtype for stored in checkpoint.tensors.values() if stored.dtype in FLOAT_DTYPES)
    return max(counts, key=counts.__getitem__, default="F32")


def _where_missing(name: str, model_class: "type[PreTrainedModel]", checkpoint: Checkpoint) -> str:
    files = ", ".join(checkpoint.files[:3]) + (", …" if len(checkpoint.files) > 3 else "")
    if name in model_class._tied_weights_keys:
        return f"is missing (looked in {files}), and config.json does not say that it is tied (tie_word_embeddings)"
    return f"is missing (looked in {files})"
