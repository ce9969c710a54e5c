"""PEFT on packed layers: the backend that tuners read and write a base weight through, and LoRA's layer."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from peft.utils import resolve_quantization_backend
from peft.utils.quantization_utils import QuantizationBackend
from torch import nn

from hfplug.errors import UnsupportedError
from hfplug.packed import PackedLinear


class PackedBackend(QuantizationBackend):
    """Reads and writes the weight of a :class:`~hfplug.packed.PackedLinear` for a tuner.

    Merging rounds, and subtracting does not give the former weight back; so only tuners of hfplug, which ask for a flag,
    measure the difference and keep the former layer, may write.
    """

    supports_merge = False  # PEFT's own tuners ask this; those of hfplug do not
    layer_type = "linear"

    def __init__(self, base_layer: PackedLinear) -> None:
        self.backend_name = type(base_layer).method

    def get_base_weight(self, base_layer: nn.Module) -> torch.Tensor:
        """The weight ``(out, in)`` in float32."""
        assert isinstance(base_layer, PackedLinear)
        return base_layer.unpack(torch.float32)

    def set_base_weight(self, peft_layer: Any, weight_data: torch.Tensor) -> None:
        """Pack a weight ``(out, in)`` into the layer.

        Raises:
            UnsupportedError: the tuner is not one that asks before it rounds.
        """
        if not hasattr(peft_layer, "check_merge"):
            raise UnsupportedError(_no_merge(type(peft_layer).__name__, self.backend_name))
        base = peft_layer.get_base_layer()
        base.load(base.pack(weight_data, base.config))


def backend_of(base_layer: nn.Module) -> QuantizationBackend | None:
    """How the weight of a quantised layer is read and written, PEFT's backends and ours; ``None``: it is not quantised."""
    if isinstance(base_layer, PackedLinear):
        return PackedBackend(base_layer)
    found: QuantizationBackend | None = resolve_quantization_backend(base_layer)
    return found


_INITS = (True, False, "gaussian", "eva")


class PackedLoraLinear(lora.Linear):
    """LoRA on a packed layer: forward and training as on an ordinary one, no merging."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        return {(): None}  # PEFT refuses the others by name: they read or change the base weight

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """As PEFT's.

        Raises:
            UnsupportedError: an initialisation that reads or changes the base weight.
        """
        if config.init_lora_weights not in _INITS:
            raise UnsupportedError(
                f"init_lora_weights={config.init_lora_weights!r} reads or changes the base weight, which is packed; use one of "
                f"{_INITS}, or load the model with dequantize=True"
            )
        super().update_layer(adapter_name, r, lora_alpha, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused: it would round the sum, and could not be taken back."""
        raise UnsupportedError(_no_merge("LoRA", self.get_base_layer().method))


def _no_merge(tuner: str, method: str) -> str:
    return (
        f"merging {tuner} into weights packed by {method!r} would round the result and could not be undone. Load the model with "
        f"quantization_config={{'quant_method': {method!r}, 'dequantize': True}} and the adapter on top, and merge there; or "
        "use a tuner of hfplug with merge_quantized=True"
    )


__all__ = ["PackedBackend", "PackedLoraLinear", "backend_of"]
