"""What plugins add to a method at the points it declares: looked up by name, imported when used, built from options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfplug.errors import ConfigError, nearest
from hfplug.options import build
from hfplug.plugins import Offer, catalogue, load_dotted


def offers(method: str, point: str) -> dict[str, Offer]:
    """Everything offered at one point, by name, in name order.

    Raises:
        ConfigError: no such method, or it declares no such point.
    """
    found = catalogue()
    points = found.get(method).method.extension_points
    if point not in points:
        raise ConfigError(f"{method!r} has no extension point {point!r}{nearest(point, points)}; it has {sorted(points)}")
    return {n: offer for (m, p, n), offer in sorted(found.offers.items()) if (m, p) == (method, point)}


def load_extension(method: str, point: str, name: str) -> Any:
    """Import and return what stands behind one name.

    Raises:
        ConfigError: nothing of this name is offered there (naming the nearest, and what is offered).
    """
    known = offers(method, point)
    if name not in known:
        raise ConfigError(f"{point}={name!r} is not known to {method}{nearest(name, known)}; known: {list(known)}")
    return load_dotted(known[name].extension.target)


def build_extension(method: str, point: str, name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Build the dataclass behind one name from its options; every key and type is checked.

    Raises:
        ConfigError: an unknown name or option (naming the nearest), or a value that does not fit.
    """
    return build(load_extension(method, point, name), options or {}, where=f"{point} {name!r}")
