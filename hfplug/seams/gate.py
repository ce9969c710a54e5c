"""The gate of folders that only hfplug reads, with a patched model or weights of a quantizer: without hfplug they do not load.

Opened by stock transformers, such a folder would load with random or left-out weights, and answer. So ``config.json`` names a
weights file that does not exist (``transformers_weights``); transformers then refuses the folder, and the file's name says
what is missing. hfplug takes the name out when it reads the configuration, and refuses a missing plugin where the model is
built. This is a module of its own because the Auto
classes read configurations before any model code, and torch, is imported.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from hfplug.artefacts import patch_records, quantizer_record
from hfplug.ledger import Ledger

GATE_KEY = "transformers_weights"
GATE_PREFIX = "needs hfplug"


def gate(records: list[dict[str, Any]]) -> str:
    """The name of a weights file that says what a folder needs, from the records of its patches and its quantizer."""
    wanted = sorted({str(r["distribution"]) for r in records} | {"hfplug"})
    return f"{GATE_PREFIX} (pip install {' '.join(wanted)}; then import hfplug before loading).safetensors"


def activate(ledger: Ledger) -> None:
    """Write the gate with every configuration that records patches or a quantizer, and open it for who has hfplug."""
    stock_write: Any = PreTrainedConfig.to_json_file
    stock_read: Any = vars(PreTrainedConfig)["get_config_dict"].__func__

    @functools.wraps(stock_write)
    def to_json_file(self: Any, json_file_path: Any, use_diff: bool = True) -> None:
        stock_write(self, json_file_path, use_diff=use_diff)
        packed = quantizer_record(self)
        if records := [*patch_records(self), *([packed] if packed else [])]:
            path = Path(json_file_path)
            written = {**json.loads(path.read_text(encoding="utf-8")), GATE_KEY: gate(records)}
            path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @functools.wraps(stock_read)
    def get_config_dict(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        found, rest = stock_read(cls, *args, **kwargs)
        if str(found.get(GATE_KEY, "")).startswith(GATE_PREFIX):
            found = {k: v for k, v in found.items() if k != GATE_KEY}
        return found, rest

    ledger.set_attr(PreTrainedConfig, "to_json_file", to_json_file)
    ledger.set_attr(PreTrainedConfig, "get_config_dict", classmethod(get_config_dict))


__all__ = ["GATE_KEY", "GATE_PREFIX", "activate", "gate"]
