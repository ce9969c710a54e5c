"""What ReToken and MoRT compute, token by token and from the definitions, in fp64; for tests."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _norm(row: Tensor, norm: str, eps: float) -> Tensor:
    length = math.sqrt(float((row * row).sum()))
    return row / (length + eps) if norm == "l2" else row / (length / math.sqrt(row.numel()) + eps)


def gate(vector: Callable[[int], Tensor | None], ids: Tensor, scale: Tensor, norm: str, eps: float) -> Tensor:
    """``p = 1 + s ⊙ Norm(E[x])`` for each token.

    Args:
        vector: ``E[x]`` of ``(hidden,)`` for a token id; ``None``: it has no row.
        ids: ``(batch, tokens)``.
        scale: ``(hidden,)``.
    """
    out = torch.ones(*ids.shape, scale.numel(), dtype=torch.float64)
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            row = vector(int(ids[b, t]))
            if row is not None:
                out[b, t] = 1 + scale.double() * _norm(row.double(), norm, eps)
    return out


def routed(
    vector: Callable[[int, int], Tensor | None], ids: Tensor, hidden: Tensor, router: Tensor, scale: Tensor, top_k: int,
    depth: int, norm: str, eps: float,
) -> Tensor:  # fmt: skip
    """``dr = (2 N)^-1/2 · s ⊙ Norm(sum_i w_i E_i[x])`` for each token.

    Args:
        vector: ``E_i[x]`` of ``(hidden,)`` for a table and a token id; ``None``: it has no row.
        ids: ``(batch, tokens)``.
        hidden: ``(batch, tokens, hidden)``, what the layer was given.
        router: ``(tables, hidden)``.
        scale: ``(hidden,)``.
    """
    out = torch.zeros(*ids.shape, scale.numel(), dtype=torch.float64)
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            h = hidden[b, t].double()
            h = h / math.sqrt(float((h * h).mean()) + 1e-6)
            g = [float(r.double() @ h) for r in router]
            best = sorted(range(len(g)), key=lambda i: -g[i])[:top_k]
            score = {i: 1 / (1 + math.exp(-g[i])) for i in best}
            if vector(0, int(ids[b, t])) is None:
                continue
            mixed = torch.zeros(scale.numel(), dtype=torch.float64)
            for i in best:
                row = vector(i, int(ids[b, t]))
                assert row is not None
                mixed += score[i] / sum(score.values()) * row.double()
            out[b, t] = (2 * depth) ** -0.5 * scale.double() * _norm(mixed, norm, eps)
    return out


__all__ = ["gate", "routed"]
