"""``from hfplug.tuners import ULoraConfig`` for every installed plugin, without a hand-kept export list."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hfplug import activation
from hfplug.errors import nearest
from hfplug.method import Kind, Method
from hfplug.plugins import Entry, catalogue, load_dotted


def _loaded(entry: Entry | None, dotted: str) -> Any:
    if entry is not None:
        entry.check()
    value = load_dotted(dotted)
    activation.finish()  # it may have been the first to import peft
    return value


def lazy_namespace(
    kind: Kind, module: str, more: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``(__getattr__, __dir__)`` for the module that is the home of one kind, fed by the catalogue.

    Args:
        kind: the kind.
        module: the module's name.
        more: further names to offer there -> the module each is in, which imports torch and must not be imported with this one.
    """
    own = more or {}

    def names() -> dict[str, tuple[Entry, str]]:
        return {name: (e, dotted) for e in catalogue().at_home(kind) for name, dotted in e.method.public_names.items()}

    def __getattr__(name: str) -> Any:
        # Import machinery probes dunders and submodules before the catalogue can be read.
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name in own:
            return getattr(importlib.import_module(own[name]), name)
        found = names()
        if name not in found:
            raise AttributeError(f"module {module!r} has no attribute {name!r}{nearest(name, found)}; it offers {sorted(found)}")
        return _loaded(*found[name])

    def __dir__() -> list[str]:
        here = [n for n, v in vars(sys.modules[module]).items() if getattr(v, "__module__", None) == module and n[0] != "_"]
        return sorted({*here, *names(), *own})

    return __getattr__, __dir__


def lazy_method(methods: Method | Sequence[Method], module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``(__getattr__, __dir__)`` for the manifest ``module`` of one or more methods: names, imported when asked for.

    For kinds whose folder is no package with names of its own (``kernels``): ``from hfplug.kernels.muse import MuSeConfig``.
    """
    several = [methods] if isinstance(methods, Method) else methods
    found = {name: (method.name, dotted) for method in several for name, dotted in method.public_names.items()}

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name not in found:
            raise AttributeError(f"module {module!r} has no attribute {name!r}{nearest(name, found)}; it offers {sorted(found)}")
        owner, dotted = found[name]
        return _loaded(catalogue().entries.get(owner), dotted)

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module]), *found})

    return __getattr__, __dir__
