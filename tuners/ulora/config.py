"""The options of U-LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hfplug.tuners.linear import LoraOptions, option


@dataclass
class ULoraConfig(LoraOptions):
    """Configuration of U-LoRA ("Adaptive Utilization of Low-Rank Adaptation via Conditioned Gating", ICML 2026; our reading).

    For a target ``Linear`` with code ``z = A·dropout(x)`` in R^r the output is ``W0·x + s·B(util ⊙ z)``, where
    ``util = u + ema_weight·(m - u)``, ``u = 2·sigmoid(q + gate_range·tanh(p))``; ``p`` reads the token's own code, ``q``
    the mean code of the context, and ``m`` is the bias-corrected running mean of ``u`` over optimiser steps.
    """

    method: ClassVar[str] = "ulora"

    context: Literal["causal", "bidirectional"] = option(
        "causal", "mean over the tokens so far, or over the whole sequence (encoders only: it leaks the future); our reading"
    )
    force_bidirectional: bool = option(False, "allow context='bidirectional' on a causal language model")
    gate_input: Literal["code", "hidden"] = option(
        "code", "what the token's own part of the gate reads: the code in R^r (our reading) or the hidden state in R^d (ablation)"
    )
    gate_range: float = option(1.0, "delta >= 0: how far a token may move from its context, in logits; our reading")
    ema_decay: float = option(0.99, "rho in [0, 1): decay of the historical prior per optimiser step; our reading")
    ema_weight: float = option(0.1, "lambda in [0, 1]: share of the prior in the utilisation; our reading")
    gate_lr_multiplier: float = option(5.0, "learning rate of the gates over the run's (DISeL); see use_optimizer_groups")
    gate_eps: float = option(1e-6, "epsilon of the code's normalisation; our reading")
    merge_mode: Literal["refuse", "mean"] = option(
        "refuse", "merging drops the input dependence: refuse, or merge s·B·diag(m)·A (exact only for ema_weight = 1)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            ("gate_range", self.gate_range >= 0, ">= 0"),
            ("ema_decay", 0 <= self.ema_decay < 1, "in [0, 1)"),
            ("ema_weight", 0 <= self.ema_weight <= 1, "in [0, 1]"),
            ("gate_lr_multiplier", self.gate_lr_multiplier > 0, "> 0"),
            ("gate_eps", self.gate_eps > 0, "> 0"),
            ("context", self.context in ("causal", "bidirectional"), "'causal' or 'bidirectional'"),
            ("gate_input", self.gate_input in ("code", "hidden"), "'code' or 'hidden'"),
            ("merge_mode", self.merge_mode in ("refuse", "mean"), "'refuse' or 'mean'"),
        )
