"""Trainer callbacks of every installed plugin (``from hfplug.callbacks import SinkMonitorCallback``) and their base class."""

from typing import Any

from hfplug.method import Kind
from hfplug.namespace import lazy_namespace

_lazy_getattr, _lazy_dir = lazy_namespace(Kind.CALLBACK, __name__)


def __getattr__(name: str) -> Any:
    if name == "HfplugCallback":  # the base for authors of callbacks; it lives in the seam, which imports transformers
        from hfplug.seams.callback import HfplugCallback

        return HfplugCallback
    return _lazy_getattr(name)


def __dir__() -> list[str]:
    return sorted([*_lazy_dir(), "HfplugCallback"])
