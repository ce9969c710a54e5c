"""Low-rank updates ``B·A`` and the small space they share: sums, norms and projections without ever forming ``out × in``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """The update ``B·A`` of one linear module, all scaling folded in.

    Attributes:
        A: ``(r, in)``, float64.
        B: ``(out, r)``, float64.
    """

    A: Tensor
    B: Tensor

    @property
    def rank(self) -> int:
        """Rows of ``A``; the rank of the update is at most this."""
        return self.A.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)`` of the update."""
        return self.B.shape[0], self.A.shape[1]

    def delta(self) -> Tensor:
        """The update itself, ``(out, in)``; for small modules and tests."""
        return self.B @ self.A

    def padded(self, rank: int) -> LowRank:
        """The same update with ``rank`` rows in ``A``; those added are zero."""
        extra = rank - self.rank
        if extra < 0:
            raise ValueError(f"rank={rank} is less than the {self.rank} rows there are")
        return LowRank(torch.nn.functional.pad(self.A, (0, 0, 0, extra)), torch.nn.functional.pad(self.B, (0, extra)))

    @staticmethod
    def zero(shape: tuple[int, int], rank: int = 0) -> LowRank:
        """The update that changes nothing."""
        return LowRank(torch.zeros(rank, shape[1], dtype=torch.float64), torch.zeros(shape[0], rank, dtype=torch.float64))


@dataclass(frozen=True)
class CoreSpace:
    """Several updates in the basis they share: ``B_t·A_t = U·M_t·Vᵀ``, without loss (Core Space, arXiv 2509.17786).

    Attributes:
        U: ``(out, p)``, orthonormal columns, ``p = min(out, sum of ranks)``.
        V: ``(in, q)``, orthonormal columns, ``q = min(in, sum of ranks)``.
        cores: the ``M_t``, ``(T, p, q)``; zero where there is no update.
    """

    U: Tensor
    V: Tensor
    cores: Tensor

    @staticmethod
    def of(updates: Sequence[LowRank | None]) -> CoreSpace:
        """The core space of the updates of one module, of which at least one is not None.

        The bases come from Householder QR, which is exact to rounding for every column by itself, however much the norms of
        the updates differ; any orthonormal basis gives the same products.
        """
        U, left = torch.linalg.qr(torch.cat([u.B for u in updates if u is not None], dim=1))
        V, right = torch.linalg.qr(torch.cat([u.A for u in updates if u is not None], dim=0).T)
        cores, at = torch.zeros(len(updates), left.shape[0], right.shape[0], dtype=left.dtype), 0
        for core, update in zip(cores, updates, strict=True):
            if update is not None:
                columns = slice(at, at + update.rank)
                core.copy_(left[:, columns] @ right[:, columns].T)
                at += update.rank
        return CoreSpace(U, V, cores)

    def distance(self, core: Tensor, update: LowRank) -> float:
        """``‖U·core·Vᵀ - B·A‖`` (Frobenius) of any update of the module, in the core space or not."""
        left, right = self.U.T @ update.B, self.V.T @ update.A.T
        # What lies outside the bases gets a basis of its own, of which only the coordinates are needed.
        outside = torch.linalg.qr(update.B - self.U @ left, mode="r").R, torch.linalg.qr(update.A.T - self.V @ right, mode="r").R
        whole = torch.cat([left, outside[0]]) @ torch.cat([right, outside[1]]).T
        whole[: core.shape[0], : core.shape[1]] -= core
        return float(torch.linalg.matrix_norm(whole))
