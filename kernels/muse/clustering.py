"""k-means and the tiles that turn clusters of any size into batched matrix products.

The clustering is our reading of the paper's (arXiv 2509.10406 names k-means-like clusters of queries and of keys, no
details): Euclidean, a few Lloyd steps on a sample spread over the span, an empty cluster keeps its centre. It draws no
random numbers and is a function of its input alone, so that gradient checkpointing sees the same clusters again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLE = 8  # vectors per cluster that the Lloyd steps look at


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """``(groups, n)`` int64: for every point ``(groups, n, dim)`` its nearest of ``(groups, clusters, dim)`` centres."""
    # argmin |x - c|^2 without the term that is the same for all centres; centres last, where argmax is quick.
    half = centres.square().sum(-1, keepdim=True).mul_(0.5)
    return torch.baddbmm(half.transpose(1, 2), points, centres.transpose(1, 2), beta=-1).argmax(-1)


def kmeans(points: Tensor, clusters: int, iterations: int) -> Tensor:
    """``(groups, min(clusters, n), dim)`` centres of ``(groups, n, dim)`` points."""
    groups, n, dim = points.shape
    clusters = min(clusters, n)
    sample = _spread(points, min(n, SAMPLE * clusters))
    centres = _spread(sample, clusters).contiguous()
    for _ in range(iterations):
        labels = nearest(sample, centres)
        sums = centres.new_zeros(centres.shape).scatter_add_(1, labels[..., None].expand(-1, -1, dim), sample)
        counts = centres.new_zeros(groups, clusters, 1).scatter_add_(1, labels[..., None], torch.ones_like(sample[..., :1]))
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres


def _spread(points: Tensor, count: int) -> Tensor:
    """``count`` of the points, evenly over the span but at no constant stride, which a table's columns could fall in with."""
    n = points.shape[1]
    if count == n:
        return points
    golden = torch.arange(count, dtype=torch.float64, device=points.device) * (5**0.5 - 1) / 2
    return points.index_select(1, (golden.frac() * n).long())


def key_tile(n: int, clusters: int) -> int:
    """Keys per tile: twice the mean cluster. Tiles of the mean size would be half as many again to evaluate, for a tenth less
    error (measured on real keys); larger ones leave most slots free.
    """
    return -(-2 * n // clusters)


@dataclass(frozen=True)
class Tiles:
    """Members of clusters in tiles of one size; a cluster larger than a tile is split evenly over several.

    Attributes:
        index: ``(groups, tiles, size)`` int64, the member in each slot; 0 in slots without one.
        count: ``(groups, tiles)`` int32, the members of each tile; they fill the first slots.
        cluster: ``(groups, tiles)`` int64, the cluster of each tile; 0 for tiles without members.
        place: ``(groups, n)`` int64, the slot (over all tiles) of each member.
    """

    index: Tensor
    count: Tensor
    cluster: Tensor
    place: Tensor

    @property
    def valid(self) -> Tensor:
        """``(groups, tiles, size)`` bool: slots that hold a member."""
        return torch.arange(self.index.shape[2], device=self.index.device) < self.count[..., None]


def make_tiles(labels: Tensor, clusters: int, size: int) -> Tiles:
    """Lay out members with ``labels`` ``(groups, n)`` int64 in tiles of ``size`` slots, cluster by cluster."""
    groups, n = labels.shape
    counts = labels.new_zeros(groups, clusters).scatter_add_(1, labels, torch.ones_like(labels))
    parts = (counts + size - 1) // size
    tiles = int(parts.sum(1).max())
    order = labels.argsort(dim=1, stable=True)
    ordered = labels.gather(1, order)
    # Per cluster: members, tiles, first member in the sorted order, first tile.
    table = torch.stack([counts, parts, counts.cumsum(1) - counts, parts.cumsum(1) - parts])
    members, split, first, base = table.gather(2, ordered.expand(4, -1, -1))
    rank = torch.arange(n, device=labels.device) - first
    part = rank * split // members
    slot = rank - (part * members + split - 1) // split
    tile = base + part
    goal = tile * size + slot
    return Tiles(
        index=labels.new_zeros(groups, tiles * size).scatter_(1, goal, order).view(groups, tiles, size),
        count=labels.new_zeros(groups, tiles).scatter_add_(1, tile, torch.ones_like(tile)).to(torch.int32),
        cluster=labels.new_zeros(groups, tiles).scatter_(1, tile, ordered),
        place=torch.empty_like(labels).scatter_(1, order, goal),
    )


def take(values: Tensor, index: Tensor) -> Tensor:
    """``values`` ``(groups, n, dim)`` at ``index`` ``(groups, …)``: ``(groups, …, dim)``; one flat gather of rows."""
    groups, n, dim = values.shape
    offset = (torch.arange(groups, device=index.device) * n).view(-1, *[1] * (index.dim() - 1))
    return values.reshape(groups * n, dim).index_select(0, (index + offset).flatten()).view(*index.shape, dim)
