"""What low-rank tuners share: LoRA's options, the module they stand on, the loop over active adapters, merging, exact buffers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, _get_in_out_features, check_adapters_to_merge
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.packed_adapters import backend_of
from hfplug.seams.tuner import PluginConfig


def option(default: Any, help: str) -> Any:
    """A field of a configuration with its help text."""
    return field(default=default, metadata={"help": help})


@dataclass
class LoraOptions(PluginConfig):
    """The options that a low-rank tuner shares with LoRA, under LoRA's names."""

    r: int = option(8, "rank of the subspace (as in LoRA)")
    lora_alpha: float = option(8, "scale: s = lora_alpha / r")
    lora_dropout: float = option(0.0, "dropout on the input of A, in [0, 1) (as in LoRA)")
    use_rslora: bool = option(False, "s = lora_alpha / sqrt(r) instead (rank-stabilised LoRA)")
    init_lora_weights: bool = option(True, "LoRA's initialisation (B = 0); False: B random too, for tests")

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = ("lora_alpha", "lora_dropout")
        self.require(*((name, isinstance(getattr(self, name), (int, float)), "a number") for name in numbers))
        self.require(
            ("r", isinstance(self.r, int) and self.r > 0, "an integer > 0"),
            ("lora_alpha", self.lora_alpha > 0, "> 0"),
            ("lora_dropout", 0 <= self.lora_dropout < 1, "in [0, 1)"),
        )

    @property
    def scaling(self) -> float:
        """``s`` of the equations."""
        return float(self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r))


class ExactBuffers(BufferDict):
    """Buffers by adapter name, saved with it, that keep dtype and bits through ``model.half()`` and ``model.to(dtype)``.

    In bfloat16 a running mean with decay 0.99 stops moving before it arrives, and a counter stops at 256.
    """

    def __init__(self) -> None:
        super().__init__(persistent=True)

    def _apply(self, fn: Any, recurse: bool = True) -> ExactBuffers:
        former = dict(self.items())
        super()._apply(fn, recurse)
        for name, value in former.items():
            moved = self[name]
            if moved.dtype != value.dtype:
                self[name] = torch.empty_like(moved, dtype=value.dtype) if value.is_meta else value.to(moved.device)
        return self


class TunerLinear(nn.Module, BaseTunerLayer):
    """Base of a tuner layer on ``nn.Linear``, GPT-2's ``Conv1D`` or a quantised linear PEFT knows.

    A subclass sets ``method`` and ``adapter_layer_names``, makes its containers in :meth:`make_containers`, fills them in
    ``update_layer(adapter_name, config)``, and says in :meth:`delta` what an adapter adds to the output (or in :meth:`adapted`,
    where that is no sum over the whole of it).
    """

    method: ClassVar[str]
    if TYPE_CHECKING:  # torch types every attribute of a module as Tensor | Module

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any, key: str) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.key = key
        base = self.get_base_layer()
        self.quantization_backend = backend_of(base)
        if not isinstance(base, (nn.Linear, Conv1D)) and self.quantization_backend is None:
            raise UnsupportedError(
                f"{self.method}: {key!r} is a {type(base).__name__}; supported: nn.Linear, Conv1D and quantised linears known "
                "to PEFT"
            )
        self.in_features, self.out_features = _get_in_out_features(base)
        self.make_containers()
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self._unmerged: tuple[nn.Module, ...] = ()  # the quantised base as it was; in a tuple, so that torch does not register it
        self.cast_input_dtype_enabled = True
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def make_containers(self) -> None:
        """Make the empty containers (keyed by adapter name) of parameters, buffers and settings."""
        raise NotImplementedError

    def check_rank(self, r: int) -> None:
        """Refuse a rank that is no reduction.

        Raises:
            ConfigError: ``r`` exceeds the smaller side of the module.
        """
        if r > min(self.in_features, self.out_features):
            sides = f"{self.in_features}×{self.out_features}"
            raise ConfigError(f"r={r} exceeds the smaller side of {self.key!r} ({sides})")

    def place(self, adapter_name: str) -> None:
        """Bring a new adapter to the device of the base layer; its float buffers keep their dtype."""
        exact = {n: b[adapter_name] for n, b in self.named_children() if isinstance(b, ExactBuffers) and adapter_name in b}
        self._move_adapter_to_device_of_base_layer(adapter_name)
        for name, value in exact.items():
            if not value.is_meta:  # PEFT casts every float buffer to the dtype of the base layer
                container = getattr(self, name)
                container[adapter_name] = value.to(container[adapter_name].device)
        self.set_adapter(self.active_adapters)

    def holds(self, name: str) -> bool:
        """Whether the layer has an adapter of that name."""
        return name in getattr(self, self.adapter_layer_names[0])

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters and self.merged:
            self.unmerge()
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        dtype = result.dtype
        if self.quantization_backend is not None:
            result = self.quantization_backend.maybe_clone_base_result(result)
        for name in self.active_adapters:
            if self.holds(name):
                result = self.adapted(name, x, result)
        return result.to(dtype)

    def adapted(self, name: str, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """``result`` ``(..., out_features)`` with adapter ``name`` added, for the input ``x`` ``(..., in_features)``."""
        return result + self.delta(name, x)

    def delta(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """What adapter ``name`` adds to the output for the input ``x`` ``(..., in_features)``: ``(..., out_features)``."""
        raise NotImplementedError

    # -- merge ------------------------------------------------------------------------------------------------------------

    def lora_factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """``A`` ``(r, in)`` and ``B`` ``(out, r)``, scaling in ``B``, float32 or wider: what merging adds as ``B·A``."""
        raise NotImplementedError

    def check_merge(self, name: str, config: Any) -> None:
        """Refuse merging an adapter by raising; called for every layer before any weight is changed.

        Raises:
            UnsupportedError: the base is quantised, so that merging rounds, and the configuration does not allow that.
        """
        if self.quantization_backend is None or config.merge_quantized:
            return
        raise UnsupportedError(
            f"{self.method}: {self.key!r} is quantised ({self.quantization_backend.backend_name}), so merging adapter {name!r} "
            f"rounds the result to that format; to accept that, set model.peft_config[{name!r}].merge_quantized = True"
        )

    def get_delta_weight(self, name: str) -> torch.Tensor:
        """``B·A`` of :meth:`lora_factors` in the layout of the base weight."""
        a, b = self.lora_factors(name)
        delta = b @ a
        return delta.T if isinstance(self.get_base_layer(), Conv1D) else delta

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add :meth:`get_delta_weight` to the base weight.

        Raises:
            ValueError: ``safe_merge`` and the result is not finite.
        """
        for name in [n for n in check_adapters_to_merge(self, adapter_names) or [] if self.holds(n)]:
            weight = self.get_base_weight()
            merged = (weight + self.get_delta_weight(name).to(weight.device)).to(weight.dtype)
            if safe_merge and not torch.isfinite(merged).all():
                raise ValueError(f"{self.method}: merging adapter {name!r} into {self.key!r} gives values that are not finite")
            if self.quantization_backend is not None and not self.merged_adapters:
                # Subtracting from rounded weights does not give the former ones back, so the module itself is kept.
                self._unmerged = (self.base_layer,)
                self.base_layer = copy.deepcopy(self.base_layer)
            self.set_base_weight(merged)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Take back what was merged: by subtraction (equal up to rounding), or bit for bit on a quantised base."""
        if self._unmerged:
            (self.base_layer,), self._unmerged = self._unmerged, ()
            self.merged_adapters.clear()
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            weight = self.get_base_weight()
            self.set_base_weight((weight - self.get_delta_weight(name).to(weight.device)).to(weight.dtype))

    def __repr__(self) -> str:
        return f"{self.method}.{super().__repr__()}"
