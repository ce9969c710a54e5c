"""The loss written out row by row in plain numbers: what :class:`DRIFTTrainer` is tested against."""

from __future__ import annotations

import math
from collections.abc import Sequence


def cross_entropies(logits: Sequence[Sequence[float]], labels: Sequence[int]) -> list[float]:
    """Cross entropies of one row at its labelled positions; ``logits[t]`` predicts ``labels[t + 1]``, -100 is no label."""
    found = []
    for scores, label in zip(logits, labels[1:], strict=False):
        if label != -100:
            top = max(scores)
            found.append(top + math.log(math.fsum(math.exp(s - top) for s in scores)) - scores[label])
    return found


def drift_loss(losses: Sequence[Sequence[float]], weights: Sequence[float], normalization: str) -> float:
    """The loss of one optimizer step.

    Args:
        losses: per row, the cross entropies of its labelled tokens.
        weights: one per row.
        normalization: ``"sequence"``: ``mean_i w_i mean_t l_it``; ``"token"``: ``sum_i w_i sum_t l_it / number of tokens``;
            ``"weight"``: ``sum_i w_i mean_t l_it / sum_i w_i``.
    """
    if normalization == "token":
        tokens = sum(map(len, losses))
        return math.fsum(w * math.fsum(row) for w, row in zip(weights, losses, strict=True)) / max(tokens, 1)
    rows = math.fsum(w * math.fsum(row) / len(row) for w, row in zip(weights, losses, strict=True) if row)
    total = len(weights) if normalization == "sequence" else math.fsum(weights)
    return rows / total if total else 0.0
