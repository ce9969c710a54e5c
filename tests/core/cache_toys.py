"""Toy caches, and what installs them as a plugin would; loaded by the conftest beside this file."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hfplug.caching import MethodCache, MethodLayer
from hfplug.method import Kind, Method, Paper
from hfplug.plugins import Entry, Source, catalogue

PAPER = Paper(title="none", venue="none", url="none", fidelity="our reading")


@dataclass(frozen=True)
class ToyCacheConfig:
    """Blocks of so many tokens are stored in bfloat16."""

    block: int = 16


class Halved(MethodLayer):
    """Whole blocks in half the precision, the rest exact; padding inside of a block is stored as zeros."""

    open = frozenset({"keys", "values", "real"})

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        super().lazy_initialization(key_states, value_states)
        rows, heads = key_states.shape[:2]
        for name, dim in (("keys", key_states.shape[-1]), ("values", value_states.shape[-1])):
            self.state[name] = key_states.new_zeros(rows, heads, 0, dim)
            self.state[f"{name}_half"] = torch.zeros(rows, heads, 0, dim, dtype=torch.bfloat16)
        self.state["real"] = torch.zeros(rows, 0, dtype=torch.bool)

    def append(self, keys: Any, values: Any, real: Any) -> None:
        if real is None:
            real = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool)
        real = torch.cat((self.state["real"], real), dim=1)
        done = real.shape[1] // self.options.block * self.options.block
        new = {"real": real[:, done:].clone()}
        for name, states in (("keys", keys), ("values", values)):
            whole = torch.cat((self.state[name], states), dim=2)
            kept = whole[:, :, :done].masked_fill(~real[:, None, :done, None], 0).bfloat16()
            new[f"{name}_half"] = torch.cat((self.state[f"{name}_half"], kept), dim=2)
            new[name] = whole[:, :, done:].clone()
        self.state |= new

    def read(self) -> Any:
        return tuple(torch.cat((self.state[f"{n}_half"].to(self.dtype), self.state[n]), dim=2) for n in ("keys", "values"))

    def removable(self) -> int:
        return self.state["keys"].shape[2]

    def remove(self, tokens: int) -> None:
        for name in ("keys", "values"):
            self.state[name] = self.state[name][:, :, :-tokens].clone()
        self.state["real"] = self.state["real"][:, :-tokens].clone()

    def formula(self, rows: int, heads: int, key_dim: int, value_dim: int) -> int:
        exact = self.length % self.options.block
        one = rows * heads * (key_dim + value_dim)
        return one * (2 * (self.length - exact) + 4 * exact) + rows * exact + 8 * rows


class ToyCache(MethodCache):
    """A cache of :class:`Halved` layers."""

    method, config_class, layer_class = "toy_cache", ToyCacheConfig, Halved


@contextmanager
def installed(layer: type[MethodLayer] = Halved) -> Iterator[type[MethodCache]]:
    """The method as a plugin would bring it: in the catalogue, importable."""
    name = "toy_cache"
    module = types.ModuleType(f"{name}_module")
    cls = type("ToyCache", (ToyCache,), {"layer_class": layer})
    module.ToyCache, module.ToyCacheConfig = cls, ToyCacheConfig  # type: ignore[attr-defined]
    method = Method(
        name=name, kind=Kind.CACHE, target=f"{name}_module:ToyCache", config=f"{name}_module:ToyCacheConfig", summary="a toy",
        paper=PAPER,
    )  # fmt: skip
    sys.modules[module.__name__] = module
    catalogue().entries[name] = Entry(method, Source(name, "x", "hfplug-toy", "1.0"))
    try:
        yield cls
    finally:
        del sys.modules[module.__name__], catalogue().entries[name]
