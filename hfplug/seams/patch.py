"""Model patches: structures that survive ``save_pretrained`` and come back inside plain ``from_pretrained``.

A method author writes one frozen dataclass, its own options, and one function::

    @dataclass(frozen=True)
    class Sharper(ModelPatch):                                   # hfplug.modelpatch
        method: ClassVar[str] = "sharper"                        # = Method.name; Method.target = Method.config = this class
        rank: int = field(default=4, metadata={"help": "..."})

        def apply(self, model, ledger):                          # structure only; also on models without data ("meta")
            decoder = decoder_of(model)                          # hfplug.families: stack, layers, projections, base, config
            for index in range(len(decoder.layers)):
                for path, module, split in decoder.projections(index):
                    ledger.swap_module(model, path, MyLinear(module, self.rank))     # MyLinear: a PatchModule

and optionally ``layers`` (which layers must be touched), ``start`` (values that depend on live weights), ``init_weights``
(a model from its configuration alone), ``notes`` (cost, in the plan), ``warnings``, ``families``, ``identity``,
``works_with``. State of one forward goes through :func:`hfplug.calls.call_scope`; state that lives as long as a KV cache goes
on the cache object. The user's verbs are in :mod:`hfplug.patches`.

Here is what enters transformers, all of it through the ledger:

* ``PreTrainedModel.post_init``: a model whose configuration records patches gets them at the end of its construction, before
  weights are initialised or loaded. The innermost model that has the configuration is patched, so the base model and every
  head on it are.
* ``PreTrainedModel._initialize_weights``: a :class:`~hfplug.modelpatch.PatchModule` initialises itself.
* ``PreTrainedModel.save_pretrained``: the configuration written says which patches are on the model, also where they were given
  to a part of it.

The gate of saved folders is in :mod:`hfplug.seams.gate`, adapters in :mod:`hfplug.seams.patch_adapters`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel

from hfplug.artefacts import patch_records
from hfplug.ledger import Ledger
from hfplug.modelpatch import ModelPatch, PatchModule
from hfplug.patches import config_to_save, note_on_adapters, rebuild


def activate(ledger: Ledger) -> None:
    """Rebuild recorded patches in every model that transformers constructs."""
    stock_post_init: Any = PreTrainedModel.post_init
    stock_initialize: Any = PreTrainedModel._initialize_weights

    @functools.wraps(stock_post_init)
    def post_init(self: Any) -> None:
        handles = rebuild(self) if patch_records(self.config) else ()
        stock_post_init(self)
        if handles and not any(p.is_meta for p in self.parameters()):
            with torch.no_grad():
                for handle in handles:
                    handle.patch.init_weights(self)

    @functools.wraps(stock_initialize)
    def initialize(self: Any, module: Any, is_custom_code: bool = False) -> None:
        if not isinstance(module, PatchModule):
            stock_initialize(self, module, is_custom_code)
        elif not getattr(module, "_is_hf_initialized", False):
            module.reset_parameters()
            module._is_hf_initialized = True  # type: ignore[assignment]

    stock_save: Any = PreTrainedModel.save_pretrained

    @functools.wraps(stock_save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        note_on_adapters(self)  # those that transformers itself put in
        with Ledger("patch seam") as own:
            if (config := config_to_save(self)) is not self.config:
                own.set_attr(self, "config", config)
            return stock_save(self, *args, **kwargs)

    ledger.set_attr(PreTrainedModel, "save_pretrained", save_pretrained)
    ledger.set_attr(PreTrainedModel, "post_init", post_init)
    ledger.set_attr(PreTrainedModel, "_initialize_weights", initialize)


__all__ = ["ModelPatch", "PatchModule", "activate"]
