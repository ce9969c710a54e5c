"""Names become valid in Hugging Face when Hugging Face is imported, whichever side is imported first.

``import hfplug`` only installs post-import hooks. When the module a seam concerns has been imported (or at once, if it
already was), the seam registers every method of its kind, writing through a ledger of its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from types import ModuleType

import wrapt

from hfplug.errors import one_line
from hfplug.ledger import Ledger
from hfplug.plugins import catalogue, strict

logger = logging.getLogger(__name__)

# Seams are per kind, not per method: this table grows only with a new way into the Hugging Face stack.
SEAMS = (
    ("peft", "hfplug.seams.patch_adapters"),
    ("peft", "hfplug.seams.quantizer_adapters"),
    ("peft", "hfplug.seams.tuner"),
    ("transformers.configuration_utils", "hfplug.seams.gate"),
    ("transformers.modeling_utils", "hfplug.seams.attention"),
    ("transformers.modeling_utils", "hfplug.seams.patch"),
    ("transformers.quantizers.auto", "hfplug.seams.quantizer"),
    ("transformers.trainer", "hfplug.metrics"),
)
_ledgers: dict[str, Ledger] = {}
_waiting: dict[str, None] = {}  # seams to activate as soon as no plugin is half imported


@functools.cache
def install() -> None:
    """Install the post-import hooks, once."""
    for trigger, seam in SEAMS:
        wrapt.register_post_import_hook(_hook(seam, trigger), trigger)
        wrapt.register_post_import_hook(_hook(seam, seam), seam)


def _hook(seam: str, imported: str):  # type: ignore[no-untyped-def]
    def run(_module: ModuleType) -> None:
        loaded = sys.modules.get(seam)
        try:
            if loaded is None:
                importlib.import_module(seam)  # activated by its own hook, so that a failure is said once
            elif imported == seam or not getattr(loaded.__spec__, "_initializing", False):
                activate(seam)
            # else the seam itself imported the trigger; the hook on the seam runs when it is complete
        except Exception as error:
            # The user imported transformers or peft, perhaps for something else: that import must succeed.
            if strict():
                raise
            logger.error("hfplug: %s is inactive in this process: %s", seam, one_line(error))

    return run


def activate(seam: str) -> None:
    """Run ``activate(ledger)`` of a seam module once per process; if it raises, nothing of it stays.

    A method that imports peft or transformers may be the first to do so: what the seam would import of it then is half
    imported. The seam waits for :func:`finish`, which is called where methods are used.
    """
    module = importlib.import_module(seam)  # the first import of a seam activates it by its own hook
    if seam not in _ledgers:
        if _half_imported():
            _waiting[seam] = None
            return
        _waiting.pop(seam, None)
        ledger = _ledgers[seam] = Ledger(seam)  # at once: what it imports may be its own trigger
        try:
            with ledger.transaction():
                module.activate(ledger)
        except BaseException:
            del _ledgers[seam]
            raise


def finish() -> None:
    """Activate the seams that wait, unless a plugin is still being imported."""
    for seam in list(_waiting):
        activate(seam)


def _half_imported() -> bool:
    """Whether the import of a plugin's module is going on, in this thread or another."""
    homes = {entry.source.value.partition(":")[0].rpartition(".") for entry in catalogue().entries.values()}
    roots = tuple(f"{parent or name}." for parent, _, name in homes)
    return any(
        f"{name}.".startswith(roots) and getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in list(sys.modules.items())
    )


def deactivate() -> None:
    """Take every name hfplug registered out of Hugging Face again, for tests and notebooks."""
    _waiting.clear()
    with contextlib.ExitStack() as undone:  # one that fails does not keep the others from it
        for seam in list(_ledgers):
            undone.callback(_ledgers.pop(seam).undo)


def active() -> tuple[str, ...]:
    """The seams active in this process."""
    return tuple(_ledgers)
