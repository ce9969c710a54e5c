"""The ledger under errors and interrupts: in the body, in an apply, in an undo, and between any two steps of its own."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from torch import nn

from hfplug import Ledger, LedgerError, changes
from hfplug import ledger as ledger_module


class Thing:
    def __init__(self) -> None:
        self.own = ["own"]


def contents(thing: Thing) -> list[tuple[str, int]]:
    return [(name, id(value)) for name, value in vars(thing).items()]


class Stubborn:
    """Refuses some writes: raises ``errors[n]`` at the n-th, before or after it took effect."""

    def __init__(self, errors: dict[int, BaseException], late: bool = False) -> None:
        vars(self).update(value="original", _errors=errors, _late=late, _writes=0)

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        own["_writes"] += 1
        error = own["_errors"].get(own["_writes"])
        if error is None or own["_late"]:
            own[name] = value
        if error is not None:
            raise error

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)
        del vars(self)[name]


class StubbornDict(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        raise self["error"]


INTERRUPTS = [ValueError("boom"), KeyboardInterrupt(), SystemExit(3)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", INTERRUPTS, ids=repr)
def test_an_apply_that_raises_leaves_nothing_and_the_error_is_the_users_own(error: BaseException, late: bool) -> None:
    thing, stubborn = Thing(), Stubborn({1: error}, late)
    before = contents(thing)
    ledger = Ledger("t")
    ledger.set_attr(thing, "own", 1)
    with pytest.raises(type(error)) as raised:
        ledger.set_attr(stubborn, "value", "new")
    assert raised.value is error
    assert not getattr(error, "__notes__", [])
    assert stubborn.value == "original"
    assert thing.own == 1, "earlier changes of the ledger stand"
    ledger.undo()
    assert contents(thing) == before


@pytest.mark.parametrize("error", INTERRUPTS, ids=repr)
def test_a_dict_that_raises_leaves_nothing(error: BaseException) -> None:
    mapping = StubbornDict(error=error)
    with pytest.raises(type(error)) as raised, Ledger("t") as ledger:
        ledger.set_item(mapping, "k", 1)
    assert raised.value is error
    assert dict(mapping) == {"error": error}


@pytest.mark.parametrize("error", [ValueError("body"), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_an_error_in_the_body_is_seen_itself_with_failed_undos_as_notes_and_the_rest_undone(error: BaseException) -> None:
    first, last, stubborn = Thing(), Thing(), Stubborn({2: RuntimeError("stays")})
    before = contents(first), contents(last)
    with pytest.raises(type(error)) as raised, Ledger("plugin x") as ledger:  # noqa: PT012
        ledger.set_attr(first, "own", 1)
        ledger.set_attr(stubborn, "value", "new")
        ledger.set_attr(last, "own", 1)
        raise error
    assert raised.value is error
    assert raised.value.__notes__ == ["hfplug: while undoing plugin x: RuntimeError: stays"]
    assert (contents(first), contents(last)) == before
    del error.__notes__


def test_a_failed_undo_without_an_error_in_the_body_is_reported_after_the_others_ran() -> None:
    first, last = Thing(), Thing()
    one, two = Stubborn({2: RuntimeError("one")}), Stubborn({2: TypeError("two")})
    before = contents(first), contents(last)
    ledger = Ledger("t")
    for target, name in ((first, "own"), (one, "value"), (two, "value"), (last, "own")):
        ledger.set_attr(target, name, 1)
    with pytest.raises(LedgerError, match="2 changes could not be undone: TypeError: two; RuntimeError: one") as raised:
        ledger.undo()
    assert isinstance(raised.value.__cause__, ExceptionGroup)
    assert (contents(first), contents(last)) == before
    ledger.undo()  # nothing is left to undo


def test_an_interrupt_in_an_undo_is_raised_itself_after_that_undo_and_all_others_ran() -> None:
    first, interrupt = Thing(), KeyboardInterrupt()
    once, bad = Stubborn({2: interrupt}), Stubborn({2: ValueError("bad")})
    before = contents(first)
    ledger = Ledger("t")
    for target, name in ((first, "own"), (bad, "value"), (once, "value")):
        ledger.set_attr(target, name, 1)
    with pytest.raises(KeyboardInterrupt) as raised:
        ledger.undo()
    assert raised.value is interrupt
    assert interrupt.__notes__ == ["hfplug: while undoing t: ValueError: bad"]
    assert once.value == "original", "the undo that was interrupted was finished"
    assert contents(first) == before


def test_an_undo_that_interrupts_for_ever_is_given_up() -> None:
    first, stubborn = Thing(), Stubborn(dict.fromkeys(range(2, 50), KeyboardInterrupt()))
    before = contents(first)
    ledger = Ledger("t")
    ledger.set_attr(first, "own", 1)
    ledger.set_attr(stubborn, "value", 1)
    with pytest.raises(KeyboardInterrupt):
        ledger.undo()
    assert contents(first) == before
    assert len(ledger) == 0


def test_a_transaction_undoes_its_own_part_only() -> None:
    thing, error = Thing(), ValueError("inner")
    ledger = Ledger("t")
    ledger.set_attr(thing, "own", 1)
    with pytest.raises(ValueError, match="inner") as raised, ledger.transaction():  # noqa: PT012
        ledger.set_attr(thing, "new", 2)
        with ledger.transaction():
            ledger.set_attr(thing, "newer", 3)
        raise error
    assert raised.value is error
    assert (thing.own, hasattr(thing, "new"), hasattr(thing, "newer")) == (1, False, False)
    ledger.undo()
    assert thing.own == ["own"]


def test_a_list_entry_that_someone_removed_is_reported() -> None:
    items, ledger = [1], Ledger("t")
    ledger.append(items, "x")
    items.remove("x")
    with pytest.raises(LedgerError, match="no longer in the list"):
        ledger.undo()
    assert items == [1]


def test_run_pairs_a_call_with_its_undo_and_a_failed_call_is_not_undone() -> None:
    seen: list[Any] = []
    with Ledger("t") as ledger:
        assert ledger.run(lambda: 7, seen.append) == 7
        with pytest.raises(ZeroDivisionError):
            ledger.run(lambda: 1 / 0, seen.append)
        assert seen == []
    assert seen == [7]


# -- Ctrl-C between any two steps --------------------------------------------------------------------------------------

# The places where CPython looks for a pending signal: after a call, at a function's start, at the end of a loop.
SIGNAL_POINTS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}
FILES = {changes.__file__, ledger_module.__file__, nn.modules.module.__file__}


class CtrlC:
    """Raises KeyboardInterrupt at the ``n``-th point where a signal can arrive in the ledger or in torch's hook code."""

    def __init__(self, n: int, starts: Callable[[FrameType], bool]) -> None:
        self.left, self.starts, self.last, self.armed = n, starts, {}, False  # type: ignore[var-annotated]
        self.raised: KeyboardInterrupt | None = None

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in FILES or self.raised:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.armed = self.armed or self.starts(frame)
            former, self.last[frame] = self.last.get(frame), opcode(frame)
            if self.armed and former in SIGNAL_POINTS:
                self.left -= 1
                if self.left < 0:
                    self.raised = KeyboardInterrupt()
                    raise self.raised
        return self.trace

    def __enter__(self) -> CtrlC:
        self.former = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *args: object) -> None:
        sys.settrace(self.former)
        self.last.clear()


def opcode(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


class World:
    def __init__(self) -> None:
        self.thing, self.items, self.mapping, self.model = Thing(), [1], {"a": 1}, nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def contents(self) -> list[Any]:
        tables = [
            (name, list(table) if isinstance(table, dict) else id(table))
            for module in self.model.modules()
            for name, table in vars(module).items()
        ]
        return [contents(self.thing), list(self.items), list(self.mapping.items()), tables]

    def patch(self, ledger: Ledger) -> None:
        ledger.set_attr(self.thing, "own", 1)
        ledger.append(self.items, 2)
        with ledger.transaction():
            ledger.set_item(self.mapping, "b", 2)
        ledger.hook(self.model[0], "forward", lambda *a, **k: None, with_kwargs=True, prepend=True)
        ledger.hook(self.model[0], "full_backward", lambda *a: None)
        ledger.swap_module(self.model, "1", nn.Identity())
        ledger.add_module(self.model, "more", nn.Identity())


def assert_unlocked() -> None:
    got: list[bool] = []

    def try_it() -> None:
        lock = ledger_module._LOCK
        got.append(lock.acquire(timeout=5))
        if got[0]:
            lock.release()

    other = threading.Thread(target=try_it)
    other.start()
    other.join()
    assert got == [True], "the ledger's lock is still held"


def test_ctrl_c_at_any_point_of_applying_leaves_nothing() -> None:
    point = -1
    while True:
        point += 1
        world = World()
        before = world.contents()
        interrupt = CtrlC(point, lambda frame: True)
        ledger = Ledger("t")
        try:
            with ledger, interrupt:
                world.patch(ledger)
                assert world.contents() != before
        except KeyboardInterrupt as error:
            assert error is interrupt.raised  # noqa: PT017
        assert world.contents() == before, f"interrupted at point {point}"
        if interrupt.raised is None:
            break
    assert point > 100, "the injection did not reach the ledger"
    assert_unlocked()


def test_ctrl_c_at_any_point_of_undoing_is_raised_and_leaves_nothing() -> None:
    point = -1
    while True:
        point += 1
        world = World()
        before = world.contents()
        ledger = Ledger("t")
        world.patch(ledger)
        # From the first undo on: an interrupt that arrives before the ledger took over has interrupted nothing.
        interrupt = CtrlC(point, lambda frame: frame.f_code.co_filename == changes.__file__)
        try:
            with interrupt:
                ledger.undo()
        except KeyboardInterrupt as error:
            assert error is interrupt.raised  # noqa: PT017
        else:
            assert interrupt.raised is None, f"an interrupt at point {point} was swallowed"
        assert world.contents() == before, f"interrupted at point {point}"
        if interrupt.raised is None:
            break
    assert point > 50, "the injection did not reach the ledger"
    assert_unlocked()
