"""Every error hfplug raises on purpose, and the one helper that words them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HfplugError(Exception):
    """Base of every error hfplug raises on purpose."""


class ConfigError(HfplugError, ValueError):
    """A name, key or value the user gave is not valid; the message says what is."""


class PluginError(HfplugError):
    """A plugin could not be loaded or activated (raised only under ``HFPLUG_STRICT=1``)."""


class MissingPluginError(HfplugError, LookupError):
    """An artefact needs a plugin that is not installed or did not load."""


class LedgerError(HfplugError, RuntimeError):
    """A change was refused, or could not be undone."""


class UnsupportedError(HfplugError, NotImplementedError):
    """The combination asked for is not supported; the message says why and what is."""


def nearest(name: object, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the closest of ``known``, or an empty string."""
    spelled = {str(k).lower(): str(k) for k in known}  # a name in the wrong case is the nearest there is
    found = difflib.get_close_matches(str(name).lower(), spelled, n=1, cutoff=0.5)
    return f" (did you mean {spelled[found[0]]!r}?)" if found else ""


def one_line(error: BaseException) -> str:
    """The type and first line of an error, for tables and logs."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
