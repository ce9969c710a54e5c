"""Sink scores from a whole attention map, in fp64 and in the order of the definition: what the fast forms are tested against."""

from __future__ import annotations

import math

from torch import Tensor


def reference_scores(
    query: Tensor,
    key: Tensor,
    keep: Tensor,
    counted: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Column sums of the attention map over the counted queries.

    Args:
        query: ``(batch, heads, queries, dim)``.
        key: ``(batch, kv heads, keys, dim)``.
        keep: ``(batch, heads, queries, keys)`` bool, who sees whom.
        counted: ``(batch, queries)`` bool.
        scaling, softcap, sinks: see :func:`hfplug.sinks.sink_scores`.

    Returns:
        ``sums``, ``counts`` and ``diagonal``, each ``(batch, heads, keys)`` fp64; the queries are the last positions.
    """
    query, key = query.double(), key.double()
    (batch, heads, length, _), keys = query.shape, key.shape[2]
    group, offset = heads // key.shape[1], keys - length
    sums, counts, diagonal = (query.new_zeros(batch, heads, keys) for _ in range(3))
    for b in range(batch):
        for h in range(heads):
            for u in range(length):
                if not counted[b, u]:
                    continue
                seen = keep[b, h, u].nonzero().flatten().tolist()
                logits = {i: scaling * float(query[b, h, u] @ key[b, h // group, i]) for i in seen}
                if softcap is not None:
                    logits = {i: softcap * math.tanh(s / softcap) for i, s in logits.items()}
                extra = [] if sinks is None else [float(sinks[h])]
                top = max([*logits.values(), *extra])
                total = sum(math.exp(s - top) for s in [*logits.values(), *extra])
                for i, s in logits.items():
                    weight = math.exp(s - top) / total
                    sums[b, h, i] += weight
                    counts[b, h, i] += 1
                    if i == u + offset:
                        diagonal[b, h, i] = weight
    return sums, counts, diagonal
