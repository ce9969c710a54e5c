"""Tuner methods, importable as ``hfplug.tuners``: one folder per method, names offered from the catalogue."""

import importlib
from typing import Any

from hfplug.method import Kind
from hfplug.namespace import lazy_namespace

_lazy_getattr, _lazy_dir = lazy_namespace(Kind.TUNER, __name__)
# Offered here for users; they live in modules that import torch and PEFT and must not be imported with this package.
_VERBS = {
    "apply_optimizer_groups": "hfplug.optimization",
    "config": "hfplug.seams.tuner",
    "export": "hfplug.exporting",
    "merge": "hfplug.seams.merge",
    "optimizer_groups": "hfplug.optimization",
    "prepare": "hfplug.optimization",
    "tuner_layers": "hfplug.seams.tuner",
    "use_optimizer_groups": "hfplug.optimization",
}


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(importlib.import_module(_VERBS[name]), name)
    return _lazy_getattr(name)


def __dir__() -> list[str]:
    return sorted([*_lazy_dir(), *_VERBS])
