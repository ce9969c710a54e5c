"""Merging rules on the coordinates ``O_t`` of the adapters: ``(T, k, k)`` with the weights multiplied in, to ``(k, k)``.

Every rule works entry by entry and is odd in each, so the signs of the basis vectors cannot change the merged update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """What rules may use beside the coordinates.

    Attributes:
        density: share of the entries of each adapter that TIES keeps.
        drop: probability with which DARE drops an entry.
        generator: for DARE.
    """

    density: float
    drop: float
    generator: torch.Generator


def linear(coordinates: Tensor, draw: Draw) -> Tensor:
    """Task arithmetic: the sum."""
    return coordinates.sum(0)


def mean(coordinates: Tensor, draw: Draw) -> Tensor:
    """The mean over all adapters, those without an update included."""
    return coordinates.mean(0)


def trim(coordinates: Tensor, density: float) -> Tensor:
    """Per adapter, all but the ``density`` share of entries largest in magnitude set to zero."""
    flat = coordinates.flatten(1)
    kept = max(1, round(density * flat.shape[1])) if flat.shape[1] else 0
    largest = flat.abs().topk(kept, dim=1).indices
    return torch.zeros_like(flat).scatter(1, largest, flat.gather(1, largest)).view_as(coordinates)


def elect(coordinates: Tensor) -> Tensor:
    """Per entry, the mean over the adapters that agree in sign with the sum; zero where the sum is zero."""
    agree = coordinates.sign() == coordinates.sum(0).sign()
    return torch.where(agree, coordinates, 0).sum(0) / agree.sum(0).clamp(min=1)


def ties(coordinates: Tensor, draw: Draw) -> Tensor:
    """TIES (arXiv 2306.01708) as in the authors' code: trim, elect the sign of the sum, mean of those that agree."""
    return elect(trim(coordinates, draw.density))


def drop(coordinates: Tensor, draw: Draw) -> Tensor:
    """DARE (arXiv 2311.03099): drop entries with probability ``p``, divide the others by ``1 - p``."""
    chance = torch.rand(coordinates.shape, generator=draw.generator, dtype=torch.float64)
    return torch.where(chance < draw.drop, 0, coordinates / (1 - draw.drop))


def dare_linear(coordinates: Tensor, draw: Draw) -> Tensor:
    """DARE, then the sum."""
    return linear(drop(coordinates, draw), draw)


def dare_ties(coordinates: Tensor, draw: Draw) -> Tensor:
    """DARE, then TIES with its trimming."""
    return ties(drop(coordinates, draw), draw)


RULES: dict[str, Callable[[Tensor, Draw], Tensor]] = {
    "linear": linear,
    "mean": mean,
    "ties": ties,
    "dare_linear": dare_linear,
    "dare_ties": dare_ties,
}
