"""MuSe the slow, obvious way: one query after the other, one softmax over everything it sees. Differentiable.

The equations (our reading of arXiv 2509.10406; ``s`` the scale, ``c`` the query's centroid ``mu``, ``j`` a tile of keys)::

    L_cj = log sum_i exp(s mu_c.k_i)     w_i = exp(s mu_c.k_i - L_cj)     kbar_cj = sum w k     vbar_cj = sum w v
    a_j(q) = L_cj + s (q - mu_c).kbar_cj              output: softmax over exact logits s q.k and far logits a_j together
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from hfplug.kernels.muse.scheme import Clusters, Far, Setting, units


def reference(q: Tensor, k: Tensor, v: Tensor, setting: Setting, made: list[Tensor], order: int = 1) -> Tensor:
    """MuSe's output for given clusters.

    Args:
        q: ``(g, N, D)`` query heads that share the key head ``k`` ``(N, D)``, ``v`` ``(N, Dv)``.
        k: see ``q``.
        v: see ``q``.
        setting: the numbers.
        made: centroids and labels, as :func:`hfplug.kernels.muse.scheme.forward` records them.
        order: 0: ``a_j = L_cj``, the value at the centroid; 1: the method; 2: also the second-order terms of logit and value
            (a reading of the paper's "dipole"), at a cost of ``D^2`` per pair of clusters.
    """
    heads, n, _ = q.shape
    s, recorded = setting.scale, iter(made)
    seen: list[list[list[tuple[Tensor, Tensor]]]] = [[[] for _ in range(n)] for _ in range(heads)]  # logits, values
    for head in range(heads):
        for i in range(n):
            first = max(0, (i // setting.block - 1) * setting.block)
            seen[head][i].append((s * k[first : i + 1] @ q[head, i], v[first : i + 1]))
    for children in units(n, setting.block):
        mu = next(recorded)
        tiles = {start: _tiles(next(recorded)[0], start, setting) for start, _ in sorted({x for c in children for x in c.keys})}
        for child in children:
            labels = next(recorded)
            members = [tile for start, _ in child.keys for tile in tiles[start]]
            for head in range(heads):
                for i in range(*child.queries):
                    centre = mu[head, labels[head, i - child.queries[0]]]
                    seen[head][i] += _far(q[head, i], centre, k, v, members, setting, order)
    return torch.stack([torch.stack([_softmax(parts) for parts in rows]) for rows in seen])


def _tiles(labels: Tensor, start: int, setting: Setting) -> list[Tensor]:
    """Positions of the keys of each tile: a cluster, or a part of one that is larger than a tile."""
    n = len(labels)
    clusters = min(setting.clusters, n)
    size = math.ceil(2 * n / clusters)
    out = []
    for cluster in range(clusters):
        found = (labels == cluster).nonzero()[:, 0] + start
        count, parts = len(found), math.ceil(len(found) / size)
        cuts = [math.ceil(part * count / parts) for part in range(parts + 1)] if parts else []
        out += [found[a:b] for a, b in pairwise(cuts)]
    return out


def _far(q: Tensor, mu: Tensor, k: Tensor, v: Tensor, tiles: list[Tensor], setting: Setting,
         order: int) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    s, out = setting.scale, []
    mass = torch.stack([torch.logsumexp(s * k[tile] @ mu, 0) for tile in tiles])
    exact = set(mass.topk(min(setting.retrieve, len(tiles))).indices.tolist())
    for j, tile in enumerate(tiles):
        if j in exact:
            out.append((s * k[tile] @ q, v[tile]))
            continue
        w = torch.softmax(s * k[tile] @ mu, 0)
        kbar, vbar, delta = w @ k[tile], w @ v[tile], q - mu
        a = mass[j] if order == 0 else mass[j] + s * delta @ kbar
        if order == 2:
            spread = k[tile] - kbar
            along = spread @ delta
            a = a + 0.5 * s**2 * (w * along**2).sum()
            vbar = vbar + s * (w * along) @ (v[tile] - vbar)
        out.append((a[None], vbar[None]))
    return out


def _softmax(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    logits, values = (torch.cat(x) for x in zip(*parts, strict=True))
    return torch.softmax(logits, 0) @ values


def clusters_of(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> list[Tensor]:
    """The clusters MuSe makes of ``q`` ``(g, N, D)``, ``k``, ``v``."""
    clusters = Clusters()
    far = Far(q[None], k[None], v[None], setting, clusters)
    for children, mu, summaries in far.parents():
        for child in children:
            far.evaluation(child, mu, summaries)
    return clusters.made
