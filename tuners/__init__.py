"""PEFT tuners of every installed plugin: ``from hfplug.tuners import ULoraConfig``."""

from hfplug.method import Kind
from hfplug.namespace import lazy_namespace

__getattr__, __dir__ = lazy_namespace(Kind.TUNER, __name__)
