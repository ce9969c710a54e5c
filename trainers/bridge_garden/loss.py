"""The Bridge-Garden loss over per-token quantities (arXiv 2605.26246)::

    L = Σ_t [ λ_t · KL(p_t‖q_t) + (1 - λ_t) · (-log q_t(y_t) + α/4 · Δ_t²) ]

with ``q`` the student, ``p`` the teacher, ``y`` the label. Where one slip spoils the rest (a bridge) the hard label should
count, where many continuations are good (a garden) the teacher's distribution; λ is a guess from the teacher at which it is.
Δ is there in the variant ``risk`` alone: ``Δ_t = logsumexp(f_{t+1}) - f_t(y_t)`` with ``f`` the student's logits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hfplug.trainers.bridge_garden.config import BridgeGardenConfig
from hfplug.trainers.tiles import Tiles


def soft_weight(found: Tiles, config: BridgeGardenConfig, words: int, step: int, steps: int) -> Tensor:
    """λ per token ``(N,)`` in [0, 1], without gradient.

    Args:
        found: of ``N`` tokens, with the labels, the teacher's first word, and for ``power_entropy`` its power sum.
        config: ``variant`` and its numbers.
        words: size of the vocabulary.
        step: optimiser steps done.
        steps: optimiser steps of the whole training.
    """
    if config.garden_variant == "confidence":  # paper
        weight = 1 - found.teacher_top[:, 0].exp()
    elif config.garden_variant == "label_confidence":  # authors' code
        weight = 1 - found.teacher_label.exp()
    elif config.garden_variant == "entropy" or (config.garden_variant == "power_entropy" and config.garden_power == 1):  # paper
        weight = found.teacher_entropy / math.log(words)
    elif config.garden_variant == "power_entropy":  # authors' code
        weight = torch.expm1(found.teacher_power) / math.expm1((1 - config.garden_power) * math.log(words))
    else:
        weight = torch.full_like(found.divergence, static_weight(config, step, steps))
    return weight.detach().clamp(0, 1)


def static_weight(config: BridgeGardenConfig, step: int, steps: int) -> float:
    """λ where it is one number for all tokens: ``soft_weight``, which ``curriculum`` reaches by and by."""
    if config.garden_variant != "curriculum":
        return config.garden_soft_weight
    warmup = config.garden_warmup * steps
    return config.garden_soft_weight * (min(step / warmup, 1.0) if warmup > 0 else 1.0)


def deltas(found: Tiles, followed: Tensor) -> Tensor:
    """Δ per token ``(N,)``, with gradient; 0 where ``followed`` ``(N,)`` says that there is no next token to look at.

    Tokens stand in the order of their sequences, so the next token of a followed one is the next row.
    """
    if not len(followed):
        return found.log_z
    following = torch.cat([found.log_z[1:], found.log_z[-1:]])
    return torch.where(followed, following - found.label_logit, 0)


def hybrid_loss(found: Tiles, weight: Tensor, config: BridgeGardenConfig, followed: Tensor) -> tuple[Tensor, Tensor]:
    """Loss per token ``(N,)``, and Δ ``(N,)`` without gradient (zeros but for ``risk``)."""
    hard = found.log_z - found.label_logit
    delta = torch.zeros_like(hard)
    if config.garden_variant == "risk":
        delta = deltas(found, followed)
        hard = hard + config.garden_risk_weight / 4 * delta.square()
    return weight * found.divergence + (1 - weight) * hard, delta.detach()
