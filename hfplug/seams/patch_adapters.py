"""PEFT on top of a patched model: the adapter says which patches it was trained on, and is refused on another structure.

* An adapter put on a patched model keeps the records of the patches; ``adapter_config.json`` has them under
  ``"hfplug_patches"``. Loading it on a model with other patches is refused, with the lines that make the right one. A base
  saved with its patches needs none of that: it comes back patched by itself.
* An adapter on a module whose output is not linear in its weight (``merge_refused``) cannot be merged, nor started by taking a
  part out of the weight (PiSSA and the like).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.config import CONFIG_NAME, PeftConfigMixin
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn

from hfplug.artefacts import PATCHES, check_record
from hfplug.errors import UnsupportedError
from hfplug.ledger import Ledger
from hfplug.patches import applied, note_on_adapters

_TRAINED_ON = "_hfplug_trained_on"  # on a configuration that was read from a file
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")  # first values that are taken out of the base's weight


def trained_on(config: Any) -> list[dict[str, Any]]:
    """The records of the patches on the base of a saved adapter, from its configuration as PEFT reads it."""
    found: list[dict[str, Any]] = vars(config).get(_TRAINED_ON, [])
    return found


def _records(model: Any) -> list[dict[str, Any]]:
    return [handle.record for handle in applied(model)]


def _said(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(str(r.get("plugin")), json.dumps(r.get("options", {}), sort_keys=True)) for r in records]


def check_base(model: Any, config: Any, adapter_name: str) -> None:
    """Note on an adapter's configuration which patches its base has, or compare with what it was trained on.

    Raises:
        MissingPluginError: it was trained with a patch that is not installed here.
        UnsupportedError: the base has other patches, or the same with other options; or the adapter's first values would be
            taken out of weights in which the model is not linear.
    """
    init = str(getattr(config, "init_lora_weights", "")).lower()
    if init.startswith(_CHANGES_BASE) and isinstance(model, nn.Module):
        refused = next((m.merge_refused for m in model.modules() if getattr(m, "merge_refused", "")), None)
        if refused is not None:
            raise UnsupportedError(
                f"init_lora_weights={init!r} takes the adapter's first values out of the base's weights, "
                f"which changes this model: {refused}. Use True, 'gaussian', 'orthogonal' or 'eva'"
            )
    here, wanted = _records(model), vars(config).get(_TRAINED_ON)
    vars(config)[PATCHES] = here
    if wanted is None:  # a new adapter; the same configuration object may serve several models
        return
    for record in wanted:
        check_record(record, f"the adapter {adapter_name!r}")
    if _said(wanted) == _said(here):
        return
    lines = [
        f"hfplug.apply(model, {r['plugin']!r}{''.join(f', {k}={v!r}' for k, v in r.get('options', {}).items())})" for r in wanted
    ]
    has = ", ".join(f"{name} {options}" for name, options in _said(here)) or "no patches"
    needs = "; ".join(lines) or "a model without patches"
    raise UnsupportedError(
        f"the adapter {adapter_name!r} was trained on another structure than this {type(model).__name__}, which has {has}. "
        f"It needs: {needs}"
    )


def activate(ledger: Ledger) -> None:
    """Let adapters carry the records of patches, check them, and refuse merges that would change the function."""
    stock_save: Any = PeftConfigMixin.save_pretrained
    stock_read: Any = vars(PeftConfigMixin)["from_json_file"].__func__
    stock_build: Any = vars(PeftConfigMixin)["from_pretrained"].__func__
    stock_inject: Any = BaseTuner.inject_adapter
    stock_merge: Any = BaseTuner._check_merge_allowed
    kept: list[Any] = []  # what from_json_file took out, for the from_pretrained around it

    @functools.wraps(stock_save)
    def save_pretrained(self: Any, save_directory: str, **kwargs: Any) -> None:
        stock_save(self, save_directory, **kwargs)
        if records := vars(self).get(PATCHES):
            path = Path(save_directory) / CONFIG_NAME
            written = {**json.loads(path.read_text(encoding="utf-8")), PATCHES: records}
            path.write_text(json.dumps(written, indent=2, sort_keys=True), encoding="utf-8")

    @functools.wraps(stock_read)
    def from_json_file(cls: Any, /, path_json_file: str, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = stock_read(cls, path_json_file, **kwargs)
        if kept:
            kept[-1] = found.pop(PATCHES, [])
        return found

    @functools.wraps(stock_build)
    def from_pretrained(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        kept.append([])
        try:
            config = stock_build(cls, *args, **kwargs)
            vars(config)[_TRAINED_ON] = kept[-1]
        finally:
            kept.pop()
        return config

    @functools.wraps(stock_inject)
    def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        check_base(model, self.peft_config[adapter_name], adapter_name)
        stock_inject(self, model, adapter_name, *args, **kwargs)

    @functools.wraps(stock_merge)
    def check_merge_allowed(self: Any) -> None:
        stock_merge(self)
        for name, layer in self.model.named_modules():
            if isinstance(layer, BaseTunerLayer):
                reason = getattr(layer.get_base_layer(), "merge_refused", "")
                if reason:
                    raise UnsupportedError(f"{reason} ({name})")

    ledger.set_attr(PeftConfigMixin, "save_pretrained", save_pretrained)
    ledger.set_attr(PeftConfigMixin, "from_json_file", classmethod(from_json_file))
    ledger.set_attr(PeftConfigMixin, "from_pretrained", classmethod(from_pretrained))
    ledger.set_attr(BaseTuner, "inject_adapter", inject_adapter)
    _activate_model(ledger)
    ledger.set_attr(BaseTuner, "_check_merge_allowed", check_merge_allowed)


def _activate_model(ledger: Ledger) -> None:
    stock_save: Any = PeftModel.save_pretrained
    stock_init: Any = PeftModel.__init__
    stock_add: Any = PeftModel.add_adapter

    @functools.wraps(stock_save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        note_on_adapters(self)
        stock_save(self, *args, **kwargs)

    @functools.wraps(stock_init)
    def init(self: Any, model: Any, peft_config: Any, adapter_name: str = "default", *args: Any, **kwargs: Any) -> None:
        check_base(model, peft_config, adapter_name)  # prompts and other adapters that nothing injects
        stock_init(self, model, peft_config, adapter_name, *args, **kwargs)

    @functools.wraps(stock_add)
    def add_adapter(self: Any, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        check_base(self.base_model if peft_config.is_prompt_learning else self.base_model.model, peft_config, adapter_name)
        stock_add(self, adapter_name, peft_config, *args, **kwargs)

    ledger.set_attr(PeftModel, "save_pretrained", save_pretrained)
    ledger.set_attr(PeftModel, "__init__", init)
    ledger.set_attr(PeftModel, "add_adapter", add_adapter)


__all__ = ["activate", "check_base", "trained_on"]
