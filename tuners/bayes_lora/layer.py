"""The Bayesian LoRA layer around a linear module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, softplus

from hfplug.optimization import OptimizerGroup
from hfplug.tuners.bayes_lora.config import BayesLoraConfig
from hfplug.tuners.bayes_lora.noise import noise
from hfplug.tuners.bayes_lora.state import ModelState
from hfplug.tuners.linear import ExactBuffers, TunerLinear


class Rho(nn.Module):
    """``σ = softplus(rho)``, a parameter of the shape of what it belongs to, constant at the start."""

    def __init__(self, shape: torch.Size, sigma: float) -> None:
        super().__init__()
        self.rho = nn.Parameter(torch.full(shape, sigma + math.log(-math.expm1(-sigma))))

    def sigma(self) -> torch.Tensor:
        """Standard deviations, float32 or wider: in half precision ``rho`` has no digits left where softplus is small."""
        return softplus(self.rho.to(torch.promote_types(self.rho.dtype, torch.float32)))


def mean_factors(config: BayesLoraConfig, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``A`` and ``s·B``, float32 or wider."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide), b.to(wide) * config.scaling


class BayesLoraLinear(TunerLinear):
    """``W0·x + s·B̃Ã·x`` for ``nn.Linear``, GPT-2's ``Conv1D`` and PEFT's quantised linears.

    In training every forward between two optimizer steps uses one weight sample, a function of ``config.seed``, the number
    of steps taken and the module's name. In evaluation it is the mean, or the sample :func:`posterior` asks for.
    """

    method = "bayes_lora"
    adapter_layer_names = ("bayes_lora_A", "bayes_lora_B", "bayes_lora_rho_A", "bayes_lora_rho_B")
    other_param_names = ("bayes_lora_dropout", "bayes_lora_config", "bayes_lora_steps")
    bayes_lora_state: ModelState | None = None

    def make_containers(self) -> None:
        self.bayes_lora_A: Any = nn.ModuleDict()
        self.bayes_lora_B: Any = nn.ModuleDict()
        self.bayes_lora_rho_A: Any = nn.ModuleDict()
        self.bayes_lora_rho_B: Any = nn.ModuleDict()
        self.bayes_lora_dropout = nn.ModuleDict()
        self.bayes_lora_steps = ExactBuffers()
        self.bayes_lora_config: dict[str, BayesLoraConfig] = {}

    def update_layer(self, adapter_name: str, config: BayesLoraConfig) -> None:
        """Add an adapter of rank ``config.r``."""
        self.check_rank(config.r)
        self.bayes_lora_config[adapter_name] = config
        self.bayes_lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout) if config.lora_dropout else nn.Identity()
        a = self.bayes_lora_A[adapter_name] = nn.Linear(self.in_features, config.r, bias=False)
        b = self.bayes_lora_B[adapter_name] = nn.Linear(config.r, self.out_features, bias=False)
        nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
        if config.init_lora_weights:
            nn.init.zeros_(b.weight)
        # LoRA's A has standard deviation 1/sqrt(3·in); 1/sqrt(r) for B makes the noise of dW·x that of dW itself.
        scale_a, scale_b = 1 / math.sqrt(3 * self.in_features), 1 / math.sqrt(config.r)
        self.bayes_lora_rho_A[adapter_name] = Rho(a.weight.shape, config.sigma_init * scale_a)
        if config.random_factors == "both":
            self.bayes_lora_rho_B[adapter_name] = Rho(b.weight.shape, config.sigma_init * scale_b)
        self.bayes_lora_steps[adapter_name] = torch.zeros((), dtype=torch.int64)
        self.place(adapter_name)

    def factors(self, name: str) -> Iterator[tuple[str, nn.Parameter, Rho]]:
        """``("A" or "B", mean, Rho)`` of each random factor of an adapter."""
        yield "A", self.bayes_lora_A[name].weight, self.bayes_lora_rho_A[name]
        if name in self.bayes_lora_rho_B:
            yield "B", self.bayes_lora_B[name].weight, self.bayes_lora_rho_B[name]

    def optimizer_groups(self) -> list[OptimizerGroup]:
        """No weight decay where the prior acts already (on rho it would pull every sigma to softplus(0)); rho's own rate."""
        groups = []
        for name, config in self.bayes_lora_config.items():
            random = list(self.factors(name))
            groups.append(OptimizerGroup(tuple(mean for _, mean, _ in random), 1.0, 0.0))
            groups.append(OptimizerGroup(tuple(rho.rho for *_, rho in random), config.rho_lr_multiplier, 0.0))
        return groups

    # -- forward ----------------------------------------------------------------------------------------------------------

    def delta(self, name: str, x: torch.Tensor) -> torch.Tensor:
        a, b, config = self.bayes_lora_A[name], self.bayes_lora_B[name], self.bayes_lora_config[name]
        features = self.bayes_lora_dropout[name](self._cast_input_dtype(x, a.weight.dtype))
        if (self.training or torch.is_grad_enabled()) and self.bayes_lora_state is not None:
            self.bayes_lora_state.ran(self, name)
        draw = self.draw(name)
        if draw is None:
            return b(a(features)) * config.scaling
        sampled = {
            "B": b.weight,
            **{factor: self.sample(name, factor, mean, rho, draw) for factor, mean, rho in self.factors(name)},
        }
        return linear(linear(features, sampled["A"]), sampled["B"]) * config.scaling

    def draw(self, name: str) -> tuple[object, ...] | None:
        """Which weight sample to use now; ``None``: the mean."""
        config, chosen = self.bayes_lora_config[name], None if self.bayes_lora_state is None else self.bayes_lora_state.chosen
        if chosen is not None:
            return None if chosen == "mean" else ("posterior", chosen)
        if self.training:
            # A frozen adapter (the reference policy of TRL's trainers) takes no steps, so its sample would never change.
            trains = any(p.requires_grad for _, mean, rho in self.factors(name) for p in (mean, rho.rho))
            return ("step", self.steps(name)) if config.train_mode == "sample" and trains else None
        return ("posterior", config.seed) if config.eval_mode == "sample" else None

    def steps(self, name: str) -> int:
        """Optimizer steps this adapter has taken."""
        return int(self.bayes_lora_steps[name])

    def noise(self, name: str, factor: str, draw: tuple[object, ...], like: torch.Tensor) -> torch.Tensor:
        """The standard normal noise of one factor in one weight sample."""
        return noise((*draw, self.bayes_lora_config[name].seed, self.key, factor), like)

    def sample(self, name: str, factor: str, mean: torch.Tensor, rho: Rho, draw: tuple[object, ...]) -> torch.Tensor:
        """One sample of a factor, in the dtype of its mean; computed in float32 or wider."""
        return (mean + rho.sigma() * self.noise(name, factor, draw, rho.rho)).to(mean.dtype)

    # -- merge ------------------------------------------------------------------------------------------------------------

    def lora_factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """``A`` and ``s·B``: the means."""
        return mean_factors(self.bayes_lora_config[name], self.bayes_lora_A[name].weight, self.bayes_lora_B[name].weight)

    # -- what the run asks --------------------------------------------------------------------------------------------------

    def prepare_training(self, trainer: Any) -> None:
        """Count the training terms of the trainer's dataset, where ``train_size`` is not given."""
        if self.bayes_lora_state is not None:
            self.bayes_lora_state.prepare(trainer, self)

    def hfplug_totals(self) -> dict[str, float]:
        """The KL that training last saw, for the log."""
        return {} if self.bayes_lora_state is None else self.bayes_lora_state.totals(self)
