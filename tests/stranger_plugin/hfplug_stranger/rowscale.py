"""The tuner: ``y = base(x) · (1 + s)`` with a trained vector ``s`` per module."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfplug.seams.tuner import PluginConfig, PluginTuner


@dataclass
class RowScaleConfig(PluginConfig):
    """Options of rowscale."""

    method: ClassVar[str] = "rowscale"

    strength: float = field(default=1.0, metadata={"help": "the factor is 1 + strength · s"})


class RowScaleLinear(nn.Module, BaseTunerLayer):
    """A linear module whose outputs are scaled."""

    adapter_layer_names = ("rowscale_s",)
    other_param_names = ("rowscale_strength",)

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: RowScaleConfig, key: str) -> None:
        super().__init__()
        self.base_layer, self.key = base_layer, key
        self.rowscale_s = nn.ParameterDict()
        self.rowscale_strength: dict[str, float] = {}
        self.merged_adapters: list[str] = []
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: RowScaleConfig) -> None:
        """Add an adapter."""
        base = self.get_base_layer()
        if not isinstance(base, (nn.Linear, Conv1D)):
            raise TypeError(f"rowscale: {self.key!r} is a {type(base).__name__}; only linear modules are supported")
        features = base.nf if isinstance(base, Conv1D) else base.out_features
        self.rowscale_s[adapter_name] = nn.Parameter(torch.zeros(features))
        self.rowscale_strength[adapter_name] = config.strength
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters)

    def factor(self, names: list[str]) -> Any:
        """The product of the factors of some adapters."""
        found: Any = 1.0
        for name in names:
            if name in self.rowscale_s:
                found = found * (1 + self.rowscale_strength[name] * self.rowscale_s[name])
        return found

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the base module's."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        return (result * self.factor(self.active_adapters)).to(result.dtype)

    def _multiply(self, factor: torch.Tensor) -> None:
        base = self.get_base_layer()
        base.weight.data = base.weight.data * (factor if isinstance(base, Conv1D) else factor[:, None])
        if base.bias is not None:
            base.bias.data = base.bias.data * factor

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Multiply the factor into weight and bias."""
        for name in check_adapters_to_merge(self, adapter_names) or []:
            if name in self.rowscale_s:
                self._multiply(self.factor([name]).detach())
                self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Divide it out again."""
        while self.merged_adapters:
            self._multiply(1 / self.factor([self.merged_adapters.pop()]).detach())


class RowScaleModel(PluginTuner):
    """The tuner."""

    method = "rowscale"
    tuner_layer_cls = RowScaleLinear
