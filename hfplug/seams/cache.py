"""How a KV cache enters the stack: as the object a user passes. There is no registry in transformers, and none is made here.

``generate(cache=…)`` and ``forward(cache=…)`` take any ``Cache`` (older name of the argument: ``past_key_values``). The seam
finds the class by the name of its method and checks what a method must be.
"""

from __future__ import annotations

from typing import Any

from hfplug.caching import MethodCache
from hfplug.errors import ConfigError, HfplugError
from hfplug.method import Kind
from hfplug.options import build
from hfplug.plugins import catalogue, load


def config(type: str, **options: Any) -> Any:
    """The configuration of a cache method, by name.

    Raises:
        ConfigError: no such method or option (naming the nearest), or a wrong value.
    """
    load(type, Kind.CACHE)
    return build(catalogue().get(type, Kind.CACHE).load_config(), options, where=f"cache {type!r}")


def make(method: str | Any, model: Any, **options: Any) -> MethodCache:
    """A new, empty cache for a model.

    Args:
        method: name of a cache method, or a configuration from :func:`config`.
        model: the model, also inside PEFT, or its configuration.
        options: fields of the method's configuration, where ``method`` is a name.

    Raises:
        ConfigError: no such method or option (naming the nearest), or a wrong value.
        UnsupportedError: the model has layers the method cannot store.
    """
    name = method if isinstance(method, str) else _named(method, options)
    cls = load(name, Kind.CACHE)
    if not (isinstance(cls, type) and issubclass(cls, MethodCache)):
        raise HfplugError(f"cache {name!r}: its target {cls!r} must be a subclass of hfplug.caching.MethodCache")
    made = config(name, **options) if isinstance(method, str) else method
    return cls.of(model, made)


def _named(made: Any, options: dict[str, Any]) -> str:
    entries = list(catalogue().of_kind(Kind.CACHE))
    for entry in entries:
        if type(made).__name__ == entry.method.config.partition(":")[2] and type(made) is entry.load_config():
            if options:
                raise ConfigError(f"options {sorted(options)} beside a {type(made).__name__}: give one of the two")
            return entry.method.name
    raise ConfigError(
        f"method={made!r} is neither the name of a cache method nor its configuration; known: {[e.method.name for e in entries]}"
    )
