"""Cache methods of every installed plugin: ``from hfplug.caches import PatternKVCache``, and by name :func:`make`.

::

    model.generate(**batch, cache=hfplug.caches.make("kivi", model))
"""

import importlib
from typing import Any

from hfplug.method import Kind
from hfplug.namespace import lazy_namespace

_lazy_getattr, _lazy_dir = lazy_namespace(Kind.CACHE, __name__)
# Offered here for users; they live in modules that import torch and must not be imported with this one.
_VERBS = {
    "MethodCache": "hfplug.caching",
    "MethodLayer": "hfplug.caching",
    "config": "hfplug.seams.cache",
    "make": "hfplug.seams.cache",
}


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(importlib.import_module(_VERBS[name]), name)
    return _lazy_getattr(name)


def __dir__() -> list[str]:
    return sorted([*_lazy_dir(), *_VERBS])
