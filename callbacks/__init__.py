"""Trainer callbacks of every installed plugin: ``from hfplug.callbacks import SinkMonitorCallback``."""

from hfplug.method import Kind
from hfplug.namespace import lazy_namespace

__getattr__, __dir__ = lazy_namespace(Kind.CALLBACK, __name__)
