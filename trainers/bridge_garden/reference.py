"""Bridge-Garden written out over full logits, token by token: what the tiled loss is tested against."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def soft_weight(
    teacher_logits: Tensor, label: int, variant: str, *, fixed: float = 0.5, power: float = 0.5, progress: float = 1.0
) -> float:
    """λ of one token from the teacher's logits ``(V,)``; ``progress``: steps done over the steps of the warm-up."""
    p = teacher_logits.softmax(-1).tolist()
    words = len(p)
    if variant == "confidence":
        return 1 - max(p)
    if variant == "label_confidence":
        return 1 - p[label]
    if variant == "entropy":
        return -sum(x * math.log(x) for x in p if x > 0) / math.log(words)
    if variant == "power_entropy":
        return (sum(x**power for x in p) - 1) / (words ** (1 - power) - 1)
    if variant == "curriculum":
        return fixed * min(progress, 1.0)
    return fixed


def hybrid(
    student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, variant: str, *, risk_weight: float = 0.1, **options: Any
) -> Tensor:
    """Sum of the loss over all labelled tokens of ``(B, T, V)`` logits and ``(B, T)`` labels (already shifted, -100: none)."""
    total = student_logits.new_zeros(())
    for row in range(labels.shape[0]):
        for t in range(labels.shape[1]):
            label = int(labels[row, t])
            if label == -100:
                continue
            log_q, log_p = (x[row, t].log_softmax(-1) for x in (student_logits, teacher_logits))
            soft = (log_p.exp() * (log_p - log_q)).sum()
            hard = -log_q[label]
            if variant == "risk" and t + 1 < labels.shape[1] and int(labels[row, t + 1]) != -100:
                delta = torch.logsumexp(student_logits[row, t + 1], -1) - student_logits[row, t, label]
                hard = hard + risk_weight / 4 * delta**2
            weight = soft_weight(teacher_logits[row, t], label, variant, **options)
            total = total + weight * soft + (1 - weight) * hard
    return total
