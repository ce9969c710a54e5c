"""The contract of attention methods holds for exact attention, and each fault turns the test that is named for it red."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hfplug.attention import HANDLES, AttentionCall
from hfplug.errors import UnsupportedError
from hfplug.ledger import Ledger
from hfplug.method import Kind, Method, Paper
from hfplug.plugins import Entry, Source, catalogue
from hfplug.seams.attention import register
from hfplug.testing.attention import AttentionContract
from hfplug.testing.attention_models import FAMILIES

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


class _Toy(AttentionContract):
    toy: Any = Exact

    @pytest.fixture(autouse=True)
    def _installed(self) -> Iterator[None]:
        with installed(self.method, self.toy):
            yield


class TestExact(_Toy):
    method = "toy_exact"
    options = {"level": 3}


class Narrow:
    """Handles nothing beyond the plain call: everything else has to be refused for it."""

    handles: frozenset[str] = frozenset()

    def attend(self, call: AttentionCall) -> Any:
        assert call.mask is call.s_aux is call.softcap is call.window is None
        assert not call.output_attentions
        assert call.causal
        assert call.dropout == 0
        return call.exact()


class TestNarrow(_Toy):
    method = "toy_narrow"
    toy = Narrow


class _Local(Exact):
    """Exact up to 32 keys, then blocks of 16 on their own: an approximation with a reference."""

    def attend(self, call: AttentionCall) -> Any:
        if call.mask is not None or call.query.shape[2] < call.key.shape[2] or call.key.shape[2] <= 32:
            return call.fallback("short texts, masks and caches")
        return dataclasses.replace(call, segments=_blocks(call)).exact()


def _blocks(call: AttentionCall) -> torch.Tensor:
    batch, keys = call.query.shape[0], call.key.shape[2]
    segments = torch.zeros(batch, keys, dtype=torch.int32)
    for block, (b, start, stop) in enumerate(call.rows()):
        segments[b, start:stop] = 1 + block * keys + (torch.arange(stop - start) // 16 if stop - start > 32 else 0)
    return segments


class TestLocal(_Toy):
    method = "toy_local"
    toy = _Local
    exact_when_short = 32

    def reference(self, call: AttentionCall) -> torch.Tensor:
        from hfplug.testing.attention_models import reference

        whole = call.mask is not None or call.query.shape[2] < call.key.shape[2] or call.key.shape[2] <= 32
        return reference(call if whole else dataclasses.replace(call, segments=_blocks(call)))
