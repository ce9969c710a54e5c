"""Strict construction of configuration dataclasses from user input: unknown keys and wrong types are errors."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from hfplug.errors import ConfigError, nearest


def build(cls: type[Any], values: Mapping[str, Any], where: str = "") -> Any:
    """Return ``cls(**values)`` after checking every key and the type of every value.

    Args:
        cls: a dataclass.
        values: option -> value, as from YAML or keyword arguments.
        where: what is being configured, for the message, e.g. ``"plugins.tuner"``.

    Raises:
        ConfigError: an unknown key (naming the nearest), a missing required one, a value of the wrong type, or a value
            the dataclass itself refuses.
    """
    place = f"{where}: " if where else ""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{place}expected a mapping of options, got {type(values).__name__} {values!r}")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key in values:
        if key not in fields:
            raise ConfigError(f"{place}{cls.__name__} has no option {key!r}{nearest(key, fields)}; options: {sorted(fields)}")
    required = dataclasses.MISSING
    for name, f in fields.items():
        if name not in values and f.default is required and f.default_factory is required:
            raise ConfigError(f"{place}{cls.__name__} needs a value for {name!r}")
    hints = _hints(cls)
    checked = {key: coerce(value, hints.get(key, Any), f"{place}{key}") for key, value in values.items()}
    try:
        return cls(**checked)
    except ConfigError as error:
        raise ConfigError(f"{place}{error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}{error}") from error


def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


_NO = object()


def coerce(value: Any, hint: Any, where: str) -> Any:
    """Return ``value`` if it fits ``hint``, or what YAML could not say otherwise.

    An int is taken where a float is asked, a list where a tuple or set is asked, and the string YAML 1.1 makes of ``1e-4``
    where a float is asked. The items of lists, tuples and sets are looked at as well.

    Raises:
        ConfigError: it does not fit; names the place, the value and what is allowed.
    """
    for lenient in (False, True):
        if (found := _convert(value, hint, lenient)) is not _NO:
            return found
    quotes = "; YAML reads an unquoted yes or no as a boolean: put it in quotes" if isinstance(value, bool) else ""
    choice = _nearest_choice(value, hint)
    raise ConfigError(f"{where}={value!r} ({type(value).__name__}) is not {describe(hint)}{choice}{quotes}")


def _nearest_choice(value: Any, hint: Any) -> str:
    choices = [c for a in (hint, *typing.get_args(hint)) if typing.get_origin(a) is typing.Literal for c in typing.get_args(a)]
    return nearest(value, [str(c) for c in choices])


def _convert(value: Any, hint: Any, lenient: bool) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return next((found for a in args if (found := _convert(value, a, lenient)) is not _NO), _NO)
    if origin in (list, set, frozenset, tuple):
        return _convert_items(value, origin, args, lenient)
    if lenient and hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 (no dot) as a string
        with contextlib.suppress(ValueError):
            number = float(value)
            return number if math.isfinite(number) else _NO
    return value if _fits(value, hint, origin, args) else _NO


def _convert_items(value: Any, origin: Any, args: tuple[Any, ...], lenient: bool) -> Any:
    if not isinstance(value, origin) and not (lenient and isinstance(value, list)):
        return _NO
    inner: Iterable[Any] = itertools.repeat(args[0] if args else Any)
    if origin is tuple and args and args[-1] is not Ellipsis:
        inner = args
        if len(value) != len(args):
            return _NO
    found = [_convert(v, i, lenient) for v, i in zip(value, inner, strict=False)]
    if any(f is _NO for f in found):
        return _NO
    return value if isinstance(value, origin) and all(f is v for f, v in zip(found, value, strict=True)) else origin(found)


def _fits(value: Any, hint: Any, origin: Any, args: tuple[Any, ...]) -> bool:
    if hint is None or hint is type(None):
        return value is None
    if origin is typing.Literal:
        return any(value == a and type(value) is type(a) for a in args)
    if origin is not None:
        return isinstance(value, origin) if isinstance(origin, type) else True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) and hint is not Any else True


def describe(hint: Any) -> str:
    """A type hint in words a user reads."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if hint is type(None):
        return "null"
    if origin is None and isinstance(hint, type):
        return hint.__name__
    return str(hint).replace("typing.", "")


def table(cls: type[Any]) -> list[dict[str, str]]:
    """One row per option of a dataclass: ``name``, ``type``, ``default``, ``help`` (the field's ``metadata["help"]``)."""
    hints, rows = _hints(cls), []
    hidden = getattr(cls, "hidden_options", ())  # bookkeeping of the base class, not the method's own surface
    for f in dataclasses.fields(cls):
        if not f.init or f.name in hidden:
            continue
        if f.default is not dataclasses.MISSING:
            default = repr(f.default)
        elif f.default_factory is not dataclasses.MISSING:
            default = repr(f.default_factory())
        else:
            default = "required"
        rows.append(
            {"name": f.name, "type": describe(hints[f.name]), "default": default, "help": str(f.metadata.get("help", ""))}
        )
    return rows


class Checked:
    """Base of configurations that name what is wrong with an option."""

    def require(self, *checks: tuple[str, bool, str]) -> None:
        """Check options: for each its name, whether it is right, and what is allowed.

        Raises:
            ConfigError: the first that is not right.
        """
        for name, good, allowed in checks:
            if not good:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be {allowed}")
