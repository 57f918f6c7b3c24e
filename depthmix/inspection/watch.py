# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Watching a model while it runs: the mixes of all sites pass here, where they can be read and changed.

While a model is watched its operations are the reference ones, whatever its configuration asks for: a fused kernel has
no mix to show. Compiled forwards run as they are written. When nobody watches any longer all is as before.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from depthmix.families import FAMILIES, method_sites

from .sites import MethodSites, Mix, Site, override


# gets the place of a site in the list of all, and its mix, which it may change
Viewer = Callable[[int, Mix], None]


class Watch:
    """Those who look at the mixes of a base model. First come those who change them, then those who read."""

    def __init__(self, decoder: Any, method: MethodSites):
        self.decoder, self.method = decoder, method
        self.sites: tuple[Site, ...] = method.of(decoder.config)
        self.editors: list[Viewer] = []
        self.readers: list[Viewer] = []
        self.users = 0
        self.stack = ExitStack()

    def see(self, place: int, mix: Mix) -> Tensor | None:
        for viewer in (*self.editors, *self.readers):
            viewer(place, mix)
        return mix.total() if mix.is_changed else None

    def open(self) -> None:
        """Attaches it to the model."""
        with ExitStack() as stack:
            for module in self.decoder.modules():
                for name in ("impl", "depth_impl"):
                    if isinstance(vars(module).get(name), str):
                        override(module, name, "reference", stack)
            stack.callback(self.decoder.register_forward_pre_hook(_refuse_recomputation).remove)
            self.method.attach(self.decoder, self.see, stack)
            self.stack = stack.pop_all()


_WATCHES: WeakKeyDictionary[nn.Module, Watch] = WeakKeyDictionary()
# is open while there are watches: theirs may end in any order, and what compilers do is for the whole process
_UNCOMPILED = ExitStack()


@contextmanager
def watch(model: nn.Module) -> Iterator[Watch]:
    """
    The watch of a model; those who ask while it is open share it.

    Raises:
        `TypeError`: if there is no model of this package in it.
    """
    decoder, method = decoder_of(model)
    found = _WATCHES.get(decoder)
    if found is None:
        found = Watch(decoder, method)
        found.open()
        if not _WATCHES:
            _UNCOMPILED.enter_context(torch.compiler.set_stance("force_eager"))
        _WATCHES[decoder] = found
    found.users += 1
    try:
        yield found
    finally:
        found.users -= 1
        if not found.users:
            del _WATCHES[decoder]
            if not _WATCHES:
                _UNCOMPILED.close()
            found.stack.close()


@contextmanager
def viewing(viewers: list[Viewer], viewer: Viewer) -> Iterator[None]:
    """Has one of those who view a watch among them for a while."""
    viewers.append(viewer)
    try:
        yield
    finally:
        # by identity: others may be equal
        del viewers[next(i for i, each in enumerate(viewers) if each is viewer)]


def decoder_of(model: nn.Module) -> tuple[Any, MethodSites]:
    """
    The base model within a model or a wrapper, and the sites of its method.

    Raises:
        `TypeError`: if there is no model of this package in it.
    """
    modules: Iterable[Any] = model.modules() if isinstance(model, nn.Module) else ()
    for module in modules:
        # by the attribute: the code of a saved model has classes of its own
        if hasattr(type(module), "ledger_class"):
            family = FAMILIES.get(module.config.model_type)
            if family is not None:
                return module, method_sites(family.method)
    raise TypeError(f"model is a {type(model).__name__}: there is no model of depthmix in it.")


def _refuse_recomputation(decoder: Any, _: Any) -> None:
    # every layer, or some of them, has the mark
    if torch.is_grad_enabled() and any(
        layer.training and getattr(layer, "gradient_checkpointing", False) for layer in decoder.layers
    ):
        raise RuntimeError(
            "gradient_checkpointing: layers would be computed again in the backward pass, without what is changed "
            "here. Switch it off, or use torch.no_grad()."
        )


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """No gradients, and every module in eval mode; afterwards each is in the mode in which it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def run(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    """
    One forward without a cache, on the device of the model.

    Raises:
        `TypeError`: if the inputs are no mapping of names to tensors.
    """
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"inputs is a {type(inputs).__name__}: must be what the model takes by name, such as what a tokenizer "
            "returns, or {'input_ids': ids}."
        )
    device = next(model.parameters()).device
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return model(**{**moved, "use_cache": False})
