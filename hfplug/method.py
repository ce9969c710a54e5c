"""What a plugin declares: pure data, importable without torch."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hfplug.errors import ConfigError, nearest


class Kind(enum.StrEnum):
    """How a method enters the Hugging Face stack; each kind has one seam, and :attr:`home` says in which folder it stands."""

    TUNER = "tuner"
    ATTENTION = "attention"
    CACHE = "cache"
    QUANTIZER = "quantizer"
    PATCH = "patch"
    LOSS = "loss"
    TRAINER = "trainer"
    CALLBACK = "callback"
    MERGE = "merge"

    @property
    def home(self) -> Kind:
        """The kind whose folder and namespace hold the methods of this one: what merges adapters stands with the tuners."""
        return Kind.TUNER if self is Kind.MERGE else self


FIDELITIES = ("paper", "authors' code", "our reading")
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Where a method comes from, and how far the implementation may claim to follow it.

    ``fidelity`` is ``"paper"`` (equations taken from the paper), ``"authors' code"`` (checked against it)
    or ``"our reading"`` (details the public text leaves open were decided here).
    """

    title: str
    venue: str
    url: str
    fidelity: str

    def __post_init__(self) -> None:
        if self.fidelity not in FIDELITIES:
            raise ConfigError(
                f"Paper.fidelity={self.fidelity!r} is not one of {list(FIDELITIES)}{nearest(self.fidelity, FIDELITIES)}"
            )


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method of one plugin.

    Args:
        name: snake_case, unique over all installed plugins and kinds. For a tuner it is also the PEFT type
            (upper case) and, with a trailing underscore, the parameter prefix.
        kind: which seam carries it.
        target: ``"module:attribute"`` of the class that does the work; imported only when used.
        config: ``"module:attribute"`` of the dataclass that is its whole public surface.
        summary: one sentence.
        paper: provenance.
        requires: PEP 508 requirements checked before the method is activated, e.g. ``"peft>=0.21"``.
        capabilities: feature -> ``True`` | ``False`` | a short condition; shown by ``hfplug info``.
        limits: sentences a user must know before relying on it.
        example: the one-line use, shown by ``hfplug info``.
        exports: further ``"module:attribute"`` names to offer as ``hfplug.<kind>s.<attribute>``.
        extension_points: where other plugins may add to this method (see :class:`Extension`): name -> what a target there
            has to be, in one sentence.
        command: ``"module:attribute"`` of a ``typer.Typer`` to offer as ``hfplug <name> …``; imported when it is called.
    """

    name: str
    kind: Kind
    target: str
    config: str
    summary: str
    paper: Paper
    requires: tuple[str, ...] = ()
    capabilities: Mapping[str, bool | str] = field(default_factory=dict, hash=False)
    limits: tuple[str, ...] = ()
    example: str = ""
    exports: tuple[str, ...] = ()
    extension_points: Mapping[str, str] = field(default_factory=dict, hash=False)
    command: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(f"Method.name={self.name!r} must be snake_case: lower-case letters, digits, single '_'")
        if not isinstance(self.kind, Kind):
            raise ConfigError(
                f"Method.kind={self.kind!r} of {self.name!r} is not one of {[f'Kind.{k.name}' for k in Kind]}"
                f"{nearest(self.kind, [k.value for k in Kind])}"
            )
        for attribute in ("requires", "limits", "exports"):
            value = getattr(self, attribute)
            if isinstance(value, str) or not all(isinstance(item, str) for item in value):  # "peft" would be four requirements
                raise ConfigError(f"Method.{attribute}={value!r} of {self.name!r} must be a tuple of strings")
            object.__setattr__(self, attribute, tuple(value))
        places = {"target": self.target, "config": self.config, **{f"exports[{i}]": e for i, e in enumerate(self.exports)}}
        for where, dotted in (places | ({"command": self.command} if self.command else {})).items():
            if not isinstance(dotted, str) or not _DOTTED.fullmatch(dotted):
                raise ConfigError(f"Method.{where}={dotted!r} of {self.name!r} must look like 'package.module:Name'")
        if len(self.public_names) < len(set(places.values())):
            raise ConfigError(f"Method {self.name!r} offers one name for two objects: {sorted(set(places.values()))}")
        if not isinstance(self.paper, Paper):
            raise ConfigError(f"Method.paper={self.paper!r} of {self.name!r} must be a Paper")
        points = self.extension_points
        if not isinstance(points, Mapping) or not all(isinstance(p, str) and _NAME.fullmatch(p) for p in points):
            raise ConfigError(f"Method.extension_points={points!r} of {self.name!r} must map snake_case names to sentences")
        object.__setattr__(self, "extension_points", dict(points))
        object.__setattr__(self, "capabilities", dict(self.capabilities))

    @property
    def public_names(self) -> dict[str, str]:
        """Attribute name -> ``"module:attribute"`` offered by the namespace package of the kind."""
        return {dotted.partition(":")[2]: dotted for dotted in (self.target, self.config, *self.exports)}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["kind"] = self.kind.value
        out["paper"] = {f.name: getattr(self.paper, f.name) for f in fields(self.paper)}
        out["capabilities"], out["extension_points"] = dict(self.capabilities), dict(self.extension_points)
        for key in ("requires", "limits", "exports"):
            out[key] = list(out[key])
        return out


@dataclass(frozen=True, kw_only=True)
class Extension:
    """One thing a plugin adds to a method, its own or another plugin's, at a point which that method declares.

    Args:
        method: name of the method it extends.
        point: one of that method's :attr:`Method.extension_points`.
        name: snake_case; unique at the point over all installed plugins.
        target: ``"module:attribute"`` of what is added; imported only when used.
        summary: one sentence.
    """

    method: str
    point: str
    name: str
    target: str
    summary: str

    def __post_init__(self) -> None:
        for attribute in ("method", "point", "name"):
            value = getattr(self, attribute)
            if not isinstance(value, str) or not _NAME.fullmatch(value):
                raise ConfigError(f"Extension.{attribute}={value!r} must be snake_case: lower-case letters, digits, single '_'")
        if not isinstance(self.target, str) or not _DOTTED.fullmatch(self.target):
            raise ConfigError(f"Extension.target={self.target!r} of {self.name!r} must look like 'package.module:Name'")
