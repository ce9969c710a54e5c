"""Compress-then-merge of one module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfplug.errors import ConfigError
from hfplug.lowrank import CoreSpace, LowRank
from hfplug.seams.merge import Merged
from hfplug.tuners.ctm.config import CtMConfig
from hfplug.tuners.ctm.rules import RULES, Draw
from hfplug.tuners.ctm.subspace import rescaled, signs, subspaces


class CtM:
    """Shared subspaces of the final rank from rescaled updates, then a rule on the coordinates of the updates themselves.

    Args:
        config: the options.
    """

    def __init__(self, config: CtMConfig) -> None:
        self.config = config

    def default_rank(self, ranks: Sequence[int]) -> int | None:
        """The largest rank of any module of any adapter."""
        return max(ranks)

    def merge(
        self,
        updates: Sequence[LowRank | None],
        space: CoreSpace,
        weights: Sequence[float],
        rank: int | None,
        generator: torch.Generator,
    ) -> Merged:
        """``B = scale·U·O``, ``A = Vᵀ``; rank ``min(rank, out, in, sum of ranks)``.

        Where ``out`` or ``in`` is less than the rank, that side's basis is whole and the other keeps the rank, so ``O`` is not
        square (our reading: the authors' code has no such case); then ``O`` goes to the side that leaves the lesser rank.
        An adapter of weight 0 has no say in the subspaces either: it is as if it was not given.
        """
        config = self.config
        scale = torch.tensor(weights, dtype=space.cores.dtype)
        kept = max(space.cores.shape[1:]) if rank is None else rank
        taken = space.cores * (scale != 0)[:, None, None]
        found = subspaces(rescaled(taken, config.beta), kept, config.iterations, config.tolerance)
        U, V = space.U @ found.U, space.V @ found.V
        left, right = signs(U), signs(V)
        U, V = U * left, V * right
        coordinates = (found.U * left).T @ space.cores @ (found.V * right)
        merged = self._rule(scale[:, None, None] * coordinates, Draw(config.density, config.drop, generator))
        merged = config.scale * merged
        made = LowRank(V.T, U @ merged) if V.shape[1] <= U.shape[1] else LowRank(merged @ V.T, U)
        return Merged(made, (U, V), found.iterations)

    def _rule(self, coordinates: Tensor, draw: Draw) -> Tensor:
        rule = self.config.rule
        if isinstance(rule, str):
            return RULES[rule](coordinates, draw)
        merged, given = rule(coordinates), tuple(coordinates.shape)
        if not isinstance(merged, Tensor) or merged.shape != given[1:]:
            what = tuple(merged.shape) if isinstance(merged, Tensor) else type(merged).__name__
            raise ConfigError(f"rule={rule!r} returned {what} for coordinates {given}; expected {given[1:]}")
        return merged.to(coordinates.dtype)
