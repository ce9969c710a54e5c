"""PEFT on models of a quantizer: LoRA, tuners that read the base weight, and ``target_modules="all-linear"``.

PEFT decides by closed chains of ``isinstance``, imported by name into many modules; each of those names is set through the
ledger.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import peft.tuners.lora.model
import peft.tuners.tuners_utils
import peft.utils.quantization_utils
from peft.tuners.tuners_utils import BaseTunerLayer

from hfplug.ledger import Ledger
from hfplug.packed import PackedLinear
from hfplug.packed_adapters import PackedBackend, PackedLoraLinear


def activate(ledger: Ledger) -> None:
    """Let PEFT see packed layers as linear ones."""
    stock_backend: Any = peft.utils.quantization_utils.resolve_quantization_backend
    stock_dispatch: Any = peft.tuners.lora.model.dispatch_default
    stock_all: Any = peft.tuners.tuners_utils._maybe_include_all_linear_layers

    @functools.wraps(stock_backend)
    def resolve_quantization_backend(base_layer: Any, **kwargs: Any) -> Any:
        return PackedBackend(base_layer) if isinstance(base_layer, PackedLinear) else stock_backend(base_layer, **kwargs)

    @functools.wraps(stock_dispatch)
    def dispatch_default(target: Any, adapter_name: str, config: Any, parameter_name: Any = None, **kwargs: Any) -> Any:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, PackedLinear) and parameter_name is None:
            return PackedLoraLinear(target, adapter_name, config=config, **kwargs)
        return stock_dispatch(target, adapter_name, config=config, parameter_name=parameter_name, **kwargs)

    @functools.wraps(stock_all)
    def include_all(peft_config: Any, model: Any) -> Any:
        asked = getattr(peft_config, "target_modules", None)
        everything = isinstance(asked, str) and asked.lower() == "all-linear"
        found = stock_all(peft_config, model)
        if everything:
            wrapped = [f"{name}." for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)]
            packed = (name for name, m in model.named_modules() if isinstance(m, PackedLinear))
            found.target_modules |= {name for name in packed if not name.startswith(tuple(wrapped))}
        return found

    replaced = {
        "resolve_quantization_backend": (stock_backend, resolve_quantization_backend),
        "_maybe_include_all_linear_layers": (stock_all, include_all),
    }
    for module in [module for name, module in list(sys.modules.items()) if name.startswith("peft.") and module is not None]:
        for attribute, (stock, ours) in replaced.items():
            if vars(module).get(attribute) is stock:
                ledger.set_attr(module, attribute, ours)
    ledger.set_attr(peft.tuners.lora.model, "dispatch_default", dispatch_default)
