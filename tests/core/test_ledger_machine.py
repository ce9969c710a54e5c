"""The ledger against the simplest model of it: a stack of values per slot, ledgers applied and undone in any order."""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

from hfplug import Ledger, LedgerError

ABSENT = object()
HOOKS = ("forward", "forward_pre", "full_backward", "full_backward_pre", "state_dict_post", "load_state_dict_post")


class Thing:
    shared = "of the class"
    __slots__ = ("__dict__", "slot")

    def __init__(self) -> None:
        self.own = ["own"]
        self._held = ["held"]

    @property
    def held(self) -> Any:
        return self._held

    @held.setter
    def held(self, value: Any) -> None:
        self._held = value


class Refusing(Thing):
    """Raises on the writes it is told to, before or after they took effect."""

    def __setattr__(self, name: str, value: Any) -> None:
        error, late = vars(self).get("_error"), vars(self).get("_late")
        if error is not None and not late:
            raise error
        super().__setattr__(name, value)
        if error is not None:
            vars(self)["_error"] = None  # raised once: the undo that follows may write
            raise error


def make_class() -> type:
    class Patched:
        @staticmethod
        def static() -> None: ...

        @classmethod
        def of_class(cls) -> None: ...

        @property
        def computed(self) -> None: ...

    return Patched


@dataclass(frozen=True)
class Slot:
    """One place of the world: how to patch it through a ledger, and how to look at it."""

    kind: str  # attr | item | child
    target: str
    name: str

    def patch(self, ledger: Ledger, world: dict[str, Any], value: Any) -> None:
        target = world[self.target]
        if self.kind == "attr":
            ledger.set_attr(target, self.name, value)
        elif self.kind == "item":
            ledger.set_item(target, self.name, value)
        elif target._modules.get(self.name) is not None:
            ledger.swap_module(target, self.name, value)
        else:
            ledger.add_module(target, self.name, value)

    def look(self, world: dict[str, Any]) -> Any:
        target = world[self.target]
        if self.kind == "attr" and self.name in ("held", "slot"):
            return getattr(target, self.name, ABSENT)
        return {"attr": vars, "item": lambda t: t, "child": lambda t: t._modules}[self.kind](target).get(self.name, ABSENT)


SLOTS = [
    *(Slot("attr", thing, name) for thing in ("thing", "refusing") for name in ("own", "shared", "absent", "held", "slot")),
    *(Slot("attr", "class", name) for name in ("static", "of_class", "computed", "absent")),
    *(Slot("attr", "module", name) for name in ("f", "absent")),
    *(Slot("item", "dict", key) for key in ("a", "b", "absent", "gone")),
    *(Slot("child", net, name) for net in ("net", "inner") for name in ("0", "1", "added")),
    Slot("attr", "net", "forward"),
    Slot("attr", "net", "training"),
]
LISTS = ("list", "other list")
MODULES = ("net", "inner", "leaf")


def make_world() -> dict[str, Any]:
    module = types.ModuleType("m")
    module.f = object()  # type: ignore[attr-defined]
    inner = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    net = nn.Sequential(nn.Linear(1, 1), inner)
    return {
        "thing": Thing(),
        "refusing": Refusing(),
        "class": make_class(),
        "module": module,
        "dict": {"a": [1], "b": None, "gone": ABSENT},
        "net": net,
        "inner": inner,
        "leaf": inner[0],
        "list": ["x"],
        "other list": [],
    }


def contents(value: Any, depth: int = 2) -> Any:
    """Everything held, by identity and in order; the tables of a module are opened."""
    if isinstance(value, list):
        return [id(v) for v in value]
    held = value if isinstance(value, dict) else vars(value)
    tables = [] if isinstance(value, type) or not depth else [(k, v) for k, v in held.items() if isinstance(v, dict)]
    opened = [(k, contents(v, depth - 1)) for k, v in tables]
    extra = [id(getattr(value, "slot", ABSENT)), id(value.held)] if isinstance(value, Thing) else []
    return [(k, id(v)) for k, v in held.items() if not k.startswith("_error")], opened, extra


@dataclass(eq=False)
class Book:
    """What one ledger did, in the model's terms."""

    ledger: Ledger
    slots: list[Slot] = field(default_factory=list)
    hooks: list[tuple[str, str, Any]] = field(default_factory=list)
    appended: list[tuple[str, Any]] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    """Rules act on the real ledgers and on the model; the invariant compares what is visible."""

    @initialize()
    def start(self) -> None:
        self.world = make_world()
        self.before = {name: contents(value) for name, value in self.world.items()}
        self.originals = {slot: slot.look(self.world) for slot in SLOTS}
        self.stacks: dict[Slot, list[tuple[Book, Any]]] = {slot: [] for slot in SLOTS}
        self.lists: dict[str, list[Any]] = {name: list(self.world[name]) for name in LISTS}
        self.hooks: dict[tuple[str, str], list[Any]] = {(m, k): [] for m in MODULES for k in HOOKS}
        self.books = [Book(Ledger(f"ledger {i}")) for i in range(4)]

    # -- rules -------------------------------------------------------------------------------------------------------

    def apply(self, book: Book, slot: Slot) -> None:
        value: Any = nn.Identity() if slot.kind == "child" else object()
        stack = self.stacks[slot]
        if any(owner is book for owner, _ in stack):
            with pytest.raises(LedgerError):
                slot.patch(book.ledger, self.world, value)
            return
        slot.patch(book.ledger, self.world, value)
        stack.append((book, value))
        book.slots.append(slot)

    def undone(self, book: Book, slots: int = 0, hooks: int = 0, appended: int = 0) -> None:
        for slot in book.slots[slots:]:
            self.stacks[slot] = [(owner, value) for owner, value in self.stacks[slot] if owner is not book]
        for module, kind, fn in book.hooks[hooks:]:
            self.hooks[module, kind].remove(fn)
        for name, value in book.appended[appended:]:
            self.lists[name].remove(value)
        del book.slots[slots:], book.hooks[hooks:], book.appended[appended:]

    @rule(index=st.integers(0, 3), slot=st.sampled_from(SLOTS))
    def patch_slot(self, index: int, slot: Slot) -> None:
        self.apply(self.books[index], slot)

    @rule(index=st.integers(0, 3), module=st.sampled_from(MODULES), kind=st.sampled_from(HOOKS), prepend=st.booleans())
    def hook(self, index: int, module: str, kind: str, prepend: bool) -> None:
        self.add_hook(self.books[index], module, kind, prepend)

    def add_hook(self, book: Book, module: str, kind: str, prepend: bool = False) -> None:
        def fn(*args: Any, **kwargs: Any) -> None: ...

        options = {"prepend": True} if prepend and kind.startswith(("forward", "full")) else {}
        book.ledger.hook(self.world[module], kind, fn, **options)
        self.hooks[module, kind].insert(0 if options else len(self.hooks[module, kind]), fn)
        book.hooks.append((module, kind, fn))

    @rule(index=st.integers(0, 3), name=st.sampled_from(LISTS))
    def append(self, index: int, name: str) -> None:
        book, value = self.books[index], object()
        book.ledger.append(self.world[name], value)
        self.lists[name].append(value)
        book.appended.append((name, value))

    @rule(index=st.integers(0, 3))
    def undo(self, index: int) -> None:
        self.books[index].ledger.undo()
        self.undone(self.books[index])

    @rule(
        index=st.integers(0, 3),
        slots=st.lists(st.sampled_from(SLOTS), max_size=6),
        error=st.sampled_from([ValueError, KeyboardInterrupt, GeneratorExit, None]),
        nested=st.booleans(),
    )
    def transaction(self, index: int, slots: list[Slot], error: type[BaseException] | None, nested: bool) -> None:
        book = self.books[index]
        marks = len(book.slots), len(book.hooks), len(book.appended)
        wanted = error() if error else None
        seen: BaseException | None = None
        try:
            with book.ledger.transaction():
                for slot in slots[:3]:
                    self.apply(book, slot)
                self.add_hook(book, "leaf", "full_backward")
                with book.ledger.transaction() if nested else contextlib.nullcontext():
                    for slot in slots[3:]:
                        self.apply(book, slot)
                    if wanted:
                        raise wanted
        except BaseException as raised:
            seen = raised
        assert seen is wanted
        if seen:
            assert not getattr(seen, "__notes__", [])
            self.undone(book, *marks)

    @rule(
        index=st.integers(0, 3),
        name=st.sampled_from(["own", "shared", "absent", "held", "slot"]),
        error=st.sampled_from([ValueError, KeyboardInterrupt]),
        late=st.booleans(),
    )
    def apply_that_raises(self, index: int, name: str, error: type[BaseException], late: bool) -> None:
        book, slot = self.books[index], Slot("attr", "refusing", name)
        if any(owner is book for owner, _ in self.stacks[slot]):
            return
        wanted = error()
        vars(self.world["refusing"]).update(_error=wanted, _late=late)
        try:
            with pytest.raises(error) as raised:
                slot.patch(book.ledger, self.world, object())
        finally:
            for key in ("_error", "_late"):
                vars(self.world["refusing"]).pop(key, None)
        assert raised.value is wanted
        assert not getattr(wanted, "__notes__", [])

    # -- comparison --------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_visible_is_the_top_of_each_stack(self) -> None:
        for slot, stack in self.stacks.items():
            assert slot.look(self.world) is (stack[-1][1] if stack else self.originals[slot]), slot
        for name, expected in self.lists.items():
            assert [id(v) for v in self.world[name]] == [id(v) for v in expected]
        for (module, kind), expected in self.hooks.items():
            assert self.hooks_of(module, kind) == expected, (module, kind)

    def hooks_of(self, module: str, kind: str) -> list[Any]:
        table = {"state_dict_post": "_state_dict_hooks", "load_state_dict_post": "_load_state_dict_post_hooks"}.get(kind)
        return list(vars(self.world[module])[table or f"_{kind.removeprefix('full_')}_hooks"].values())

    def teardown(self) -> None:
        if not hasattr(self, "books"):
            return
        for book in self.books:
            book.ledger.undo()
        for name, value in self.world.items():
            assert contents(value) == self.before[name], name


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)
TestLedgerAgainstStacks = Machine.TestCase
