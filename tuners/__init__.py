"""Tuner methods, importable as ``hfplug.tuners``: one folder per method, names offered from the catalogue."""

from hfplug.method import Kind
from hfplug.namespace import lazy_namespace

__getattr__, __dir__ = lazy_namespace(
    Kind.TUNER,
    __name__,
    {
        "apply_optimizer_groups": "hfplug.optimization",
        "config": "hfplug.seams.tuner",
        "export": "hfplug.exporting",
        "merge": "hfplug.seams.merge",
        "optimizer_groups": "hfplug.optimization",
        "prepare": "hfplug.optimization",
        "tuner_layers": "hfplug.seams.tuner",
        "use_optimizer_groups": "hfplug.optimization",
    },
)
