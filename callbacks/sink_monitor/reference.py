"""The sink statistics from whole attention maps, in fp64 and in plain loops: what the chunked pass is tested against."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from torch import Tensor


def reference_scores(attention: Tensor, real: Tensor, include_self: bool = True) -> Tensor:
    """Mean attention each key gets from the real queries that can see it.

    Args:
        attention: ``(batch, heads, tokens, tokens)`` weights after the softmax, exactly 0 where masked.
        real: ``(batch, tokens)`` bool.
        include_self: whether the token's own query counts.

    Returns:
        ``(batch, heads, tokens)`` fp64; 0 where no query can see a key.
    """
    attention = attention.double()
    out = attention.new_zeros(attention.shape[:3])
    batch, heads, length, _ = attention.shape
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                queries = [u for u in range(length) if real[b, u] and attention[b, h, u, i] > 0 and (include_self or u != i)]
                if queries:
                    out[b, h, i] = sum(attention[b, h, u, i] for u in queries) / len(queries)
    return out


def reference_statistics(
    attention: Tensor, value: Tensor, documents: list[list[int]], include_self: bool = True
) -> dict[str, Any]:
    """What the monitor logs of one layer and one batch.

    Args:
        attention: ``(batch, heads, tokens, tokens)`` weights after the softmax.
        value: ``(batch, kv heads, tokens, dim)``.
        documents: for each row, the document of each token, ascending from 0; -1 for padding.
        include_self: whether the first token's own query counts.

    Returns:
        ``mass``, ``value_norm`` and ``argmax_share`` as floats, ``per_head`` as the list of each head's mass.
    """
    batch, heads, length, _ = attention.shape
    real = attention.new_tensor([[d >= 0 for d in row] for row in documents]).bool()
    scores = reference_scores(attention, real, include_self)
    norms = value.double().norm(dim=-1)
    per_head: list[list[float]] = [[] for _ in range(heads)]
    ratios: list[float] = []
    wins = pairs = 0
    for b in range(batch):
        for document in range(max(documents[b]) + 1):
            tokens = [i for i in range(length) if documents[b][i] == document]
            first = tokens[0]
            by_head = ([float(norms[b, kv, i]) for i in tokens] for kv in range(value.shape[1]))
            ratios.extend(found[0] / median(found) for found in by_head)
            for h in range(heads):
                if include_self or len(tokens) > 1:
                    per_head[h].append(float(scores[b, h, first]))
                for u in tokens:
                    pairs += 1
                    wins += int(attention[b, h, u].argmax()) == first
    heads_mean = [mean(found) for found in per_head]
    return {"mass": mean(heads_mean), "value_norm": mean(ratios), "argmax_share": wins / pairs, "per_head": heads_mean}
