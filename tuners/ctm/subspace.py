"""The shared subspaces: Tucker-2 of the stack of updates by higher-order orthogonal iteration (HOOI) with HOSVD start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Subspaces:
    """Orthonormal bases, ordered by what they hold.

    Attributes:
        U: ``(p, min(p, rank))``: leading left singular vectors of ``[X_1·V, ..., X_T·V]``.
        V: ``(q, min(q, rank))``: leading left singular vectors of ``[X_1ᵀ·U, ..., X_Tᵀ·U]``.
        objective: ``sum_t ‖Uᵀ·X_t·V‖²`` of the start (HOSVD) and after each iteration; it never falls.
    """

    U: Tensor
    V: Tensor
    objective: tuple[float, ...]

    @property
    def iterations(self) -> int:
        """Iterations done."""
        return len(self.objective) - 1


def rescaled(cores: Tensor, beta: float) -> Tensor:
    """The targets ``X_t``, with norms ``beta·‖M_t‖ + (1 - beta)·mean_s ‖M_s‖``; zero where ``M_t`` is.

    Args:
        cores: ``(T, p, q)``. The mean is over those that are not zero: an adapter that was never trained has no say.
    """
    norms = torch.linalg.matrix_norm(cores)
    trained = norms > 0
    if not bool(trained.any()):
        return cores
    wanted = beta * norms + (1 - beta) * norms[trained].mean()
    return cores * torch.where(trained, wanted / norms.where(trained, 1), 0)[:, None, None]


def subspaces(targets: Tensor, rank: int, iterations: int, tolerance: float) -> Subspaces:
    """Maximise ``sum_t ‖Uᵀ·X_t·V‖²`` over ``U`` and ``V`` with orthonormal columns, ``rank`` of them or all there can be.

    The result is canonical up to signs: singular vectors in order, no rotation of them, because rules that work entry by entry
    depend on the basis. The problem is not convex: cheaper steps than whole half-steps can end at another maximum.

    Args:
        targets: ``(T, p, q)``, float64.
        rank: columns wanted.
        iterations: the most to do.
        tolerance: stop when the relative reconstruction error ``sqrt(1 - objective / sum ‖X_t‖²)`` changes by less.
    """
    total = float(targets.square().sum())
    # The start: HOSVD from Gram matrices, a quarter of the time. What they round away, HOOI finds again.
    U, V = (torch.linalg.eigh(wide @ wide.T).eigenvectors[:, -rank:] for wide in (_wide(targets), _wide(targets.mT)))
    objective = [float((U.T @ targets @ V).square().sum())]
    while len(objective) <= iterations:
        U = _leading(_wide(targets @ V), rank)
        V = _leading(_wide(targets.mT @ U), rank)
        objective.append(float((U.T @ targets @ V).square().sum()))
        if abs(_error(objective[-2], total) - _error(objective[-1], total)) <= tolerance:
            break
    return Subspaces(U, V, tuple(objective))


def _leading(matrix: Tensor, rank: int) -> Tensor:
    """The ``rank`` leading left singular vectors of ``(p, n)``, or all there are."""
    return torch.linalg.svd(matrix, full_matrices=False).U[:, :rank]


def _wide(stack: Tensor) -> Tensor:
    """``[X_1, ..., X_T]`` side by side."""
    return stack.permute(1, 0, 2).flatten(1)


def _error(objective: float, total: float) -> float:
    return max(0.0, 1 - objective / total) ** 0.5 if total else 0.0


def signs(basis: Tensor) -> Tensor:
    """What to multiply the columns of an orthonormal basis with, so that the largest entry of each is positive.

    The signs a decomposition returns are arbitrary.
    """
    return basis.gather(0, basis.abs().argmax(0, keepdim=True)).sign()[0]
