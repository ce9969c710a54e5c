"""The U-LoRA layer around a linear module."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, _get_in_out_features, check_adapters_to_merge
from peft.utils import resolve_quantization_backend
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfplug.calls import Call
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.optimization import OptimizerGroup
from hfplug.tuners.ulora.config import ULoraConfig
from hfplug.tuners.ulora.gate import Gate, context_mean, normalised
from hfplug.tuners.ulora.state import ModelState


class ExactBuffers(BufferDict):
    """Buffers by adapter name, saved with it, that keep dtype and bits through ``model.half()`` and ``model.to(dtype)``.

    In bfloat16 a running mean with decay 0.99 stops moving before it arrives.
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


class ULoraLinear(nn.Module, BaseTunerLayer):
    """``W0·x + s·B(util ⊙ A·x)`` for ``nn.Linear``, GPT-2's ``Conv1D`` and PEFT's quantised linears.

    Shapes: input ``(batch, tokens, in_features)``; the code and the utilisation are ``(batch, tokens, r)``, computed in
    float32 (float64 for float64 inputs) whatever the dtype of the adapter.
    """

    adapter_layer_names = ("ulora_A", "ulora_B", "ulora_gate")
    if TYPE_CHECKING:  # torch types every attribute of a module as Tensor | Module

        def __getattr__(self, name: str) -> Any: ...

    other_param_names = ("ulora_ema", "ulora_steps", "ulora_dropout", "ulora_config", "ulora_pending")

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: ULoraConfig, key: str) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.ulora_key = key
        self.ulora_state: ModelState | None = None
        base = self.get_base_layer()
        self.quantization_backend = resolve_quantization_backend(base)
        if not isinstance(base, (nn.Linear, Conv1D)) and self.quantization_backend is None:
            raise UnsupportedError(
                f"ulora: {key!r} is a {type(base).__name__}; supported: nn.Linear, Conv1D and quantised linears known to PEFT"
            )
        self.in_features, self.out_features = _get_in_out_features(base)
        self.ulora_A: Any = nn.ModuleDict()  # Any: what a ModuleDict holds is a Module to mypy, not a Linear
        self.ulora_B: Any = nn.ModuleDict()
        self.ulora_gate = nn.ModuleDict()
        self.ulora_dropout = nn.ModuleDict()
        self.ulora_ema, self.ulora_steps = ExactBuffers(), ExactBuffers()
        self.ulora_config: dict[str, ULoraConfig] = {}
        self.ulora_pending: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self.cast_input_dtype_enabled = True
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: ULoraConfig) -> None:
        """Add an adapter of rank ``config.r``."""
        if config.r > min(self.in_features, self.out_features):
            sides = f"{self.in_features}×{self.out_features}"
            raise ConfigError(f"r={config.r} exceeds the smaller side of {self.ulora_key!r} ({sides})")
        self.ulora_config[adapter_name] = config
        self.ulora_dropout[adapter_name] = nn.Dropout(config.lora_dropout) if config.lora_dropout else nn.Identity()
        self.ulora_A[adapter_name] = nn.Linear(self.in_features, config.r, bias=False)
        self.ulora_B[adapter_name] = nn.Linear(config.r, self.out_features, bias=False)
        token_features = config.r if config.gate_input == "code" else self.in_features
        self.ulora_gate[adapter_name] = Gate(config.r, token_features, config.gate_range)
        self.ulora_ema[adapter_name] = torch.ones(config.r)
        self.ulora_steps[adapter_name] = torch.zeros((), dtype=torch.int64)
        nn.init.kaiming_uniform_(self.ulora_A[adapter_name].weight, a=math.sqrt(5))
        if config.init_lora_weights:
            nn.init.zeros_(self.ulora_B[adapter_name].weight)
        ema = self.ulora_ema[adapter_name]
        self._move_adapter_to_device_of_base_layer(adapter_name)
        if not ema.is_meta:  # PEFT casts every float buffer to the dtype of the base layer
            self.ulora_ema[adapter_name] = ema.to(self.ulora_ema[adapter_name].device)
        self.set_adapter(self.active_adapters)

    def optimizer_groups(self) -> list[OptimizerGroup]:
        """The gates' own learning rate, without weight decay."""
        return [
            OptimizerGroup(tuple(self.ulora_gate[name].parameters()), config.gate_lr_multiplier, 0.0)
            for name, config in self.ulora_config.items()
        ]

    # -- forward ----------------------------------------------------------------------------------------------------------

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
            if name in self.ulora_A:
                a, b = self.ulora_A[name], self.ulora_B[name]
                features = self._cast_input_dtype(x, a.weight.dtype)
                z = a(self.ulora_dropout[name](features))
                utilised = self._utilisation(name, z, features).to(z.dtype) * z
                result = result + b(utilised) * self.ulora_config[name].scaling
        return result.to(dtype)

    def _utilisation(self, name: str, z: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        if z.dim() != 3:
            raise UnsupportedError(
                f"ulora: {self.ulora_key!r} was called with an input of {z.dim()} dimensions; "
                "the gate needs (batch, tokens, features)"
            )
        with torch.autocast(z.device.type, enabled=False):  # which would put the gate and the counts of tokens in bfloat16
            return self._gated(name, z if z.dtype == torch.float64 else z.float(), features)

    def _gated(self, name: str, z: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        config, state = self.ulora_config[name], self.ulora_state
        scope = state.scope if state is not None else None
        call = scope.current if scope is not None else None
        code = normalised(z, config.gate_eps)
        valid, restarts, past = None, None, None
        if call is not None and call.length:
            if z.shape[:2] != (call.batch, call.length):
                raise UnsupportedError(
                    f"ulora: {self.ulora_key!r} sees {tuple(z.shape[:2])} tokens in a call of {(call.batch, call.length)}; "
                    "leave modules that work on another sequence out of target_modules"
                )
            valid, restarts = call.attention_mask, call.restarts
            past = state.past(call, (self.ulora_key, name)) if state is not None else None
        bidirectional = config.context == "bidirectional"
        if bidirectional and past is not None:
            raise UnsupportedError("ulora: context='bidirectional' cannot be decoded with a cache")
        mean, total, count = context_mean(code, valid, restarts, past, bidirectional)
        token = code if config.gate_input == "code" else normalised(features.to(z.dtype), config.gate_eps)
        u = self.ulora_gate[name](token, mean)
        if call is not None and scope is not None and not scope.recompute:
            if not bidirectional:
                call.memo.setdefault("ulora", {})[self.ulora_key, name] = (total.detach(), count.detach())
            if self.training and call.grad:
                self._collect(name, u.detach(), call)
        return u + config.ema_weight * (self.ulora_ema[name].to(u.dtype) - u)

    def _collect(self, name: str, u: torch.Tensor, call: Call) -> None:
        valid = call.attention_mask
        if valid is None:
            total, count = u.sum((0, 1)), u.new_tensor(u.shape[0] * u.shape[1])
        else:
            total, count = (u * valid.unsqueeze(-1)).sum((0, 1)), valid.sum().to(u.dtype)
        if name in self.ulora_pending:
            total, count = total + self.ulora_pending[name][0], count + self.ulora_pending[name][1]
        self.ulora_pending[name] = (total, count)

    def fold_ema(self, name: str, mean: torch.Tensor) -> None:
        """One optimiser step of the bias-corrected running mean.

        ``ulora_ema`` holds the corrected value itself: ``m_s/(1-rho^s)`` obeys ``m += w·(mean - m)`` with
        ``w = (1-rho)/(1-rho^s)``, which is exact at the first step (w = 1) and on a constant stream.
        """
        rho = self.ulora_config[name].ema_decay
        self.ulora_steps[name] += 1
        weight = (1 - rho) / (1 - rho ** int(self.ulora_steps[name]))
        ema = self.ulora_ema[name]
        ema.copy_(torch.lerp(ema, mean.to(ema), weight))

    # -- merge ------------------------------------------------------------------------------------------------------------

    def get_delta_weight(self, name: str) -> torch.Tensor:
        """``s·B·diag(m)·A`` in the layout of the base weight, float32 or wider: the adapter with its mean utilisation."""
        a, b = self.ulora_A[name].weight, self.ulora_B[name].weight
        wide = torch.promote_types(a.dtype, torch.float32)
        delta = (b.to(wide) * self.ulora_ema[name].to(b.device, wide)) @ a.to(wide) * self.ulora_config[name].scaling
        return delta.T if isinstance(self.get_base_layer(), Conv1D) else delta

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge the mean utilisation, if the configuration asks for it.

        Raises:
            UnsupportedError: ``merge_mode`` is ``"refuse"``.
            ValueError: ``safe_merge`` and the result is not finite.
        """
        names = [n for n in check_adapters_to_merge(self, adapter_names) or [] if n in self.ulora_A]
        for name in names:
            if self.ulora_config[name].merge_mode == "refuse":
                raise UnsupportedError(
                    f"ulora: the utilisation of adapter {name!r} depends on the input, so it cannot be merged exactly. To merge "
                    f"its mean instead, set model.peft_config[{name!r}].merge_mode = 'mean'"
                )
        for name in names:
            weight = self.get_base_weight()
            merged = (weight + self.get_delta_weight(name).to(weight.device)).to(weight.dtype)
            if safe_merge and not torch.isfinite(merged).all():
                raise ValueError(f"ulora: merging adapter {name!r} into {self.ulora_key!r} gives values that are not finite")
            self.set_base_weight(merged)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Subtract what was merged (equal up to rounding; a quantised base keeps the rounding of its format)."""
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            weight = self.get_base_weight()
            self.set_base_weight((weight - self.get_delta_weight(name).to(weight.device)).to(weight.dtype))

    def __repr__(self) -> str:
        return "ulora." + super().__repr__()
