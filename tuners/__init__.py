"""Tuner methods, importable as ``hfplug.tuners``: one folder per method, names offered from the catalogue."""

from typing import Any

from hfplug.method import Kind
from hfplug.namespace import lazy_namespace

_lazy_getattr, _lazy_dir = lazy_namespace(Kind.TUNER, __name__)
# Offered here for users; they live in the seam, which imports torch and PEFT and must not be imported with this package.
_VERBS = ("apply_optimizer_groups", "config", "optimizer_groups", "tuner_layers", "use_optimizer_groups")


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        from hfplug.seams import tuner

        return getattr(tuner, name)
    return _lazy_getattr(name)


def __dir__() -> list[str]:
    return sorted([*_lazy_dir(), *_VERBS])
