"""NITP written out position by position in Python floats: what :mod:`hfplug.losses.nitp.loss` is tested against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Vector = Sequence[float]


def matvec(matrix: Sequence[Vector], vector: Vector) -> list[float]:
    """``matrix @ vector``."""
    return [sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix]


def swiglu(gate: Sequence[Vector], up: Sequence[Vector], down: Sequence[Vector], h: Vector) -> list[float]:
    """``down(silu(gate h) * (up h))``; weights as ``nn.Linear`` stores them, ``(out, in)``."""
    inner = [g / (1 + math.exp(-g)) * u for g, u in zip(matvec(gate, h), matvec(up, h), strict=True)]
    return matvec(down, inner)


def nitp(
    last: Sequence[Sequence[Vector]],
    early: Sequence[Sequence[Vector]],
    project: Callable[[Vector], Vector],
    *,
    labels: Sequence[Sequence[int]] | None = None,
    attention_mask: Sequence[Sequence[int]] | None = None,
    position_ids: Sequence[Sequence[int]] | None = None,
    eps: float = 1e-6,
) -> tuple[float, int]:
    """Sum of ``1 - cos(P(h_t), z_{t+1})`` over the pairs that count, and their number.

    Args:
        last: ``h``, ``[batch][token][d]``, hidden states after the final norm.
        early: ``z``, same shape, hidden states after the first k layers.
        project: ``P``.
        labels: ``[batch][token]``; given, a pair counts only if the label of ``t + 1`` is not -100.
        attention_mask: ``[batch][token]``, 0 for padding.
        position_ids: ``[batch][token]``; a document starts where they do not increase.
        eps: lower bound of the norms.
    """
    total, count = 0.0, 0
    for row in range(len(last)):
        for t in range(len(last[row]) - 1):
            if labels is not None and labels[row][t + 1] == -100:
                continue
            if attention_mask is not None and not (attention_mask[row][t] and attention_mask[row][t + 1]):
                continue
            if position_ids is not None and position_ids[row][t + 1] <= position_ids[row][t]:
                continue
            p, z = project(last[row][t]), early[row][t + 1]
            dot = sum(a * b for a, b in zip(p, z, strict=True))
            norm_p = max(math.sqrt(sum(a * a for a in p)), eps)
            norm_z = max(math.sqrt(sum(b * b for b in z)), eps)
            total += 1 - dot / (norm_p * norm_z)
            count += 1
    return total, count
