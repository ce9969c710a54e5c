"""Cache methods of every installed plugin: ``from hfplug.caches import PatternKVCache``, and by name :func:`make`.

::

    model.generate(**batch, cache=hfplug.caches.make("kivi", model))
"""

from hfplug.method import Kind
from hfplug.namespace import lazy_namespace

__getattr__, __dir__ = lazy_namespace(
    Kind.CACHE,
    __name__,
    {
        "MethodCache": "hfplug.caching",
        "MethodLayer": "hfplug.caching",
        "config": "hfplug.seams.cache",
        "make": "hfplug.seams.cache",
    },
)
