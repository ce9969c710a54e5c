"""Finding patterns and giving tokens to them. Pure functions; the leading axes (rows, heads) are independent of each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ITERATIONS, TOLERANCE = 30, 1e-4  # the authors'
_Z95 = 1.6448536269514722  # normal quantile of .95


def mine(x: Tensor, counted: Tensor, patterns: int) -> Tensor:
    """k-means by Lloyd's iteration, deterministic (the authors draw at random).

    It begins with evenly spaced counted tokens; an empty cluster goes to the token that is furthest from its own.

    Args:
        x: ``(rows, heads, tokens, dim)`` fp32.
        counted: ``(rows, tokens)`` bool.
        patterns: how many.

    Returns:
        ``(rows, heads, patterns, dim)``; zeros for rows without a counted token.
    """
    heads, tokens, dim = x.shape[1:]
    x = x.where(counted[:, None, :, None], 0)
    order = (~counted).int().argsort(dim=1, stable=True)  # counted tokens first, in their order
    count = counted.sum(1, keepdim=True)
    chosen = torch.arange(patterns, device=x.device)[None] * count // patterns
    first = order.gather(1, chosen.clamp(max=tokens - 1))
    centres = x.gather(2, first[:, None, :, None].expand(-1, heads, -1, dim))
    weight = counted[:, None, :].float().expand(-1, heads, -1)
    for _ in range(ITERATIONS):
        distance = squared_distances(x, centres)
        least, nearest = distance.min(dim=-1)
        one_hot = torch.nn.functional.one_hot(nearest, patterns).float() * weight[..., None]
        size = one_hot.sum(2)
        means = (one_hot.transpose(2, 3) @ x) / size.clamp(min=1)[..., None]
        least = least.where(counted[:, None], -1)
        far = least.topk(min(patterns, tokens), dim=-1).indices
        rank = ((size == 0).cumsum(-1) - 1).clamp(0, far.shape[-1] - 1)
        stray = x.gather(2, far.gather(2, rank)[..., None].expand(-1, -1, -1, dim))
        moved = torch.where((size > 0)[..., None], means, stray)
        shift = (moved - centres).norm(dim=-1).max()
        centres = moved
        if shift < TOLERANCE:
            break
    return centres.where((count > 0)[:, None, :, None], 0)


def squared_distances(x: Tensor, centres: Tensor) -> Tensor:
    """``(…, tokens, patterns)``."""
    return (x.square().sum(-1, keepdim=True) - 2 * x @ centres.transpose(2, 3) + centres.square().sum(-1)[:, :, None]).clamp(
        min=0
    )


def nearest(x: Tensor, centres: Tensor) -> Tensor:
    """Index of the pattern at the least Euclidean distance, ``(rows, heads, tokens)``."""
    return squared_distances(x, centres).argmin(-1)


def narrowest(x: Tensor, centres: Tensor) -> Tensor:
    """Index of the pattern that leaves the least range over the channels; one pattern at a time, to keep memory small."""
    ranges = [_range(x - centres[:, :, m : m + 1]) for m in range(centres.shape[2])]
    return torch.stack(ranges, dim=-1).argmin(-1)


def middle(x: Tensor, counted: Tensor) -> Tensor:
    """Half way between the least and the most of every channel, ``(rows, heads, 1, dim)``; 0 for rows without a counted token."""
    mask = counted[:, None, :, None]
    least, most = x.masked_fill(~mask, torch.inf).amin(2, keepdim=True), x.masked_fill(~mask, -torch.inf).amax(2, keepdim=True)
    return ((least + most) / 2).where(mask.any(2, keepdim=True), 0)


def narrows(x: Tensor, residual: Tensor) -> Tensor:
    """The paper's gate: whether a one-sided 95 % test says that rounding the residual loses less than rounding ``x``.

    With ``rho`` the ratio of the ranges over ``d`` channels: ``1 - rho^2 >= 2 z / sqrt(5 d) * sqrt(1 + rho^4)``.
    """
    rho = _range(residual) / _range(x).clamp(min=1e-12)
    return 1 - rho**2 >= 2 * _Z95 / math.sqrt(5 * x.shape[-1]) * (1 + rho**4).sqrt()


def _range(x: Tensor) -> Tensor:
    return x.amax(-1) - x.amin(-1)
