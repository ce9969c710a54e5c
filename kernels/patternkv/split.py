"""Attention of a few queries on a PatternKV layer as it is stored, without rebuilding its keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hfplug.kernels.patternkv.cache import PatternKVLayer


def attend(query: Tensor, layer: PatternKVLayer, *, scaling: float, mask: Tensor | None = None) -> Tensor:
    """``softmax(scaling * q k^T) v`` over everything the layer holds.

    Scores are ``q . difference`` plus an entry of the small table ``q . patterns``; the output is the weighted differences plus
    the weights summed per pattern, times the patterns. Unrotated keys are turned for the scores (they are rebuilt; values never
    are).

    Args:
        query: ``(rows, query_heads, queries, dim)``, rotated; query heads are a multiple of the key-value heads.
        layer: with at least one token.
        mask: ``(rows or 1, 1, queries or 1, length)`` bool, true where a query attends. A query that sees nothing gives zeros.

    Returns:
        ``(rows, query_heads, queries, dim_v)`` in the dtype of the query.
    """
    rows, query_heads, queries, dim = query.shape
    heads = layer.state["window_keys"].shape[1]
    grouped = query.float().reshape(rows, heads, query_heads // heads * queries, dim)
    scores = torch.cat((_block_scores(grouped, layer), grouped @ layer.state["window_keys"].float().transpose(2, 3)), dim=-1)
    scores = (scores * scaling).unflatten(2, (-1, queries))
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    weights = scores.softmax(dim=-1)
    if mask is not None:  # a row of padding alone
        weights = weights.masked_fill(~mask[:, :, None], 0.0)
    weights = weights.flatten(2, 3)
    blocked = layer.blocked
    out = weights[..., blocked:] @ layer.state["window_values"].float()
    if blocked:
        out = out + _block_values(weights[..., :blocked], layer)
    return out.reshape(rows, query_heads, queries, -1).to(query.dtype)


def _block_scores(query: Tensor, layer: PatternKVLayer) -> Tensor:
    """``(rows, heads, queries, blocked)``, the exact first tokens included."""
    if not layer.blocked:
        return query.new_zeros(*query.shape[:3], 0)
    if layer.rotation is not None:
        return query @ layer.block_keys().float().transpose(2, 3)
    codes, step, minimum = layer.groups("key")
    by_group = codes.unflatten(2, (step.shape[2], -1)).float()
    scaled = query[:, :, None] * step.float()[:, :, :, None]  # (rows, heads, groups, queries, dim)
    scores = scaled @ by_group.transpose(3, 4) + (query @ minimum.float().transpose(2, 3)).transpose(2, 3)[..., None]
    scores = scores.permute(0, 1, 3, 2, 4).flatten(3)
    table = query @ layer.patterns("key").transpose(2, 3)
    scores = scores + table.gather(3, layer.indices("key")[:, :, None].expand(-1, -1, query.shape[2], -1))
    for place, inside, i in layer.sink_places():
        exact = query @ layer.state["sink_keys"][:, :, i : i + 1].float().transpose(2, 3)
        index = place[:, None, None, None].expand(-1, *scores.shape[1:3], 1)
        scores = scores.scatter(3, index, torch.where(inside[:, None, None, None], exact, scores.gather(3, index)))
    return scores


def _block_values(weights: Tensor, layer: PatternKVLayer) -> Tensor:
    """``(rows, heads, queries, dim_v)``."""
    out: Tensor | float = 0.0
    for place, inside, i in layer.sink_places():
        index = place[:, None, None, None].expand(-1, *weights.shape[1:3], 1)
        own = weights.gather(3, index) * inside[:, None, None, None]
        out = out + own @ layer.state["sink_values"][:, :, i : i + 1].float()
        weights = weights.scatter(3, index, weights.gather(3, index) - own)  # counted once
    codes, step, minimum = layer.groups("value")
    by_group = codes.unflatten(3, (step.shape[3], -1)).float().permute(0, 1, 3, 2, 4)  # (rows, heads, groups, tokens, channels)
    scaled = weights[:, :, None] * step.float().permute(0, 1, 3, 2)[:, :, :, None]
    least = (weights @ minimum.float()).transpose(2, 3)[..., None]
    out = out + (scaled @ by_group + least).permute(0, 1, 3, 2, 4).flatten(3)
    patterns = layer.patterns("value")
    index = layer.indices("value")[:, :, None].expand_as(weights)
    per_pattern = weights.new_zeros(*weights.shape[:3], patterns.shape[2]).scatter_add(3, index, weights)
    return out + per_pattern @ patterns


__all__ = ["attend"]
