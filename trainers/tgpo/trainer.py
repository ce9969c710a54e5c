"""TGPO's ratios and surrogates on the shared GRPO loss. Our reading of an abstract; docs/methods/tgpo.md gives the equations.

With ``d_t`` the log-ratio of a token, ``s`` its mean over the sequence, ``e_t = d_t - s`` and ``A`` the advantage::

    g_t = exp(-e_t² / 2τ²)                         trust in the token (detached)
    l_t = s + g_t i_t e_t,    ρ_t = exp(l_t)       |l_t - s| <= τ exp(-1/2) whatever e_t is
    w   = w_min + (1 - w_min) exp(-s² / 2κ²)       trust in the sequence (detached), never 0 unless w_min is
    clip:   -w min(ρ_t A, clip(ρ_t) A)
    retain: -w sg[clip(ρ_t)] A log π(y_t)          the gradient is bounded but never clipped away
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hfplug.seams.trainer import MethodTrainer
from hfplug.trainers.grpo_base import GRPOBaseTrainer, Rollout, masked_mean
from hfplug.trainers.tgpo.config import TGPOConfig


class TGPOTrainer(MethodTrainer, GRPOBaseTrainer):
    """``GRPOTrainer`` with trust-gated ratios; its arguments are those of ``GRPOTrainer``, ``args`` a ``TGPOConfig``.

    Logged besides GRPO's metrics: ``tgpo/trust`` (mean gate over tokens) and ``tgpo/weight`` (mean weight over sequences).
    """

    method = "tgpo"
    config_class = TGPOConfig

    def check(self, config: TGPOConfig, given: Mapping[str, Any]) -> None:
        """Warn where every ratio will be 1."""
        per_generation = config.steps_per_generation or config.gradient_accumulation_steps
        if config.num_iterations == 1 and per_generation <= config.gradient_accumulation_steps:
            warnings.warn(
                f"tgpo: num_iterations=1 with steps_per_generation={per_generation} <= gradient_accumulation_steps="
                f"{config.gradient_accumulation_steps} is on-policy: every ratio is 1, TGPO equals GRPO; set num_iterations > 1",
                UserWarning,
                stacklevel=3,
            )

    def log_weights(self, rollout: Rollout) -> Tensor:
        """``l_t``, ``(B, T)``; a token that does not count gets 0."""
        args: TGPOConfig = self.args
        counted = rollout.mask.bool()
        ratio = rollout.log_ratio.masked_fill(~counted, 0.0)  # garbage at padding must not become 0 * inf
        if args.tgpo_anchor == "token":
            return ratio
        anchor = masked_mean(ratio, rollout.mask).unsqueeze(-1)
        residual = (ratio - anchor).masked_fill(~counted, 0.0)
        gate = trust_gate(residual, args.tgpo_tau, args.gate_constant)
        self.log_metric("trust", (gate * counted).sum(), counted.sum())
        if args.tgpo_info_quantile is not None:
            gate = gate * information(rollout.entropies, counted, args.tgpo_info_quantile)
        return (anchor + gate * residual).masked_fill(~counted, 0.0)

    def token_loss(self, rollout: Rollout, log_weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Either surrogate, times the weight of the sequence."""
        args: TGPOConfig = self.args
        weight = self._weight(rollout)
        if args.tgpo_surrogate == "clip":
            loss, shown = super().token_loss(rollout, log_weights)
            return weight * loss, shown
        bounded = torch.exp(log_weights).clamp(1 - self.epsilon_low, 1 + self.epsilon_high).detach()
        return -weight * bounded * rollout.advantages * rollout.logps, {}

    def kl_ratio(self, rollout: Rollout, log_weights: Tensor) -> Tensor:
        """The plain ratio of the token: what the KL is corrected for is the sampling, not the update."""
        return torch.exp(rollout.log_ratio)

    def _weight(self, rollout: Rollout) -> Tensor:
        args: TGPOConfig = self.args
        drift = masked_mean(rollout.log_ratio.masked_fill(~rollout.mask.bool(), 0.0), rollout.mask)
        weight = sequence_weight(drift, args.tgpo_kappa, args.tgpo_w_min)
        self.log_metric("weight", weight.sum(), len(weight))
        return weight.unsqueeze(-1)


def trust_gate(residual: Tensor, tau: float, constant: float | None = None) -> Tensor:
    """``exp(-e²/2τ²)`` of residuals of any shape, in (0, 1], without gradient; or a constant."""
    residual = residual.detach()
    if constant is not None:
        return torch.full_like(residual, constant)
    return torch.exp(-(residual.float() ** 2) / (2 * tau**2))


def sequence_weight(drift: Tensor, kappa: float | None, least: float) -> Tensor:
    """``w_min + (1 - w_min) exp(-s²/2κ²)`` of the mean log-ratios ``(B,)``, without gradient; 1 without ``kappa``."""
    drift = drift.detach()
    if kappa is None:
        return torch.ones_like(drift)
    return least + (1 - least) * torch.exp(-(drift.float() ** 2) / (2 * kappa**2))


def information(entropies: Tensor, counted: Tensor, quantile: float) -> Tensor:
    """``min(1, H_t / H_q)``, ``(B, T)``, without gradient; ``H_q`` over the counted tokens of this micro-batch and rank."""
    entropies = entropies.detach().float()
    known = entropies[counted]
    if known.numel() == 0:
        return torch.ones_like(entropies)
    bound = torch.quantile(known, quantile)
    return torch.where(bound > 0, (entropies / bound.clamp(min=torch.finfo(bound.dtype).tiny)).clamp(max=1.0), 1.0)
