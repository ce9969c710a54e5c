"""The grouped matrix product written out row by row in float64: slow and obvious; every path is tested against it."""

from __future__ import annotations

import torch


def expert_of(row: int, offsets: list[int]) -> int:
    """The expert whose run holds the row."""
    return next(e for e in range(len(offsets) - 1) if offsets[e] <= row < offsets[e + 1])


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``y_n = W_e(n) x_n``: ``x`` (N, d_in), ``weight`` (E, d_out, d_in), ``offsets`` (E + 1,); (N, d_out) float64."""
    x, weight, bounds = x.double(), weight.double(), offsets.tolist()
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    for row in range(x.shape[0]):
        out[row] = weight[expert_of(row, bounds)] @ x[row]
    return out


def gradients(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``x`` and ``weight`` for the gradient ``grad`` (N, d_out) of the output; float64."""
    x, weight, grad, bounds = x.double(), weight.double(), grad.double(), offsets.tolist()
    grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
    for row in range(x.shape[0]):
        expert = expert_of(row, bounds)
        grad_x[row] = weight[expert].T @ grad[row]
        grad_weight[expert] += torch.outer(grad[row], x[row])
    return grad_x, grad_weight
