"""Toy patches, one of them right and the others each with one fault; loaded by the conftest beside this file."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from hfplug.families import decoder_of
from hfplug.method import Kind, Method, Paper
from hfplug.modelpatch import ModelPatch, PatchModule
from hfplug.plugins import Entry, Source, catalogue

PAPER = Paper(title="none", venue="none", url="none", fidelity="our reading")


class Gain(PatchModule):
    """Multiplies hidden states by 1 + gain, gain 0 at the start."""

    def __init__(self, width: int, like: torch.Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(width, dtype=like.dtype, device=like.device))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gain)

    def change(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + self.gain)

    def after(self, layer: nn.Module, args: Any, output: Any) -> Any:
        return (self.change(output[0]), *output[1:]) if isinstance(output, tuple) else self.change(output)


@dataclass(frozen=True)
class Right(ModelPatch):
    """A gain after every layer."""

    method: ClassVar[str] = "toy_gain"
    identity: ClassVar[bool] = True
    module: ClassVar[Any] = Gain

    strength: float = field(default=1.0, metadata={"help": "none"})

    def apply(self, model: Any, ledger: Any) -> None:
        decoder = decoder_of(model)
        for index, layer in enumerate(decoder.layers):
            self.on_layer(decoder, index, layer, ledger)

    def on_layer(self, decoder: Any, index: int, layer: Any, ledger: Any) -> None:
        gain = self.module(decoder.config.hidden_size, next(layer.parameters()))
        ledger.add_module(layer, "toy_gain", gain)
        ledger.hook(layer, "forward", gain.after)


def fault(name: str, **changes: Any) -> Any:
    """``Right`` with something else in its place."""
    return dataclass(frozen=True)(type(name, (Right,), {"__doc__": name, "__annotations__": {}, **changes}))


def gain(name: str, **changes: Any) -> Any:
    """A patch whose module is not ``Gain``."""
    return fault(name, module=type(f"{name}Gain", (Gain,), changes))


@contextmanager
def installed(cls: type[Any]) -> Iterator[None]:
    """A patch as a plugin would bring it."""
    name = cls.method
    module = types.ModuleType(f"{name}_module")
    module.Toy = cls  # type: ignore[attr-defined]
    where = f"{name}_module:Toy"
    method = Method(name=name, kind=Kind.PATCH, target=where, config=where, summary="a toy", paper=PAPER)
    former = sys.modules.get(module.__name__), catalogue().entries.get(name)
    sys.modules[module.__name__] = module
    catalogue().entries[name] = Entry(method, Source(name, "x", "hfplug-toy", "1.0"))
    try:
        yield
    finally:
        del sys.modules[module.__name__], catalogue().entries[name]
        if former[0] is not None and former[1] is not None:  # one inside the other
            sys.modules[module.__name__], catalogue().entries[name] = former
