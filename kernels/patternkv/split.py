"""Attention of a few queries on a PatternKV layer as it is stored, without rebuilding its keys and values."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hfplug.kernels.patternkv.cache import PatternKVLayer

logger = logging.getLogger(__name__)


def attend(query: Tensor, layer: PatternKVLayer, *, scaling: float, mask: Tensor | None = None) -> Tensor:
    """``softmax(scaling * q k^T) v`` over everything the layer holds.

    Scores are ``q . difference`` plus an entry of the small table ``q . patterns``; the output is the weighted differences plus
    the weights summed per pattern, times the patterns. On a GPU a Triton kernel reads the codes as they are stored; in torch,
    unrotated keys are rebuilt to be turned for the scores (values never are). The log says once which.

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
    reason = why_torch(query, layer)
    _say("the Triton kernel" if reason is None else f"torch ({reason})")
    if reason is None:
        return by_triton(grouped, layer, scaling, mask, queries).reshape(rows, query_heads, queries, -1).to(query.dtype)
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


def why_torch(query: Tensor, layer: PatternKVLayer) -> str | None:
    """Why the Triton kernel cannot take this call; ``None`` if it can."""
    if not query.is_cuda:
        return f"tensors are on {query.device.type!r}, and the kernel needs a GPU"
    if not layer.blocked:
        return "no block is stored yet"
    if max(layer.sizes.values()) > 128:
        return "heads above 128"
    if importlib.util.find_spec("triton") is None:
        return "the package 'triton' is not installed: pip install 'hfplug[triton]'"
    return None


@functools.cache  # once per choice and process
def _say(choice: str) -> None:
    logger.info("attention on PatternKV's blocks uses %s", choice)


def by_triton(grouped: Tensor, layer: PatternKVLayer, scaling: float, mask: Tensor | None, queries: int) -> Tensor:
    """:func:`attend` by the kernel for the blocks, and in torch for the exact tokens.

    Args:
        grouped: ``(rows, heads, M, dim)`` fp32, all queries of a key-value head.
        queries: queries of each query head.
    """
    from hfplug.kernels.patternkv import triton as kernels

    blocked, rows = layer.blocked, grouped.shape[0]
    whole = None if mask is None else mask[:, 0]
    out, top, mass = kernels.blocks(grouped, layer, scaling, whole, queries)
    keys, values = [layer.state["window_keys"]], [layer.state["window_values"]]
    seen = [
        torch.ones(1, 1, keys[0].shape[2], dtype=torch.bool, device=keys[0].device) if whole is None else whole[..., blocked:]
    ]
    for place, inside, i in layer.sink_places():
        keys.append(layer.state["sink_keys"][:, :, i : i + 1])
        values.append(layer.state["sink_values"][:, :, i : i + 1])
        one = inside[:, None, None]
        if whole is not None:
            one = one & whole.expand(rows, -1, -1).gather(2, place[:, None, None].expand(-1, whole.shape[1], 1))
        seen.append(one)
    width = max(s.shape[1] for s in seen)
    keep = torch.cat([s.expand(rows, width, -1) for s in seen], dim=-1)[:, None, None]  # (rows, 1, 1, queries or 1, tokens)
    scores = (grouped @ torch.cat(keys, dim=2).float().transpose(2, 3) * scaling).unflatten(2, (-1, queries))
    scores = scores.masked_fill(~keep, -torch.inf).flatten(2, 3)
    highest = torch.maximum(top, scores.amax(-1, keepdim=True)) if scores.shape[-1] else top
    base = highest.masked_fill(highest.isinf(), 0.0)
    weights, share = (scores - base).exp(), (top - base).exp()
    total = mass * share + weights.sum(-1, keepdim=True)
    found = out * share + weights @ torch.cat(values, dim=2).float()
    return torch.where(total > 0, found / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0)


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


__all__ = ["attend", "by_triton", "why_torch"]
