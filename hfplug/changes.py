"""What a ledger records: places that can be read, written and cleared, layers over them, and hooks.

``apply()`` of a change may be interrupted anywhere; ``undo()`` then finishes or takes back what was begun, and can be
repeated, so that Ctrl-C in the middle of one loses nothing.
"""

from __future__ import annotations

import copy
import enum
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from hfplug.errors import LedgerError

if TYPE_CHECKING:
    from torch import nn


class _Absent(enum.Enum):  # an enum member keeps its identity through deepcopy and pickle
    ABSENT = enum.auto()


ABSENT = _Absent.ABSENT


# -- places: how to read, write and clear ------------------------------------------------------------------------------


class Place(Protocol):
    """A place in an object that holds a value or nothing; equal places of one object are the same place."""

    def read(self, target: Any) -> Any: ...

    def write(self, target: Any, value: Any) -> None: ...


@dataclass(frozen=True)
class Item:
    """``target[key]``."""

    key: Hashable

    def read(self, target: Any) -> Any:
        return target.get(self.key, ABSENT)

    def write(self, target: Any, value: Any) -> None:
        if value is not ABSENT:
            target[self.key] = value
        elif self.key in target:
            del target[self.key]


@dataclass(frozen=True)
class Submodule(Item):
    """A direct child of an ``nn.Module``, written past its ``__setattr__``, which would move the child to the end."""

    def read(self, target: Any) -> Any:
        return super().read(target._modules)

    def write(self, target: Any, value: Any) -> None:
        super().write(target._modules, value)


@dataclass(frozen=True)
class Attribute:
    """``target.name``, as far as it is the target's own and not its class's."""

    name: str

    def read(self, target: Any) -> Any:
        on_type = next((vars(c)[self.name] for c in type(target).__mro__ if self.name in vars(c)), None)
        if hasattr(type(on_type), "__set__"):  # a property or a slot: the instance's own dict is not asked
            return getattr(target, self.name, ABSENT)
        # What the class provides is not the target's own. For a class this is the raw descriptor, so that a staticmethod
        # comes back as one.
        return vars(target).get(self.name, ABSENT) if hasattr(target, "__dict__") else ABSENT

    def write(self, target: Any, value: Any) -> None:
        if value is not ABSENT:
            setattr(target, self.name, value)
        elif self.read(target) is not ABSENT:
            delattr(target, self.name)


@dataclass(frozen=True)
class _FullBackwardFlag(Attribute):
    # torch sets the flag with the first backward hook and never clears it; a flagged module refuses the other kind.
    def write(self, target: Any, value: Any) -> None:
        if not target._backward_hooks:  # as long as a hook is left, the flag says which kind it is
            super().write(target, value)


# -- slots and their layers --------------------------------------------------------------------------------------------


class Slot:
    """One place of one object: the value found there first, and the layers over it."""

    def __init__(self, target: Any, place: Place) -> None:
        self.target, self.place = target, place
        self.original = place.read(target)
        self.layers: list[SlotChange] = []
        slots[id(target), place] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        """The copy of a model, together with its ledger, has slots of its own; classes and modules exist once."""
        new = memo[id(self)] = object.__new__(Slot)
        shared = isinstance(self.target, (type, ModuleType))
        new.target = self.target if shared else copy.deepcopy(self.target, memo)
        new.place, new.original, new.layers = self.place, self.original, []
        if new.target is not self.target:
            new.original, new.layers = copy.deepcopy((self.original, self.layers), memo)
            slots[id(new.target), new.place] = new
        return new


# Weak: a slot lives exactly as long as a ledger has a change on it, and an id cannot be reused while it does.
# Nothing is stored on the target itself, whose __dict__ may be what gets saved (a config) or compared.
slots: weakref.WeakValueDictionary[tuple[int, Any], Slot] = weakref.WeakValueDictionary()


def slot_of(target: Any, place: Place) -> Slot:
    """The slot of a place; one whose last layer is gone is read anew."""
    found = slots.get((id(target), place))
    return found if found is not None and found.layers else Slot(target, place)


# -- changes -----------------------------------------------------------------------------------------------------------


class SlotChange:
    """One layer of one slot."""

    def __init__(self, ledger: Any, slot: Slot, value: Any) -> None:
        self.ledger, self.slot, self.value = ledger, slot, value
        self.due: list[Any] = []  # the value an undo has yet to write

    def apply(self) -> None:
        self.slot.layers.append(self)
        self.slot.place.write(self.slot.target, self.value)

    def undo(self) -> None:
        slot = self.slot
        if self in slot.layers:
            if slot.layers[-1] is self:
                self.due = [slot.layers[-2].value if len(slot.layers) > 1 else slot.original]
            slot.layers.remove(self)
        if self.due:
            # An object that refused the write when applying would refuse this one too, and needs none.
            if slot.place.read(slot.target) is not self.due[0]:
                slot.place.write(slot.target, self.due[0])
            self.due = []


class HookChange:
    """One torch hook, with the flag torch would leave behind."""

    def __init__(self, ledger: Any, module: nn.Module, kind: str, fn: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        self.module, self.kind, self.fn, self.kwargs = module, kind, fn, kwargs
        self.handle: Any = None
        self.before: dict[str, set[int]] | None = None
        self.flag: SlotChange | None = None
        if kind in ("backward", "full_backward"):
            place = _FullBackwardFlag("_is_full_backward_hook")
            self.flag = SlotChange(ledger, slot_of(module, place), kind == "full_backward")

    def same(self, module: nn.Module, kind: str, fn: Callable[..., Any]) -> bool:
        equal = self.fn is fn or (isinstance(fn, MethodType) and self.fn == fn)
        return self.module is module and self.kind == kind and equal

    def tables(self) -> dict[str, dict[int, Any]]:
        return {name: t for name, t in vars(self.module).items() if "_hooks" in name and isinstance(t, dict)}

    def apply(self) -> None:
        self.before = {name: set(table) for name, table in self.tables().items()}
        if self.flag is not None:
            self.flag.slot.layers.append(self.flag)  # torch itself writes the value
        self.handle = getattr(self.module, f"register_{self.kind}_hook")(self.fn, **self.kwargs)

    def undo(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        elif self.before is not None:  # interrupted inside torch
            for name, table in self.tables().items():
                for key in set(table) - self.before.get(name, set()):
                    del table[key]
        if self.flag is not None:
            self.flag.undo()


class Append:
    """One entry at the end of a list."""

    def __init__(self, sequence: list[Any], value: Any) -> None:
        self.sequence, self.value = sequence, value
        self.length: int | None = None  # of the list, when the change began
        self.done = False

    def apply(self) -> None:
        self.length = len(self.sequence)
        self.sequence.append(self.value)
        self.done = True

    def undo(self) -> None:
        if not self.done and (self.length is None or len(self.sequence) == self.length):
            return
        places = [i for i, found in enumerate(self.sequence) if found is self.value]
        if places:
            del self.sequence[places[-1]]
        self.done, self.length = False, None
        if not places:
            raise LedgerError(f"{label(self.value)} is no longer in the list it was appended to")


class Call:
    """A change given as a pair of functions."""

    def __init__(self, do: Callable[[], Any], undo: Callable[[Any], None]) -> None:
        self.do, self.undo_call, self.done, self.result = do, undo, False, None

    def __deepcopy__(self, memo: dict[int, Any]) -> Call:
        return Call(self.do, self.undo_call)  # the copy of a model did not call anything

    def apply(self) -> None:
        self.result = self.do()
        self.done = True

    def undo(self) -> None:
        if self.done:
            self.undo_call(self.result)
            self.done = False


Change = SlotChange | HookChange | Append | Call


def label(target: Any) -> str:
    """The name of a class or function, the class of anything else."""
    return getattr(target, "__qualname__", None) or type(target).__name__
