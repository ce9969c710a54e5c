"""The U-LoRA layer around a linear module."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hfplug.calls import Call
from hfplug.errors import UnsupportedError
from hfplug.optimization import OptimizerGroup
from hfplug.tuners.linear import ExactBuffers, TunerLinear
from hfplug.tuners.ulora.config import ULoraConfig
from hfplug.tuners.ulora.gate import Gate, context_mean, normalised
from hfplug.tuners.ulora.state import ModelState


def mean_factors(config: ULoraConfig, a: torch.Tensor, b: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``A`` and ``s·B·diag(m)``: an adapter with its mean utilisation ``m`` ``(r,)``, float32 or wider."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide), b.to(wide) * mean.to(b.device, wide) * config.scaling


class ULoraLinear(TunerLinear):
    """``W0·x + s·B(util ⊙ A·x)`` for ``nn.Linear``, GPT-2's ``Conv1D`` and PEFT's quantised linears.

    Shapes: input ``(batch, tokens, in_features)``; the code and the utilisation are ``(batch, tokens, r)``, computed in
    float32 (float64 for float64 inputs) whatever the dtype of the adapter.
    """

    method = "ulora"
    adapter_layer_names = ("ulora_A", "ulora_B", "ulora_gate")
    other_param_names = ("ulora_ema", "ulora_steps", "ulora_dropout", "ulora_config", "ulora_pending")
    ulora_state: ModelState | None = None

    def make_containers(self) -> None:
        self.ulora_A: Any = nn.ModuleDict()  # Any: what a ModuleDict holds is a Module to mypy, not a Linear
        self.ulora_B: Any = nn.ModuleDict()
        self.ulora_gate = nn.ModuleDict()
        self.ulora_dropout = nn.ModuleDict()
        self.ulora_ema, self.ulora_steps = ExactBuffers(), ExactBuffers()
        self.ulora_config: dict[str, ULoraConfig] = {}
        self.ulora_pending: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def update_layer(self, adapter_name: str, config: ULoraConfig) -> None:
        """Add an adapter of rank ``config.r``."""
        self.check_rank(config.r)
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
        self.place(adapter_name)

    def optimizer_groups(self) -> list[OptimizerGroup]:
        """The gates' own learning rate, without weight decay."""
        return [
            OptimizerGroup(tuple(self.ulora_gate[name].parameters()), config.gate_lr_multiplier, 0.0)
            for name, config in self.ulora_config.items()
        ]

    # -- forward ----------------------------------------------------------------------------------------------------------

    def delta(self, name: str, x: torch.Tensor) -> torch.Tensor:
        a, b = self.ulora_A[name], self.ulora_B[name]
        features = self._cast_input_dtype(x, a.weight.dtype)
        z = a(self.ulora_dropout[name](features))
        utilised = self._utilisation(name, z, features).to(z.dtype) * z
        return b(utilised) * self.ulora_config[name].scaling

    def _utilisation(self, name: str, z: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        if z.dim() != 3:
            raise UnsupportedError(
                f"ulora: {self.key!r} was called with an input of {z.dim()} dimensions; the gate needs (batch, tokens, features)"
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
                    f"ulora: {self.key!r} sees {tuple(z.shape[:2])} tokens in a call of {(call.batch, call.length)}; "
                    "leave modules that work on another sequence out of target_modules"
                )
            valid, restarts = call.attention_mask, call.restarts
            past = state.past(call, (self.key, name)) if state is not None else None
        bidirectional = config.context == "bidirectional"
        if bidirectional and past is not None:
            raise UnsupportedError("ulora: context='bidirectional' cannot be decoded with a cache")
        mean, total, count = context_mean(code, valid, restarts, past, bidirectional)
        token = code if config.gate_input == "code" else normalised(features.to(z.dtype), config.gate_eps)
        u = self.ulora_gate[name](token, mean)
        if call is not None and scope is not None and not scope.recompute:
            if not bidirectional:
                call.memo.setdefault("ulora", {})[self.key, name] = (total.detach(), count.detach())
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

    def lora_factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.ulora_A[name].weight, self.ulora_B[name].weight
        return mean_factors(self.ulora_config[name], a, b, self.ulora_ema[name])

    def check_merge(self, name: str, config: ULoraConfig) -> None:
        if config.merge_mode == "refuse":
            raise UnsupportedError(
                f"ulora: the utilisation of adapter {name!r} depends on the input, so it cannot be merged exactly. To merge "
                f"its mean instead, set model.peft_config[{name!r}].merge_mode = 'mean'"
            )
        super().check_merge(name, config)
