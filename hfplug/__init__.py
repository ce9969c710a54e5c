"""Research methods in stock Hugging Face workflows: one import, one line.

``import hfplug`` loads no torch and only installs post-import hooks; see :mod:`hfplug.activation`.
"""

from __future__ import annotations

import importlib
from typing import Any

from hfplug import activation as _activation
from hfplug._version import __version__
from hfplug.errors import (
    ConfigError,
    HfplugError,
    LedgerError,
    MissingPluginError,
    PluginError,
    UnsupportedError,
)
from hfplug.hookspecs import hookimpl
from hfplug.ledger import Ledger
from hfplug.method import Extension, Kind, Method, Paper
from hfplug.plugins import catalogue, load

__all__ = [
    "ConfigError", "Extension", "HfplugError", "Kind", "Ledger", "LedgerError", "Method", "MissingPluginError", "Paper",
    "PluginError", "UnsupportedError", "__version__", "applied", "apply", "catalogue", "hookimpl", "load", "plan",
]  # fmt: skip

_NAMESPACES = ("caches", "callbacks", "kernels", "losses", "modeling_patches", "trainers", "tuners")


_PATCHING = ("applied", "apply", "plan")  # in hfplug.patches, which imports torch


def __getattr__(name: str) -> Any:
    if name in _PATCHING:
        return getattr(importlib.import_module("hfplug.patches"), name)
    # `hfplug.tuners.config(...)` without importing the subpackage first.
    if name in _NAMESPACES:
        return importlib.import_module(f"hfplug.{name}")
    raise AttributeError(f"module 'hfplug' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_NAMESPACES])


_activation.install()
