"""MuSe's causal decomposition: exact near by, summaries far away, every pair of positions exactly once.

Positions are cut in blocks of ``block``. A query sees its own block and the one before exactly. Everything older is far: at
level ``h = block, 2 block, 4 block, …`` a parent of two children of ``h`` positions looks at the two children of the parent
before it, but for the child that touches it, which a finer level (or the near part) covers::

    keys      | k0 | k1 |          c0 sees k0
    queries              | c0 | c1 |   c1 sees k0 and k1

This is the strong admissibility of the fast multipole method; the paper (arXiv 2509.10406) speaks of a hierarchical block
decomposition with an exact local part, so the choice is our reading. Any length works: children at the end may be short or
absent, and whoever looks at keys comes after all of them, so spans of keys are always whole. Cost: O(N C D log N).

Query centroids come from the queries of the *key* span, which are all older than the queries that use them, and the clusters
to retrieve are ranked at the centroid: outputs and gradients are strictly causal. Clustering a block's own queries, as the
paper seems to, lets a query's output depend on later tokens of its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hfplug.kernels.muse import primitives
from hfplug.kernels.muse.clustering import Tiles, key_tile, kmeans, make_tiles, nearest, take

QUERY_TILE = 32  # rows at least: below that, copying the summaries for each tile costs as much as using them


@dataclass(frozen=True)
class Setting:
    """The numbers of one call; see ``MuSeConfig`` for what they mean."""

    clusters: int
    query_clusters: int
    block: int
    retrieve: int
    iterations: int
    leaky: bool
    scale: float


@dataclass(frozen=True)
class Unit:
    """One child of queries and the children of keys it sees: spans ``[start, stop)`` and the span that gives centroids."""

    queries: tuple[int, int]
    keys: tuple[tuple[int, int], ...]
    codebook: tuple[int, int]


def units(n: int, block: int) -> Iterator[tuple[Unit, ...]]:
    """The far part of ``n`` positions, parent by parent."""
    half = block
    while n > 2 * half:
        for start in range(2 * half, n, 2 * half):
            k0, k1 = (start - 2 * half, start - half), (start - half, start)
            before = (k0[0], k1[1])
            children = [Unit((start, min(start + half, n)), (k0,), before)]
            if start + half < n:
                children.append(Unit((start + half, min(start + 2 * half, n)), (k0, k1), before))
            yield tuple(children)
        half *= 2


class Clusters:
    """Labels and centroids of a call, in the order they are first asked for: made in the forward, replayed in the backward.

    The clustering has no gradient (its choice is piecewise constant; centroids are constants by our reading), and made anew in
    the backward it would cost an eighth of the forward.
    """

    def __init__(self, made: list[Tensor] | None = None) -> None:
        self.made: list[Tensor] = [] if made is None else made
        self._replay = iter(self.made) if made is not None else None

    def keep(self, make: Callable[[], Tensor]) -> Tensor:
        """The next tensor: recorded, or computed by ``make()`` and recorded."""
        if self._replay is not None:
            return next(self._replay)
        value = make()
        self.made.append(value)
        return value


@dataclass
class Summaries:
    """Tiles of a span of keys and what the centroids see of them.

    ``mu`` ``(G, g C, D)``; ``k``, ``v`` ``(G, T, P, D)``; ``L`` ``(G, g C, T)``; ``kbar``, ``vbar`` ``(G, g C, T, D)``.
    """

    start: int
    tiles: Tiles
    mu: Tensor
    k: Tensor
    v: Tensor
    L: Tensor
    kbar: Tensor
    vbar: Tensor


class Far:
    """The far part of one call: ``q`` ``(G, g, N, D)``, ``k`` and ``v`` ``(G, N, D)``."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, setting: Setting, clusters: Clusters) -> None:
        self.q, self.k, self.v, self.s, self.clusters = q, k, v, setting, clusters

    def parents(self) -> Iterator[tuple[list[Unit], Tensor, dict[int, Summaries]]]:
        """Each parent's children, its centroids ``(G g, C, D)`` and the summaries they need, by start of the key span."""
        for children in units(self.q.shape[2], self.s.block):
            span = (children[0].queries[0], children[-1].queries[1]) if self.s.leaky else children[0].codebook
            heads = self.q.shape[:2]

            def centroids(span: tuple[int, int] = span) -> Tensor:
                return kmeans(_span(self.q.flatten(0, 1), span), self.s.query_clusters, self.s.iterations)

            mu = self.clusters.keep(centroids)
            spans = sorted({span for child in children for span in child.keys})
            yield list(children), mu, {span[0]: self.summarise(span, mu.view(heads[0], -1, mu.shape[2])) for span in spans}

    def summarise(self, span: tuple[int, int], mu: Tensor) -> Summaries:
        k, v = _span(self.k, span), _span(self.v, span)
        clusters = min(self.s.clusters, k.shape[1])
        labels = self.clusters.keep(lambda: nearest(k, kmeans(k, clusters, self.s.iterations)).to(torch.int32))
        tiles = make_tiles(labels.long(), clusters, key_tile(k.shape[1], clusters))
        tiled = take(k, tiles.index), take(v, tiles.index)
        return Summaries(span[0], tiles, mu, *tiled, *primitives.tilt(mu, *tiled, tiles.count, self.s.scale))

    def evaluation(self, child: Unit, mu: Tensor, summaries: dict[int, Summaries]) -> Evaluation:
        q = _span(self.q.flatten(0, 1), child.queries)
        labels = self.clusters.keep(lambda: nearest(q, mu).to(torch.int32))
        tiles = make_tiles(labels.long(), mu.shape[1], max(-(-q.shape[1] // mu.shape[1]), QUERY_TILE))
        return Evaluation(self, [summaries[start] for start, _ in child.keys], take(q, tiles.index), tiles)


class Evaluation:
    """Queries in tiles, each tile with the keys its centroid gives it: summaries, and the members of retrieved tiles."""

    def __init__(self, far: Far, seen: list[Summaries], q: Tensor, tiles: Tiles) -> None:
        self.far, self.seen, self.tiles = far, seen, tiles
        heads, self.tile_count, rows, dim = q.shape
        g = far.q.shape[1]
        self.q = q.view(-1, rows, dim)
        # Row of each query tile in the tables (G g C, …) of summaries.
        centroids = seen[0].mu.shape[1] // g
        self.row = (tiles.cluster + torch.arange(heads, device=q.device)[:, None] * centroids).flatten()
        self.group = (torch.arange(heads, device=q.device) // g).repeat_interleave(self.tile_count)
        L = torch.cat([s.L.flatten(0, 1) for s in seen], 1)
        kbar, vbar = (torch.cat([getattr(s, name).flatten(0, 1) for s in seen], 1) for name in ("kbar", "vbar"))
        mu = seen[0].mu.reshape(-1, dim, 1)
        # a(q) = L + scale (q - mu) kbar: an ordinary logit of q and a bias of its own.
        bias = L.sub_(torch.bmm(kbar, mu)[..., 0].mul_(far.s.scale))
        self.members: Tensor | None = None
        self.kbar, self.vbar = kbar, vbar
        k, v, bias = (x.index_select(0, self.row) for x in (kbar, vbar, bias))
        if far.s.retrieve:
            k, v, bias = self._retrieve(k, v, bias)
        self.k, self.v, self.bias = k, v, bias

    def _retrieve(self, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Replace the heaviest summaries of each centroid by their members."""
        L = torch.cat([s.L.flatten(0, 1) for s in self.seen], 1)
        best = L.topk(min(self.far.s.retrieve, L.shape[1]), dim=1).indices  # (G g C, R)
        index, count = [], []
        for s in self.seen:
            index.append(s.tiles.index + s.start)
            count.append(s.tiles.count)
        size = max(i.shape[2] for i in index)
        groups = self.far.q.shape[0]
        slots = torch.cat([torch.nn.functional.pad(i, (0, size - i.shape[2])) for i in index], 1)  # (G, T, P)
        held = torch.cat(count, 1)
        per_group = best.view(groups, -1)
        chosen = slots.gather(1, per_group[..., None].expand(-1, -1, size)).view(*best.shape, size)
        free = torch.arange(size, device=k.device) >= held.gather(1, per_group).view(*best.shape, 1)
        members = chosen.flatten(1).index_select(0, self.row)  # (tiles, R P)
        nothing = bias.new_zeros(()).masked_fill(free.flatten(1).index_select(0, self.row), float("-inf"))
        self.members = members + (self.group * self.far.k.shape[1])[:, None]
        bias = bias.scatter(1, best.index_select(0, self.row), float("-inf"))
        k, v = (
            torch.cat([far, x.reshape(-1, x.shape[2]).index_select(0, self.members.flatten()).view(*members.shape, -1)], 1)
            for far, x in ((k, self.far.k), (v, self.far.v))
        )
        return k, v, torch.cat([bias, nothing], 1)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output ``(G g, n, D)`` and log-sum-exp ``(G g, n)`` in the order of the queries."""
        o, lse = primitives.attend(self.q, self.k, self.v, self.bias, self.far.s.scale)
        heads = self.tiles.place.shape[0]
        return take(o.view(heads, -1, o.shape[2]), self.tiles.place), lse.reshape(heads, -1).gather(1, self.tiles.place)

    def backward(
        self, lse: Tensor, grad: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, sums: dict[int, list[Tensor]]
    ) -> None:
        """Add to ``dq`` ``(G g, n, D)``, ``dk``, ``dv`` ``(G, N, D)`` and to the gradients of the summaries.

        Args:
            lse, grad, delta: of the whole rows ``(G g, n[, D])``.
            sums: start of a key span -> gradients of ``L``, ``kbar``, ``vbar``.
        """
        scale, index = self.far.s.scale, self.tiles.index
        lse_, delta_ = (take(x[..., None], index).view(self.q.shape[:2]) for x in (lse, delta))
        grad_ = take(grad, index).view(self.q.shape)
        # Free slots repeat a query: without its gradient they add nothing.
        free = ~self.tiles.valid.view(self.q.shape[:2])
        grad_.masked_fill_(free[..., None], 0.0)
        lse_ = lse_.masked_fill(free, float("-inf"))
        dq_, dk_, dv_, dbias = primitives.attend_backward(self.q, self.k, self.v, self.bias, scale, lse_, grad_, delta_)
        dq.add_(take(dq_.view(dq.shape[0], -1, dq.shape[2]), self.tiles.place))
        if self.members is not None:
            T = self.kbar.shape[1]
            for target, part in ((dk, dk_), (dv, dv_)):
                target.view(-1, target.shape[2]).index_add_(0, self.members.flatten(), part[:, T:].reshape(-1, part.shape[2]))
            dk_, dv_, dbias = dk_[:, :T], dv_[:, :T], dbias[:, :T]
        dL, dkbar, dvbar = (torch.zeros_like(x).index_add_(0, self.row, part) for x, part in
                            ((self.kbar[..., 0], dbias), (self.kbar, dk_), (self.vbar, dv_)))  # fmt: skip
        mu = self.seen[0].mu.reshape(-1, 1, self.q.shape[2])
        dkbar.sub_(dL[..., None] * mu * scale)
        at = 0
        for s in self.seen:
            width = s.L.shape[2]
            for total, part in zip(sums[s.start], (dL, dkbar, dvbar), strict=True):
                total.add_(part[:, at : at + width].reshape(total.shape))
            at += width


def forward(
    q: Tensor, k: Tensor, v: Tensor, setting: Setting, made: list[Tensor] | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """MuSe over whole sequences.

    Args:
        q: ``(G, g, N, D)`` float32 or float64, contiguous; ``g`` query heads share a key head.
        k: ``(G, N, D)``.
        v: ``(G, N, D)``; the same width as the keys.
        setting: the numbers.
        made: clusters of an earlier call, to use again.

    Returns:
        Output ``(G, g, N, D)``, log-sum-exp ``(G, g, N)``, and the clusters for :func:`backward`.
    """
    o, lse = primitives.near(q, k, v, setting.block, setting.scale)
    clusters = Clusters(made)
    far = Far(q, k, v, setting, clusters)
    for children, mu, summaries in far.parents():
        for child in children:
            part, part_lse = far.evaluation(child, mu, summaries).forward()
            rows = slice(*child.queries)
            primitives.merge_(o[:, :, rows], lse[:, :, rows], part.view_as(o[:, :, rows]), part_lse.view_as(lse[:, :, rows]))
    return o, lse, clusters.made


def backward(
    q: Tensor, k: Tensor, v: Tensor, setting: Setting, o: Tensor, lse: Tensor, made: list[Tensor], grad: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`forward` with clusters and centroids held fixed; ``delta`` ``(G, g, N)`` is ``sum(grad * o)``."""
    dq, dk, dv = primitives.near_backward(q, k, v, setting.block, setting.scale, o, lse, grad, delta)
    far = Far(q, k, v, setting, Clusters(made))
    for children, mu, summaries in far.parents():
        sums = {start: [torch.zeros_like(x) for x in (s.L, s.kbar, s.vbar)] for start, s in summaries.items()}
        for child in children:
            evaluation = far.evaluation(child, mu, summaries)
            rows = slice(*child.queries)
            flat = dq[:, :, rows].flatten(0, 1)
            part = torch.zeros_like(flat)
            evaluation.backward(
                lse[:, :, rows].flatten(0, 1), grad[:, :, rows].flatten(0, 1), delta[:, :, rows].flatten(0, 1), part, dk, dv, sums
            )
            dq[:, :, rows] += part.view_as(dq[:, :, rows])
        for start, s in summaries.items():
            dL, dkbar, dvbar = sums[start]
            seen = (s.mu, s.k, s.v, s.tiles.count, setting.scale, s.L, s.kbar, s.vbar)
            dkt, dvt = primitives.tilt_backward(*seen, dL, dkbar, dvbar)
            stop = start + s.tiles.place.shape[1]
            for target, tiled in ((dk, dkt), (dv, dvt)):
                target[:, start:stop] += take(tiled.flatten(1, 2), s.tiles.place)
    return dq, dk, dv


def _span(x: Tensor, span: tuple[int, int]) -> Tensor:
    return x[:, span[0] : span[1]]
