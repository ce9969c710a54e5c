"""The options of U-LoRA."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hfplug.errors import ConfigError
from hfplug.seams.tuner import PluginConfig


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class ULoraConfig(PluginConfig):
    """Configuration of U-LoRA ("Adaptive Utilization of Low-Rank Adaptation via Conditioned Gating", ICML 2026; our reading).

    For a target ``Linear`` with code ``z = A·dropout(x)`` in R^r the output is ``W0·x + s·B(util ⊙ z)``, where
    ``util = u + ema_weight·(m - u)``, ``u = 2·sigmoid(q + gate_range·tanh(p))``; ``p`` reads the token's own code, ``q``
    the mean code of the context, and ``m`` is the bias-corrected running mean of ``u`` over optimiser steps.
    """

    method: ClassVar[str] = "ulora"

    r: int = _option(8, "rank of the subspace (as in LoRA)")
    lora_alpha: float = _option(8, "scale: s = lora_alpha / r")
    lora_dropout: float = _option(0.0, "dropout on the input of A, in [0, 1) (as in LoRA)")
    use_rslora: bool = _option(False, "s = lora_alpha / sqrt(r) instead (rank-stabilised LoRA)")
    init_lora_weights: bool = _option(True, "LoRA's initialisation (B = 0); False: B random too, for tests")
    context: Literal["causal", "bidirectional"] = _option(
        "causal", "mean over the tokens so far, or over the whole sequence (encoders only: it leaks the future); our reading"
    )
    force_bidirectional: bool = _option(False, "allow context='bidirectional' on a causal language model")
    gate_input: Literal["code", "hidden"] = _option(
        "code", "what the token's own part of the gate reads: the code in R^r (our reading) or the hidden state in R^d (ablation)"
    )
    gate_range: float = _option(1.0, "delta >= 0: how far a token may move from its context, in logits; our reading")
    ema_decay: float = _option(0.99, "rho in [0, 1): decay of the historical prior per optimiser step; our reading")
    ema_weight: float = _option(0.1, "lambda in [0, 1]: share of the prior in the utilisation; our reading")
    gate_lr_multiplier: float = _option(5.0, "learning rate of the gates over the run's (DISeL); see use_optimizer_groups")
    gate_eps: float = _option(1e-6, "epsilon of the code's normalisation; our reading")
    merge_mode: Literal["refuse", "mean"] = _option(
        "refuse", "merging drops the input dependence: refuse, or merge s·B·diag(m)·A (exact only for ema_weight = 1)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = (
            ("r", isinstance(self.r, int) and self.r > 0, "an integer > 0"),
            ("lora_alpha", self.lora_alpha > 0, "> 0"),
            ("lora_dropout", 0 <= self.lora_dropout < 1, "in [0, 1)"),
            ("gate_range", self.gate_range >= 0, ">= 0"),
            ("ema_decay", 0 <= self.ema_decay < 1, "in [0, 1)"),
            ("ema_weight", 0 <= self.ema_weight <= 1, "in [0, 1]"),
            ("gate_lr_multiplier", self.gate_lr_multiplier > 0, "> 0"),
            ("gate_eps", self.gate_eps > 0, "> 0"),
            ("context", self.context in ("causal", "bidirectional"), "'causal' or 'bidirectional'"),
            ("gate_input", self.gate_input in ("code", "hidden"), "'code' or 'hidden'"),
            ("merge_mode", self.merge_mode in ("refuse", "mean"), "'refuse' or 'mean'"),
        )
        for name, good, allowed in checks:
            if not good:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be {allowed}")

    @property
    def scaling(self) -> float:
        """``s`` of the equations."""
        return float(self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r))
