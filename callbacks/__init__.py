"""Trainer callbacks of every installed plugin (``from hfplug.callbacks import SinkMonitorCallback``) and their base class."""

from hfplug.method import Kind
from hfplug.namespace import lazy_namespace

# The base for authors of callbacks lives in the seam, which imports transformers.
__getattr__, __dir__ = lazy_namespace(Kind.CALLBACK, __name__, {"HfplugCallback": "hfplug.seams.callback"})
