# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Everything that differs between the supported versions of transformers."""

import functools
import inspect
from collections.abc import Callable

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast


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

    vars(shown)["__signature__"] = signature.replace(
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
