"""The weighted sum of updates, truncated by its singular value decomposition in core space."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hfplug.lowrank import CoreSpace, LowRank
from hfplug.seams.merge import Merged
from hfplug.tuners.svd_merge.config import SvdMergeConfig


class SvdMerge:
    """The closest update of the rank to the weighted sum; without a rank, the sum itself.

    Args:
        config: the options.
    """

    def __init__(self, config: SvdMergeConfig) -> None:
        self.config = config

    def default_rank(self, ranks: Sequence[int]) -> int | None:
        """None: each module has the numerical rank of its sum."""
        return None

    def merge(
        self,
        updates: Sequence[LowRank | None],
        space: CoreSpace,
        weights: Sequence[float],
        rank: int | None,
        generator: torch.Generator,
    ) -> Merged:
        """``B = U·sqrt(S)``, ``A = sqrt(S)·Vᵀ`` of the leading singular triples of the sum."""
        scale = torch.tensor(weights, dtype=space.cores.dtype)
        left, values, right = torch.linalg.svd(torch.einsum("t,tpq->pq", scale, space.cores), full_matrices=False)
        if rank is None:
            parts = float(scale.abs() @ torch.linalg.matrix_norm(space.cores))
            rank = int((values > self.config.tolerance * parts).sum())
        kept = min(rank, values.numel())
        U, V, root = space.U @ left[:, :kept], space.V @ right[:kept].T, values[:kept].sqrt()
        return Merged(LowRank(root[:, None] * V.T, U * root), (U, V))
