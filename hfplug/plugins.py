"""Discovery: entry points -> pluggy -> catalogue. One broken plugin never stops the host.

Environment:
    ``HFPLUG_PLUGINS=a,b``  load only these entry points (empty string: none).
    ``HFPLUG_DISABLE=c``    never import these.
    ``HFPLUG_STRICT=1``     raise :class:`~hfplug.errors.PluginError` instead of recording a problem.
"""

from __future__ import annotations

import configparser
import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pluggy

from hfplug import hookspecs
from hfplug._version import __version__
from hfplug.errors import ConfigError, HfplugError, PluginError, nearest, one_line
from hfplug.method import Extension, Kind, Method

GROUP = "hfplug"
HOST = "hfplug"


@dataclass(frozen=True)
class Source:
    """One entry point and the distribution that ships it."""

    plugin: str
    value: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class Problem:
    """A plugin (or one of its methods) that is not usable, and why, in one line."""

    source: Source
    cause: str
    method: str | None = None
    usable: bool = False  # only slow


@dataclass(frozen=True)
class Entry:
    """A usable method and where it comes from."""

    method: Method
    source: Source

    def load_target(self) -> Any:
        """Import and return the class that does the work."""
        return load_dotted(self.method.target)

    def load_config(self) -> Any:
        """Import and return the configuration dataclass."""
        return load_dotted(self.method.config)

    def unmet(self) -> str | None:
        """The first requirement this environment does not satisfy, in words; ``None`` when all are met."""
        from packaging.requirements import InvalidRequirement, Requirement  # a tenth of the time of `import hfplug`

        for text in self.method.requires:
            try:
                requirement = Requirement(text)
            except InvalidRequirement as error:
                return f"malformed requirement {text!r}: {one_line(error)}"
            if requirement.marker is not None and not requirement.marker.evaluate():
                continue
            try:
                found = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                return f"needs {text}, which is not installed"
            if not requirement.specifier.contains(found, prereleases=True):
                return f"needs {text}, found {found}"
        return None

    def check(self) -> None:
        """Raise :class:`~hfplug.errors.PluginError` for the first requirement this environment does not satisfy."""
        if cause := self.unmet():
            raise PluginError(f"{self.method.kind} {self.method.name!r} of {self.source} {cause}")


@dataclass(frozen=True)
class Offer:
    """A usable extension and where it comes from."""

    extension: Extension
    source: Source


@dataclass
class Catalogue:
    """All usable methods by name, what extends them by (method, point, name), and every problem met while looking."""

    entries: dict[str, Entry] = field(default_factory=dict)
    offers: dict[tuple[str, str, str], Offer] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def get(self, name: str, kind: Kind | None = None) -> Entry:
        """Return the entry called ``name``.

        Raises:
            ConfigError: no such method (naming the nearest), or it is of another kind.
        """
        entry = self.entries.get(name) if isinstance(name, str) else None
        if entry is None:
            known = sorted(n for n, e in self.entries.items() if kind is None or e.method.kind is kind)
            what = f"{kind} " if kind else ""
            cause = self.why_not(name)
            why = f"; it was found but not loaded: {cause}" if cause else ""
            raise ConfigError(f"unknown {what}method {name!r}{nearest(name, known)}; known: {known}{why}")
        if kind is not None and entry.method.kind is not kind:
            known = sorted(n for n, e in self.entries.items() if e.method.kind is kind)
            raise ConfigError(f"{name!r} is a {entry.method.kind}, not a {kind}; known {kind} methods: {known}")
        return entry

    def why_not(self, name: str) -> str | None:
        """Why a method or plugin of this name was found but is not usable."""
        return next((p.cause for p in self.problems if not p.usable and name in (p.method, p.source.plugin)), None)

    def of_kind(self, kind: Kind) -> Iterator[Entry]:
        """Entries of one kind, in name order."""
        return (self.entries[name] for name in sorted(self.entries) if self.entries[name].method.kind is kind)

    def at_home(self, kind: Kind) -> Iterator[Entry]:
        """Entries of every kind with the same home, in name order: what one namespace package offers."""
        return (self.entries[name] for name in sorted(self.entries) if self.entries[name].method.kind.home is kind.home)

    def refuse(self, source: Source, cause: str, method: str | None = None, error: BaseException | None = None) -> None:
        """Record a problem, or raise it under ``HFPLUG_STRICT=1``."""
        if strict():
            raise PluginError(f"plugin {source.plugin!r} of {source}: {cause}") from error
        self.problems.append(Problem(source, cause, method))

    def drop(self, entry: Entry, cause: str, error: BaseException | None = None) -> None:
        """Take a method that cannot be activated out of the catalogue, recording why."""
        self.entries.pop(entry.method.name, None)
        self.refuse(entry.source, cause, entry.method.name, error)


def strict() -> bool:
    """Whether plugin errors raise."""
    return os.environ.get("HFPLUG_STRICT", "") not in ("", "0")


def load_dotted(dotted: str) -> Any:
    """Import ``"package.module:Name"``.

    Raises:
        PluginError: the module has no such attribute (naming the nearest).
    """
    module_name, _, attribute = dotted.partition(":")
    module = importlib.import_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise PluginError(f"{module_name} has no {attribute!r}{nearest(attribute, vars(module))}") from error


def _names(variable: str) -> set[str] | None:
    value = os.environ.get(variable)
    return None if value is None else {name.strip() for name in value.split(",") if name.strip()}


def sources() -> list[Source]:
    """Every entry point of the group, the host's own first, then by distribution and name (a fixed order decides clashes)."""
    found = {
        Source(ep.name, ep.value, ep.dist.name if ep.dist else "unknown", ep.dist.version if ep.dist else "unknown")
        for ep in importlib.metadata.entry_points(group=GROUP)
    }
    if not any(s.distribution == HOST for s in found):
        found |= set(_checkout_sources())
    return sorted(found, key=lambda s: (s.distribution != HOST, s.distribution, s.plugin, s.value))


def _checkout_sources() -> Iterator[Source]:
    # In a bare checkout there is no metadata; the file the metadata would be built from stands beside the package.
    path = Path(__file__).resolve().parent.parent / "entry_points.txt"
    if path.is_file():
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
        parser.optionxform = str  # type: ignore[assignment, method-assign]
        parser.read(path, encoding="utf-8")
        if parser.has_section(GROUP):
            for name, value in parser.items(GROUP):
                yield Source(name, value, HOST, __version__)


@functools.cache
def catalogue() -> Catalogue:
    """The catalogue of this process, read once."""
    return discover(sources())


def discover(found: list[Source]) -> Catalogue:
    """Load plugins one by one; whatever one does wrong is recorded against that one.

    Raises:
        PluginError: under ``HFPLUG_STRICT=1``, at the first problem.
        ConfigError: ``HFPLUG_PLUGINS`` or ``HFPLUG_DISABLE`` names an entry point that is not installed.
    """
    only, blocked = _names("HFPLUG_PLUGINS"), _names("HFPLUG_DISABLE") or set()
    known = {s.plugin for s in found}
    for variable, names in (("HFPLUG_PLUGINS", only or set()), ("HFPLUG_DISABLE", blocked)):
        for name in sorted(names - known):
            raise ConfigError(f"{variable} names {name!r}{nearest(name, known)}; installed plugins: {sorted(known)}")
    manager = pluggy.PluginManager("hfplug")
    manager.add_hookspecs(hookspecs)
    result = Catalogue()
    for source in found:
        if source.plugin in blocked or (only is not None and source.plugin not in only):
            continue
        heavy = {"torch", "transformers"} - set(sys.modules)
        module = _load(manager, source, result)
        if module is None:
            continue
        for item in _declared(manager, module, source, result):
            _add(item, source, result) if isinstance(item, Method) else _offer(item, source, result)
        if imported := sorted(heavy & set(sys.modules)):
            # Whether it is seen depends on what the process imported before, so it must not decide usability.
            slow = f"slow: its manifest imports {' and '.join(imported)}; import them inside the method instead"
            result.problems.append(Problem(source, slow, usable=True))
    for key in list(result.offers):
        _check_offer(key, result)
    return result


def _load(manager: pluggy.PluginManager, source: Source, result: Catalogue) -> Any:
    try:
        module = importlib.metadata.EntryPoint(source.plugin, source.value, GROUP).load()
        manager.register(module, name=f"{source.distribution}:{source.plugin}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin's import may do anything; only the user's own interrupt passes
        result.refuse(source, one_line(error), error=error)
        return None
    unknown = [h.name for h in manager.get_hookcallers(module) or [] if not h.has_spec()]
    if unknown:
        hooks = [name for name in vars(hookspecs) if name.startswith("hfplug_")]
        result.refuse(source, f"unknown hook {unknown[0]!r}{nearest(unknown[0], hooks)}; hooks: {hooks}")
        return None
    return module


_DECLARES: dict[str, type[Method] | type[Extension]] = {"hfplug_methods": Method, "hfplug_extensions": Extension}


def _declared(manager: pluggy.PluginManager, module: Any, source: Source, result: Catalogue) -> list[Method | Extension]:
    hooks = [
        (name, impl) for name in _DECLARES for impl in getattr(manager.hook, name).get_hookimpls() if impl.plugin is module
    ]
    if not hooks:
        result.refuse(source, "implements no hook; a plugin needs '@hookimpl def hfplug_methods()'")
    found: list[Method | Extension] = []
    for name, impl in hooks:
        try:
            items: Any = impl.function()
            items = [*items] if isinstance(items, Iterable) else items
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            result.refuse(source, one_line(error), error=error)
            return []
        wrong = [i for i in items if not isinstance(i, _DECLARES[name])] if isinstance(items, list) else [items]
        if wrong:
            told = f"{wrong[0]!r:.60} ({type(wrong[0]).__name__})"
            result.refuse(source, f"{name}() returned {told}, expected a list of hfplug.{_DECLARES[name].__name__}")
            return []
        found += items
    return found


def _offer(extension: Extension, source: Source, result: Catalogue) -> None:
    key = (extension.method, extension.point, extension.name)
    if clash := result.offers.get(key):
        what = f"{extension.point} {extension.name!r} of {extension.method!r}"
        result.refuse(source, f"{what} is already provided by {clash.source}; {source} is refused", extension.name)
        return
    result.offers[key] = Offer(extension, source)


def _check_offer(key: tuple[str, str, str], result: Catalogue) -> None:
    method, point, name = key
    entry, source = result.entries.get(method), result.offers[key].source
    if entry is None:  # nothing is wrong with the plugin: the method may be blocked, or come with another distribution
        del result.offers[key]
        why = f"{point} {name!r} waits for the method {method!r}, which is not there{nearest(method, result.entries)}"
        result.problems.append(Problem(source, why, usable=True))
    elif point not in entry.method.extension_points:
        del result.offers[key]
        points = sorted(entry.method.extension_points)
        cause = f"{method!r} has no extension point {point!r}{nearest(point, points)}; it has {points}"
        result.refuse(source, f"{name!r} is not taken: {cause}", name)


# hfplug.kernels is no package with names of its own: each method there offers its names itself (namespace.lazy_method).
_APART = (Kind.ATTENTION, Kind.CACHE, Kind.QUANTIZER)


def _add(method: Method, source: Source, result: Catalogue) -> None:
    clash = result.entries.get(method.name)
    what = f"{method.kind} {method.name!r}"
    together = () if method.kind in _APART else result.at_home(method.kind)
    for other in together:  # `from hfplug.tuners import Name` must mean one thing
        taken = [n for n, dotted in method.public_names.items() if other.method.public_names.get(n, dotted) != dotted]
        if taken and clash is None:
            clash, what = other, f"the {method.kind} class {taken[0]!r}"
    if clash is None:
        result.entries[method.name] = Entry(method, source)
        return
    result.refuse(source, f"{what} is already provided by {clash.source}; {source} is refused", method.name)


def load(name: str, kind: Kind | None = None) -> Any:
    """Import and return the target class of a method, checking what it requires.

    Raises:
        ConfigError: unknown name or wrong kind.
        PluginError: a requirement of the method is not met.
    """
    entry = catalogue().get(name, kind)
    entry.check()
    return entry.load_target()


__all__ = [
    "Catalogue", "Entry", "HfplugError", "Offer", "Problem", "Source",
    "catalogue", "discover", "load", "load_dotted", "sources", "strict",
]  # fmt: skip
