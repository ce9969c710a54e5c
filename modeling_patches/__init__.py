"""Model patches of every installed plugin, offered by class name."""

from hfplug.method import Kind
from hfplug.namespace import lazy_namespace

__getattr__, __dir__ = lazy_namespace(Kind.PATCH, __name__)
