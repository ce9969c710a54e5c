"""Every change made to a process or a model, with exact and exception-safe undo.

Several ledgers may change the same slot (an attribute, a dict item, a submodule) and be undone in any order: each slot
keeps the stack of values laid over the original one, so undoing a lower layer leaves the visible value alone and undoing
the last one restores the original object, by identity, or its absence.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from hfplug.errors import LedgerError, nearest, one_line

if TYPE_CHECKING:
    from torch import nn

_LOCK = threading.RLock()
_SLOTS = "_hfplug_slots"


class _Absent(enum.Enum):  # an enum member keeps its identity through deepcopy and pickle
    ABSENT = enum.auto()


ABSENT = _Absent.ABSENT


class _Layer:
    """One value laid over a slot by one ledger."""

    def __init__(self, owner: str, value: Any) -> None:
        self.owner, self.value = owner, value


class _Slot:
    """A place that can hold a value: reading, writing and clearing it, plus the layers over its original value."""

    def __init__(self, target: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> None:
        self.target, self.read, self.write = target, read, write
        self.original = read(target)
        self.layers: list[_Layer] = []


class _ItemAccess:
    def __init__(self, key: Any) -> None:
        self.key = key

    def read(self, target: Any) -> Any:
        return target[self.key] if self.key in target else ABSENT

    def write(self, target: Any, value: Any) -> None:
        if value is not ABSENT:
            target[self.key] = value
        elif self.key in target:
            del target[self.key]


class _AttributeAccess:
    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, target: Any) -> Any:
        own = vars(target) if hasattr(target, "__dict__") else {}
        if self.name in own:  # for a class this is the raw descriptor, so a staticmethod comes back as one
            return own[self.name]
        on_type = getattr(type(target), self.name, None)
        if hasattr(type(on_type), "__set__") or not hasattr(target, "__dict__"):
            return getattr(target, self.name, ABSENT)
        return ABSENT

    def write(self, target: Any, value: Any) -> None:
        if value is not ABSENT:
            setattr(target, self.name, value)
        elif not hasattr(target, "__dict__") or self.name in vars(target):
            delattr(target, self.name)


class _ModuleAccess(_ItemAccess):
    # Written past nn.Module.__setattr__, which would move the child to the end of the order of modules.
    def read(self, target: Any) -> Any:
        return super().read(target._modules)

    def write(self, target: Any, value: Any) -> None:
        super().write(target._modules, value)


# Process-wide things (dicts, classes, modules) live as long as the process; everything else keeps its slots in its own
# __dict__, so that an unfinished ledger never keeps a model alive and a deepcopy of a patched model owns its own slots.
_process_slots: dict[tuple[int, Hashable], _Slot] = {}


def _home(target: Any) -> tuple[MutableMapping[Any, _Slot], int]:
    if isinstance(target, (MutableMapping, type, ModuleType)) or not hasattr(target, "__dict__"):
        return _process_slots, id(target)  # type: ignore[return-value]
    return vars(target).setdefault(_SLOTS, {}), 0


class _SlotChange:
    """A ledger entry: one layer of one slot."""

    def __init__(self, target: Any, address: Hashable, access: Any, owner: str, value: Any) -> None:
        self.target, self.address, self.access = target, address, access
        self.layer = _Layer(owner, value)

    def apply(self) -> None:
        home, ident = _home(self.target)
        key = (ident, self.address)
        slot = home.get(key)
        if slot is None:
            slot = home[key] = _Slot(self.target, self.access.read, self.access.write)
        slot.layers.append(self.layer)
        slot.write(self.target, self.layer.value)

    def undo(self) -> None:
        home, ident = _home(self.target)
        key = (ident, self.address)
        slot = home.get(key)
        try:
            if slot is None or self.layer not in slot.layers:
                return  # never got as far as being applied
            was_top = slot.layers[-1] is self.layer
            slot.layers.remove(self.layer)
            if was_top:
                slot.write(self.target, slot.layers[-1].value if slot.layers else slot.original)
        finally:
            if slot is not None and not slot.layers:
                del home[key]
            if not home and home is not _process_slots:
                vars(self.target).pop(_SLOTS, None)


class _Call:
    """A ledger entry whose undo is a call, for changes that are not one slot (hooks, list entries)."""

    def __init__(self, do: Callable[[], Any], undo: Callable[[Any], None]) -> None:
        self.do, self.undo_call, self.done, self.result = do, undo, False, None

    def apply(self) -> None:
        self.result = self.do()
        self.done = True

    def undo(self) -> None:
        if self.done:
            self.undo_call(self.result)


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
        self._entries: list[_SlotChange | _Call] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Ledger({self.owner!r}, {len(self)} changes)"

    # -- operations -------------------------------------------------------------------------------------------------

    def set_attr(self, target: Any, name: str, value: Any) -> None:
        """Set ``target.name``; on undo the former value returns, or the attribute goes.

        Raises:
            LedgerError: this ledger already set it, or the value is a module or parameter of an ``nn.Module``
                (use :meth:`swap_module` or :meth:`add_module`).
        """
        if hasattr(target, "_modules") and (name in target._modules or name in target._parameters or hasattr(value, "_modules")):
            raise LedgerError(f"{self.owner}: set_attr(…, {name!r}) concerns a submodule or parameter; use swap_module or add_module")
        # PreTrainedConfig redirects some names (hidden_size -> n_embd): the slot is the name that is really stored.
        name = getattr(target, "attribute_map", {}).get(name, name)
        self._slot(target, ("attr", name), _AttributeAccess(name), value, f"attribute {name!r} of {_label(target)}")

    def set_item(self, mapping: MutableMapping[Any, Any], key: Hashable, value: Any) -> None:
        """Set ``mapping[key]``; on undo the former value returns, or the key goes."""
        self._slot(mapping, ("item", key), _ItemAccess(key), value, f"item {key!r}")

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
            slot = _process_slots.get((id(registry), ("item", key)))
            holder = f" by {slot.layers[-1].owner}" if slot and slot.layers else ""
            raise LedgerError(
                f"{self.owner}: {what} {key!r} is already registered{holder} ({_label(registry[key])}); pass override=True to replace it"
            )
        self._slot(registry, ("item", key), _ItemAccess(key), value, f"{what} {key!r}")

    def append(self, sequence: list[Any], value: Any) -> None:
        """Append to a process-wide list; undo removes that very object."""

        def remove(_: Any) -> None:
            for index in reversed(range(len(sequence))):
                if sequence[index] is value:
                    del sequence[index]
                    return
            raise LedgerError(f"{self.owner}: {_label(value)} is no longer in the list it was appended to")

        self.run(lambda: sequence.append(value), remove)

    def run(self, do: Callable[[], Any], undo: Callable[[Any], None]) -> Any:
        """Make a change that is not one slot: call ``do()``, return its result, and call ``undo(result)`` on undo."""
        entry = _Call(do, undo)
        self._run(entry)
        return entry.result

    def swap_module(self, root: nn.Module, path: str, new: nn.Module) -> nn.Module:
        """Replace the submodule at dotted ``path``, keeping its place in the order; return the former one.

        Raises:
            LedgerError: no such path (naming the nearest), or this ledger already swapped it.
        """
        parent, name = self._parent(root, path)
        if parent._modules.get(name) is None:
            known = [n for n, _ in root.named_modules() if n]
            raise LedgerError(f"{self.owner}: {_label(root)} has no submodule {path!r}{nearest(path, known)}")
        former = parent._modules[name]
        self._slot(parent, ("module", name), _ModuleAccess(name), new, f"submodule {path!r} of {_label(root)}")
        return former  # type: ignore[return-value]

    def add_module(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Add a submodule; refused when the name is in use in any form."""
        if "." in name or hasattr(parent, name):
            raise LedgerError(f"{self.owner}: {_label(parent)} already has {name!r}, or the name holds a dot")
        self._slot(parent, ("module", name), _ModuleAccess(name), module, f"submodule {name!r} of {_label(parent)}")

    def hook(self, module: nn.Module, kind: str, fn: Callable[..., Any], **kwargs: Any) -> Any:
        """Register a hook (``kind``: the part of ``nn.Module.register_<kind>_hook``) and return its handle.

        Raises:
            LedgerError: torch has no such kind of hook (naming the nearest).
        """
        register = getattr(module, f"register_{kind}_hook", None)
        if register is None:
            kinds = [n[9:-5] for n in dir(module) if n.startswith("register_") and n.endswith("_hook")]
            raise LedgerError(f"{self.owner}: no hook of kind {kind!r}{nearest(kind, kinds)}; kinds: {kinds}")
        flag = vars(module).get("_is_full_backward_hook", ABSENT)

        def remove(handle: Any) -> None:
            handle.remove()
            # torch leaves this flag set for good, and a flagged module refuses the other kind of backward hook.
            if flag is not ABSENT and not module._backward_hooks:
                module._is_full_backward_hook = flag

        return self.run(lambda: register(fn, **kwargs), remove)

    # -- undo -------------------------------------------------------------------------------------------------------

    def undo(self) -> None:
        """Undo everything, newest first. Safe to call again.

        Raises:
            LedgerError: some undos failed; all others ran. ``__cause__`` is the ``ExceptionGroup`` of the failures.
        """
        failures = self._unwind(0)
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
        with _LOCK:
            while len(self._entries) > mark:
                entry = self._entries[-1]
                try:
                    entry.undo()
                except BaseException as failure:  # an interrupt must not leave the rest half undone; it is reported
                    failures.append(failure)
                self._entries.pop()
        return failures

    def _run(self, entry: _SlotChange | _Call) -> None:
        with _LOCK:
            self._entries.append(entry)  # before applying: an interrupt in between is then still undone
            try:
                entry.apply()
            except BaseException as error:
                self._entries.remove(entry)
                try:
                    entry.undo()
                except Exception as failure:
                    self._note(error, [failure])
                raise

    def _slot(self, target: Any, address: Hashable, access: Any, value: Any, what: str) -> None:
        for entry in self._entries:
            if isinstance(entry, _SlotChange) and entry.target is target and entry.address == address:
                raise LedgerError(f"{self.owner} already changed {what}; undo it before changing it again")
        self._run(_SlotChange(target, address, access, self.owner, value))

    def _parent(self, root: nn.Module, path: str) -> tuple[nn.Module, str]:
        head, _, name = path.rpartition(".")
        try:
            return root.get_submodule(head), name
        except AttributeError as error:
            known = [n for n, _ in root.named_modules() if n]
            raise LedgerError(f"{self.owner}: {_label(root)} has no submodule {path!r}{nearest(path, known)}") from error


def _label(target: Any) -> str:
    return getattr(target, "__qualname__", None) or type(target).__name__
