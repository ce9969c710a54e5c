"""Every change made to a process or a model, with exact and exception-safe undo.

Several ledgers may change the same slot (an attribute, a dict item, a submodule) and be undone in any order: each slot
keeps the stack of values laid over the original one, so undoing a lower layer leaves the visible value alone and undoing
the last one restores the original object, by identity, or its absence. A value that someone writes past the ledger while
a layer is on is not kept: undo means "as it was before".
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hfplug.changes import Append, Attribute, Call, Change, HookChange, Item, Place, SlotChange, Submodule, label, slot_of, slots
from hfplug.errors import LedgerError, nearest, one_line

if TYPE_CHECKING:
    from torch import nn

_LOCK = threading.RLock()


class Ledger:
    """Records changes made for ``owner`` and undoes them in reverse.

    Use it as a context manager (undone on exit, whatever happened), or keep it and call :meth:`undo`. An undo that fails
    does not stop the ones before it. If the body raised, the user sees that exception, with the failed undos as notes;
    otherwise :meth:`undo` raises :class:`~hfplug.errors.LedgerError` from an ``ExceptionGroup`` of them.

    Args:
        owner: name of the plugin, for messages.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._entries: list[Change] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Ledger({self.owner!r}, {len(self)} changes)"

    # -- operations -------------------------------------------------------------------------------------------------

    def set_attr(self, target: Any, name: str, value: Any) -> None:
        """Set ``target.name``; on undo the former value returns, or the attribute goes. A property is restored by its setter.

        Raises:
            LedgerError: this ledger already set it, or it is a submodule, parameter or buffer of an ``nn.Module``
                (use :meth:`swap_module` or :meth:`add_module`, or :meth:`set_item` on ``_parameters`` or ``_buffers``).
        """
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(target, torch.nn.Module):
            tables = [t for t in ("_modules", "_parameters", "_buffers") if name in getattr(target, t)]
            if tables or isinstance(value, (torch.nn.Module, torch.nn.Parameter, torch.nn.Buffer)):
                raise LedgerError(
                    f"{self.owner}: set_attr({label(target)}, {name!r}) concerns a submodule, parameter or buffer; use "
                    f"swap_module or add_module, or set_item on {tables[0] if tables else '_parameters'}"
                )
        # PreTrainedConfig redirects some names (hidden_size -> n_embd): the slot is the name that is really stored.
        name = getattr(type(target), "attribute_map", {}).get(name, name)
        self._lay(target, Attribute(name), value, f"attribute {name!r} of {label(target)}")

    def set_item(self, mapping: MutableMapping[Any, Any], key: Hashable, value: Any) -> None:
        """Set ``mapping[key]``; on undo the former value returns, or the key goes."""
        self._lay(mapping, Item(key), value, f"item {key!r}")

    def register(
        self, registry: MutableMapping[Any, Any], key: Hashable, value: Any, *, what: str, override: bool = False
    ) -> None:
        """Add ``key`` to a registry of Hugging Face; refused when it is taken, unless ``override``.

        Args:
            what: the thing registered, for the message, e.g. ``"attention implementation"``.

        Raises:
            LedgerError: the key is taken.
        """
        if key in registry and not override:
            slot = slots.get((id(registry), Item(key)))
            holder = f" by {slot.layers[-1].ledger.owner}" if slot and slot.layers else ""
            raise LedgerError(
                f"{self.owner}: {what} {key!r} is already registered{holder} ({label(registry[key])}); "
                "pass override=True to replace it"
            )
        self._lay(registry, Item(key), value, f"{what} {key!r}")

    def append(self, sequence: list[Any], value: Any) -> None:
        """Append to a process-wide list; undo removes that very object."""
        if any(isinstance(e, Append) and e.sequence is sequence and e.value is value for e in self._entries):
            raise LedgerError(f"{self.owner} already appended {label(value)}")
        self._run(Append(sequence, value))

    def run(self, do: Callable[[], Any], undo: Callable[[Any], None]) -> Any:
        """Make a change of another sort: call ``do()``, return its result, and call ``undo(result)`` on undo.

        A ``do`` that raises must leave nothing behind.
        """
        entry = Call(do, undo)
        self._run(entry)
        return entry.result

    def swap_module(self, root: nn.Module, path: str, new: nn.Module) -> nn.Module:
        """Replace the submodule at dotted ``path``, keeping its place in the order; return the former one.

        Raises:
            LedgerError: no such path (naming the nearest), ``new`` is no module, or this ledger already swapped it.
        """
        head, _, name = path.rpartition(".")
        try:
            parent = root.get_submodule(head)
            former = parent.get_submodule(name) if name else None
        except AttributeError:
            former = None
        if former is None:
            known = [n for n, _ in root.named_modules() if n]
            raise LedgerError(f"{self.owner}: {label(root)} has no submodule {path!r}{nearest(path, known)}")
        self._lay(parent, Submodule(name), _module(new), f"submodule {path!r} of {label(root)}")
        return former

    def add_module(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Add a submodule; refused when the name is in use in any form."""
        if not name or "." in name or hasattr(parent, name):
            raise LedgerError(f"{self.owner}: {label(parent)} already has {name!r}, or the name is empty or holds a dot")
        self._lay(parent, Submodule(name), _module(module), f"submodule {name!r} of {label(parent)}")

    def hook(self, module: nn.Module, kind: str, fn: Callable[..., Any], **kwargs: Any) -> Any:
        """Register a hook (``kind``: the part of ``nn.Module.register_<kind>_hook``) and return its handle.

        Raises:
            LedgerError: torch has no such kind of hook (naming the nearest), or this ledger already registered it.
        """
        kinds = [n[9:-5] for n in dir(module) if n.startswith("register_") and n.endswith("_hook")]
        if kind not in kinds:
            raise LedgerError(f"{self.owner}: no hook of kind {kind!r}{nearest(kind, kinds)}; kinds: {kinds}")
        if any(isinstance(e, HookChange) and e.same(module, kind, fn) for e in self._entries):
            raise LedgerError(f"{self.owner} already hooked {label(fn)} to {kind} of this {label(module)}")
        entry = HookChange(self, module, kind, fn, kwargs)
        self._run(entry)
        return entry.handle

    # -- undo -------------------------------------------------------------------------------------------------------

    def undo(self) -> None:
        """Undo everything, newest first. Safe to call again.

        Raises:
            LedgerError: some undos failed; all others ran. ``__cause__`` is the ``ExceptionGroup`` of the failures.
            KeyboardInterrupt: it arrived meanwhile; all undos ran, failed ones are in its notes.
        """
        failures = self._unwind(0)
        interrupt = next((f for f in failures if not isinstance(f, Exception)), None)
        if interrupt is not None:
            self._note(interrupt, [f for f in failures if f is not interrupt])
            raise interrupt
        if failures:
            raise LedgerError(
                f"{self.owner}: {len(failures)} changes could not be undone: " + "; ".join(map(one_line, failures))
            ) from BaseExceptionGroup("failed undos", failures)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Self]:
        """All or nothing: if the body raises, what it changed is undone and the exception goes on; else it stays."""
        mark = len(self._entries)
        try:
            yield self
        except BaseException as error:
            self._note(error, self._unwind(mark))
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.undo()
        else:
            self._note(error, self._unwind(0))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _note(self, error: BaseException, failures: list[BaseException]) -> None:
        for failure in failures:
            error.add_note(f"hfplug: while undoing {self.owner}: {one_line(failure)}")

    def _unwind(self, mark: int) -> list[BaseException]:
        failures: list[BaseException] = []
        tried: Change | None = None
        while True:
            try:
                with _LOCK:
                    while len(self._entries) > mark:
                        try:
                            self._entries[-1].undo()
                        except Exception as failure:
                            failures.append(failure)
                        self._entries.pop()
                return failures
            except BaseException as interrupt:
                # Not an Exception, those are caught above: Ctrl-C must not leave the rest half undone. It is reported, and
                # the undo it hit is tried once more (undos can be repeated).
                failures.append(interrupt)
                last = self._entries[-1] if len(self._entries) > mark else None
                if last is not None and last is tried:
                    self._entries.pop()
                tried = last

    def _run(self, entry: Change) -> None:
        with _LOCK:
            mark = len(self._entries)
            self._entries.append(entry)  # before applying: an interrupt in between is then still undone
            try:
                entry.apply()
            except BaseException as error:
                self._note(error, self._unwind(mark))
                raise

    def _lay(self, target: Any, place: Place, value: Any, what: str) -> None:
        with _LOCK:
            slot = slot_of(target, place)
            if any(layer.ledger is self for layer in slot.layers):
                raise LedgerError(f"{self.owner} already changed {what}; undo it before changing it again")
            self._run(SlotChange(self, slot, value))


def _module(value: Any) -> Any:
    import torch

    if not isinstance(value, torch.nn.Module):
        raise LedgerError(f"expected an nn.Module, got {value!r} ({type(value).__name__})")
    return value
