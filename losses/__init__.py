"""Loss terms of every installed plugin: ``from hfplug.losses import NITPConfig``."""

from hfplug.method import Kind
from hfplug.namespace import lazy_namespace

__getattr__, __dir__ = lazy_namespace(Kind.LOSS, __name__)
