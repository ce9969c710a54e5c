"""The hooks a plugin implements. This file is the whole plugin interface.

A plugin is a module named by an entry point of the group ``hfplug``:

    [project.entry-points.hfplug]
    my_method = "my_package.my_method"

The module imports nothing heavy and implements::

    from hfplug import Kind, Method, Paper, hookimpl

    @hookimpl
    def hfplug_methods():
        return [Method(name="my_method", kind=Kind.CALLBACK, target="my_package.my_method.callback:MyCallback", ...)]
"""

from __future__ import annotations

import pluggy

from hfplug.method import Extension, Method

hookspec = pluggy.HookspecMarker("hfplug")
hookimpl = pluggy.HookimplMarker("hfplug")


@hookspec
def hfplug_methods() -> list[Method]:  # type: ignore[empty-body]
    """Return the methods this plugin offers.

    Called once per process, when the catalogue is first read (``hfplug list``, or when a Hugging Face module with a
    seam is imported). Must not import torch or transformers. An exception here disables this plugin only.
    """


@hookspec
def hfplug_extensions() -> list[Extension]:  # type: ignore[empty-body]
    """Return what this plugin adds to methods, its own or other plugins', at the points which those methods declare.

    A plugin may implement this hook, ``hfplug_methods``, or both. Called once per process; must not import torch or
    transformers. An extension of a method that is not installed waits until it is, and ``hfplug list`` says so.
    """
