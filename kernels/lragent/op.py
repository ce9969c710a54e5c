"""Attention over values that are stored in two parts, ``V = base + low B``, without adding them up (Flash-LoRA-Attention)."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging

import torch
from torch import Tensor

from hfplug.attention import AttentionCall
from hfplug.errors import ConfigError

logger = logging.getLogger(__name__)

FEW = 8
"""Queries up to which the products are written out."""


def flash_lora_attention(call: AttentionCall, low: Tensor, up: Tensor) -> tuple[Tensor, Tensor | None]:
    """Exact attention of ``call`` over the values ``call.value + low @ up``.

    ``P (V + low B) = P V + (P low) B``. Few queries: the two products are written out; what is as long as the text is done in the
    rank, ``up`` is applied to the queries alone, and no value is copied. Many queries: the sum, once, and exact attention with
    whatever that combines (masks, windows, softcap, learned sinks): from some ``dim_v * kv_heads / heads`` queries on it is less
    work than a product of every query in the rank. Both are differentiable. On a GPU a Triton kernel has the two products under
    one softmax, for any number of queries, where no gradient is asked for and the call has no more than causality, padding and
    packing; the log says once which. LRAgent (arXiv 2602.01053), Algorithm 1.

    Args:
        call: the call; its value is the shared base, ``(batch, kv_heads, keys, dim_v)``.
        low: ``(batch, 1, keys, rank)``, the same for all heads.
        up: ``(kv_heads, rank, dim_v)``, or ``(batch, kv_heads, rank, dim_v)`` where rows have adapters of their own. The scaling
            of the adapter is in it.

    Returns:
        As :meth:`AttentionCall.exact`: ``(batch, queries, heads, dim_v)`` in the dtype of the call, and weights or ``None``.

    Raises:
        ConfigError: shapes that do not fit together.
    """
    _check(call, low, up)
    low = low.to(call.value.dtype)
    reason = why_torch(call, low, up)
    if not torch.compiler.is_compiling():
        _say("the Triton kernel" if reason is None else f"torch ({reason})")
    if reason is None:
        return _by_triton(call, low, up), None
    plain = call.softcap is None and call.s_aux is None and call.position_bias is None and not call.dropout
    if plain and not call.output_attentions and call.query.shape[2] <= FEW:
        return _written_out(call, low, up), None
    return dataclasses.replace(call, value=call.value + low @ up.to(low.dtype)).exact()


def _check(call: AttentionCall, low: Tensor, up: Tensor) -> None:
    batch, groups, keys, dim = call.value.shape
    if low.dim() != 4 or low.shape[:3] != (batch, 1, keys):
        raise ConfigError(f"low {tuple(low.shape)} must be (batch, 1, keys, rank) = ({batch}, 1, {keys}, rank) for these values")
    rank = low.shape[3]
    if tuple(up.shape) not in ((groups, rank, dim), (batch, groups, rank, dim)):
        raise ConfigError(
            f"up {tuple(up.shape)} must be (kv_heads, rank, dim_v) = ({groups}, {rank}, {dim}), or that for each of {batch} rows"
        )


def why_torch(call: AttentionCall, low: Tensor, up: Tensor) -> str | None:
    """Why the Triton kernel cannot take this call; ``None`` if it can."""
    tensors = (call.query, call.key, call.value, low)
    if not call.query.is_cuda:
        return f"tensors are on {call.query.device.type!r}, and the kernel needs a GPU"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, up)):
        return "a gradient is asked for"
    if call.query.dtype == torch.float64 or len({t.dtype for t in tensors}) > 1:
        return "float64 or mixed dtypes"
    if call.mask is not None or call.dropout or call.output_attentions:
        return "a dense mask, dropout or output_attentions"
    if call.softcap is not None or call.s_aux is not None or call.position_bias is not None:
        return "softcap, learned sinks or a position bias"
    if low.shape[3] > 64 or max(call.query.shape[3], call.value.shape[3]) > 128:
        return "a rank above 64 or heads above 128"
    if importlib.util.find_spec("triton") is None:
        return "the package 'triton' is not installed: pip install 'hfplug[triton]'"
    return None


@functools.cache  # once per choice and process
def _say(choice: str) -> None:
    logger.info("Flash-LoRA-Attention uses %s", choice)


def _by_triton(call: AttentionCall, low: Tensor, up: Tensor) -> Tensor:
    from hfplug.kernels.lragent import triton as kernels

    out, mixed = (
        t.transpose(1, 2)
        for t in kernels.attention(call.query, call.key, call.value, low, call.segments, call.scaling, call.causal)
    )
    return _added(out, mixed, up.to(out.dtype)).to(call.value.dtype).contiguous()


def _added(out: Tensor, mixed: Tensor, up: Tensor) -> Tensor:
    """``out`` ``(batch, queries, heads, dim_v)`` and ``mixed`` ``(batch, queries, heads, rank)`` times the head's ``up``."""
    batch, queries, heads, rank = mixed.shape
    groups = up.shape[-3]
    mixed = mixed.view(batch, queries, groups, heads // groups, rank).permute(0, 2, 3, 1, 4).flatten(2, 3)
    more = mixed.to(up.dtype) @ up  # (batch, groups, members x queries, dim_v)
    more = more.view(batch, groups, heads // groups, queries, -1).flatten(1, 2).transpose(1, 2)
    return (out + more).to(out.dtype)


def _written_out(call: AttentionCall, low: Tensor, up: Tensor) -> Tensor:
    (batch, heads, queries, dim), groups = call.query.shape, call.key.shape[1]
    members, mask = heads // groups, call.dense()
    rows = call.query.reshape(batch, groups, members * queries, dim)  # all queries of a key head, one head after the other
    scores = (rows @ call.key.transpose(2, 3)).to(torch.promote_types(rows.dtype, torch.float32)) * call.scaling
    scores = scores.view(batch, heads, queries, -1)
    hidden = None
    if mask is not None and mask.dtype == torch.bool:
        hidden = ~mask
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)  # not -inf, of which a row without keys gets NaN
    elif mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    weights = weights.to(call.value.dtype).view(batch, groups, members * queries, -1)
    out, mixed = (
        (weights @ states).view(batch, heads, queries, -1).transpose(1, 2) for states in (call.value, low)
    )  # low is broadcast over the heads
    out = _added(out, mixed, up)
    if call.mask is None and not call.uniform:
        assert call.segments is not None
        padding = call.segments[:, call.segments.shape[1] - queries :] == 0
        out = out.masked_fill(padding[:, :, None, None], 0.0)
    return out.contiguous()


__all__ = ["FEW", "flash_lora_attention"]
