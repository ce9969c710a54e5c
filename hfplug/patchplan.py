"""What a patch does to a model, as data: the same for a dry run and for the real thing."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from hfplug.families import Decoder
from hfplug.modelpatch import ModelPatch, PatchLedger


@dataclass(frozen=True, order=True)
class Stored:
    """A parameter or buffer: its name, shape, dtype, size in bytes, and whether it is a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    parameter: bool = True


@dataclass(frozen=True)
class Plan:
    """What applying a patch changes.

    Attributes:
        method, family: names.
        options: all options of the patch, also those not given.
        layers: indices of the layers touched.
        depth: number of layers of the model.
        swapped: ``(module, class that was there, class put there)``.
        added_modules: ``(module, class)``.
        hooked: ``(module, kind of hook)``.
        changed: attributes of modules that are replaced, as ``module.attribute``.
        added, removed: parameters and buffers.
        notes: what the method says about its cost.
    """

    method: str
    family: str
    options: Mapping[str, Any]
    layers: tuple[int, ...]
    depth: int
    swapped: tuple[tuple[str, str, str], ...]
    added_modules: tuple[tuple[str, str], ...]
    hooked: tuple[tuple[str, str], ...]
    changed: tuple[str, ...]
    added: tuple[Stored, ...]
    removed: tuple[Stored, ...]
    notes: tuple[str, ...] = ()

    @property
    def modules(self) -> int:
        """How many modules are swapped, added, hooked or given another attribute."""
        names = {m for m, *_ in (*self.swapped, *self.added_modules, *self.hooked)}
        return len(names | {c.rpartition(".")[0] for c in self.changed})

    @property
    def parameters(self) -> int:
        """Parameters added less those removed."""
        return _count(self.added) - _count(self.removed)

    @property
    def bytes(self) -> int:
        """Bytes of parameters and buffers added less those removed."""
        return sum(s.bytes for s in self.added) - sum(s.bytes for s in self.removed)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form, with the totals."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for key in ("added", "removed"):
            out[key] = [{f.name: getattr(s, f.name) for f in fields(s)} for s in out[key]]
        totals = {"modules": self.modules, "parameters": self.parameters, "bytes": self.bytes}
        return {**out, "options": dict(self.options), **totals}

    def __str__(self) -> str:
        options = ", ".join(f"{k}={v!r}" for k, v in self.options.items())
        lines = [f"{self.method}({options}) on a {self.family} model: {len(self.layers)} of {self.depth} layers"]
        kinds: dict[str, int] = {}
        for _, old, new in self.swapped:
            kinds[f"{old} -> {new}"] = kinds.get(f"{old} -> {new}", 0) + 1
        for _, new in self.added_modules:
            kinds[f"added {new}"] = kinds.get(f"added {new}", 0) + 1
        for _, hook in self.hooked:
            kinds[f"hook {hook}"] = kinds.get(f"hook {hook}", 0) + 1
        for place in self.changed:
            attribute = place.rpartition(".")[2]
            kinds[f"replaced {attribute}"] = kinds.get(f"replaced {attribute}", 0) + 1
        lines += [f"  {count:>4} x {what}" for what, count in kinds.items()]
        dtypes = sorted({s.dtype for s in self.added})
        lines.append(
            f"  parameters: +{_count(self.added):,} -{_count(self.removed):,} = {self.parameters:+,}"
            + (f" ({', '.join(dtypes)})" if dtypes else "")
        )
        lines.append(f"  memory: {self.bytes:+,} bytes")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def _count(stored: Iterable[Stored]) -> int:
    out = 0
    for each in stored:
        size = 1
        for n in each.shape:
            size *= n
        out += size if each.parameter else 0
    return out


class Snapshot:
    """The tensors and module names of a model at one time."""

    def __init__(self, model: nn.Module) -> None:
        self.stored = {_stored(n, t, True) for n, t in model.named_parameters()}
        self.stored |= {_stored(n, t, False) for n, t in model.named_buffers()}
        self.names = {id(module): name for name, module in model.named_modules()}


def _stored(name: str, tensor: torch.Tensor, parameter: bool) -> Stored:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Stored(name, tuple(tensor.shape), dtype, tensor.numel() * tensor.element_size(), parameter)


def describe(
    patch: ModelPatch, options: Mapping[str, Any], decoder: Decoder, before: Snapshot, after: Snapshot, ledger: PatchLedger
) -> Plan:
    """The plan of what a ledger did to a model between two snapshots."""
    names = {**before.names, **after.names}
    swapped, added, hooked, changed = [], [], [], []
    touched: set[int] = set()
    for touch in ledger.touches:
        parent = names.get(id(touch.module), "?")
        child = f"{parent}.{touch.name}" if parent else touch.name
        if touch.kind == "swap":
            swapped.append((child, touch.former, type(touch.new).__name__))
        elif touch.kind == "add":
            added.append((child, type(touch.new).__name__))
        elif touch.kind == "hook":
            hooked.append((parent, touch.name))
        else:
            changed.append(child)
        index = decoder.layer_of(parent if touch.kind == "hook" else child)
        touched |= set() if index is None else {index}
    return Plan(
        method=patch.method, family=decoder.family.name, options=dict(options), layers=tuple(sorted(touched)),
        depth=len(decoder.layers), swapped=tuple(swapped), added_modules=tuple(added), hooked=tuple(hooked),
        changed=tuple(changed), added=tuple(sorted(after.stored - before.stored)),
        removed=tuple(sorted(before.stored - after.stored)), notes=tuple(patch.notes(decoder)),
    )  # fmt: skip


def without_data(model: nn.Module) -> nn.Module:
    """A deep copy of a model whose parameters and buffers have shapes and dtypes but no data (device ``meta``)."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty: torch.Tensor = torch.empty_like(tensor, device="meta", requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(model, memo)


__all__ = ["Plan", "Snapshot", "Stored", "describe", "without_data"]
