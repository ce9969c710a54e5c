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
* ``PreTrainedConfig.to_json_file`` and ``get_config_dict``: the gate. A patched model opened without hfplug would load with
  random or left-out weights, and answer. So ``config.json`` names a weights file that does not exist
  (``transformers_weights``); transformers then refuses the folder, and the file's name says what is missing. hfplug takes the
  name out when it reads the configuration.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hfplug.ledger import Ledger
from hfplug.modelpatch import ModelPatch, PatchModule
from hfplug.patches import rebuild, stored_in

GATE_KEY = "transformers_weights"
GATE_PREFIX = "needs hfplug"


def gate(records: list[dict[str, Any]]) -> str:
    """The name of a weights file that says what a patched folder needs."""
    wanted = sorted({str(r["distribution"]) for r in records} | {"hfplug"})
    return f"{GATE_PREFIX} (pip install {' '.join(wanted)}; then import hfplug before loading).safetensors"


def activate(ledger: Ledger) -> None:
    """Rebuild recorded patches in every model that transformers constructs."""
    stock_post_init: Any = PreTrainedModel.post_init
    stock_initialize: Any = PreTrainedModel._initialize_weights
    stock_write: Any = PreTrainedConfig.to_json_file
    stock_read: Any = vars(PreTrainedConfig)["get_config_dict"].__func__

    @functools.wraps(stock_post_init)
    def post_init(self: Any) -> None:
        handles = rebuild(self) if stored_in(self.config) else ()
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

    @functools.wraps(stock_write)
    def to_json_file(self: Any, json_file_path: Any, use_diff: bool = True) -> None:
        stock_write(self, json_file_path, use_diff=use_diff)
        if records := stored_in(self):
            path = Path(json_file_path)
            written = {**json.loads(path.read_text(encoding="utf-8")), GATE_KEY: gate(records)}
            path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @functools.wraps(stock_read)
    def get_config_dict(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        found, rest = stock_read(cls, *args, **kwargs)
        if str(found.get(GATE_KEY, "")).startswith(GATE_PREFIX):
            found = {k: v for k, v in found.items() if k != GATE_KEY}
        return found, rest

    ledger.set_attr(PreTrainedModel, "post_init", post_init)
    ledger.set_attr(PreTrainedModel, "_initialize_weights", initialize)
    ledger.set_attr(PreTrainedConfig, "to_json_file", to_json_file)
    ledger.set_attr(PreTrainedConfig, "get_config_dict", classmethod(get_config_dict))


__all__ = ["GATE_KEY", "ModelPatch", "PatchModule", "activate", "gate"]
