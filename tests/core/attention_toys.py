"""Toy attention methods, and what installs them as a plugin would; loaded by the conftest beside this file."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hfplug.attention import HANDLES, AttentionCall
from hfplug.ledger import Ledger
from hfplug.method import Kind, Method, Paper
from hfplug.plugins import Entry, Source, catalogue
from hfplug.seams.attention import register

PAPER = Paper(title="none", venue="none", url="none", fidelity="our reading")


@dataclass(frozen=True)
class ToyConfig:
    """Options that say nothing."""

    level: int = 1


class Exact:
    """Everything handled, by the exact attention of the call."""

    handles = frozenset(HANDLES)

    def attend(self, call: AttentionCall) -> Any:
        return call.exact()


@contextmanager
def installed(name: str, cls: type[Any]) -> Iterator[None]:
    """A method as a plugin would bring it: in the catalogue, importable, registered."""
    module = types.ModuleType(f"{name}_module")
    module.Toy, module.ToyConfig = cls, ToyConfig  # type: ignore[attr-defined]
    method = Method(
        name=name, kind=Kind.ATTENTION, target=f"{name}_module:Toy", config=f"{name}_module:ToyConfig", summary="a toy",
        paper=PAPER,
    )  # fmt: skip
    sys.modules[module.__name__] = module
    catalogue().entries[name] = Entry(method, Source(name, "x", "hfplug-toy", "1.0"))
    try:
        with Ledger(name) as ledger:
            register(ledger, name, cls)
            yield
    finally:
        del sys.modules[module.__name__], catalogue().entries[name]


class Narrow:
    """Handles nothing beyond the plain call: everything else has to be refused for it."""

    handles: frozenset[str] = frozenset()

    def attend(self, call: AttentionCall) -> Any:
        assert call.mask is call.s_aux is call.softcap is call.window is None
        assert not call.output_attentions
        assert call.causal
        assert call.dropout == 0
        return call.exact()


class Local(Exact):
    """Exact up to 32 keys, then blocks of 16 on their own: an approximation with a reference."""

    def attend(self, call: AttentionCall) -> Any:
        if call.mask is not None or call.query.shape[2] < call.key.shape[2] or call.key.shape[2] <= 32:
            return call.fallback("short texts, masks and caches")
        return dataclasses.replace(call, segments=blocks(call)).exact()


def blocks(call: AttentionCall) -> torch.Tensor:
    batch, keys = call.query.shape[0], call.key.shape[2]
    segments = torch.zeros(batch, keys, dtype=torch.int32)
    for block, (b, start, stop) in enumerate(call.rows()):
        segments[b, start:stop] = 1 + block * keys + (torch.arange(stop - start) // 16 if stop - start > 32 else 0)
    return segments


def random_call(queries: int, keys: int, **changes: Any) -> AttentionCall:
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    query, key, value = (
        torch.randn(2, heads, length, dim, generator=generator)
        for heads, length, dim in ((4, queries, 8), (2, keys, 8), (2, keys, 6))
    )
    return dataclasses.replace(AttentionCall(query=query, key=key, value=value, scaling=0.3), **changes)
