"""``attn_implementation="muse"``: which calls MuSe takes, and which it leaves to exact attention."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hfplug import ConfigError
from hfplug.attention import AttentionCall
from hfplug.kernels.muse.config import MuSeConfig
from hfplug.kernels.muse.op import muse
from hfplug.ledger import Ledger
from hfplug.seams.attention import configure as _configure
from hfplug.seams.attention import options_of


class Observer(Protocol):
    """Computes a call in MuSe's place."""

    def __call__(self, call: AttentionCall, config: MuSeConfig) -> tuple[Tensor, Tensor | None]: ...


_observer: ContextVar[Observer | None] = ContextVar("hfplug_muse_observer", default=None)


class MuSeAttention:
    """MuSe as an attention implementation.

    Whole sequences are approximated, document by document, from ``min_length`` tokens on. Exact attention takes the rest:
    shorter documents, decoding and prefill in chunks (queries that do not start at the first key), layers with a sliding
    window, and any mask that is not causality, padding and packing alone.
    """

    handles = frozenset({"s_aux", "sliding_window", "dense_mask"})

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if call.mask is not None or call.window is not None:  # before anything that torch.compile could not trace
            return call.fallback("sliding windows, static caches, compiled models and masks of your own (a dense mask)")
        config: MuSeConfig = options_of(call.config, "muse")
        observer = _observer.get()
        if observer is not None:
            return observer(call, config)
        config, exact, heads = config.at(call.layer_idx)
        if exact or (reason := left_to_exact(call, config)) == "":
            return call.exact()
        if reason:
            return call.fallback(reason)
        return approximate(call, config, heads), None


def left_to_exact(call: AttentionCall, config: MuSeConfig) -> str | None:
    """Why a call without a dense mask is not for MuSe; empty where nothing is to approximate; ``None``: it is for MuSe."""
    if call.query.device.type not in ("cpu", "cuda"):
        return f"devices of type {call.query.device.type}"
    if call.query.shape[2] != call.key.shape[2]:
        return "decoding and prefill in chunks"
    if max((stop - start for _, start, stop in call.rows()), default=0) <= 2 * config.block:
        return ""
    if all(stop - start < config.min_length for _, start, stop in call.rows()):
        return f"documents shorter than min_length={config.min_length} tokens"
    return None


def approximate(call: AttentionCall, config: MuSeConfig, exact_heads: tuple[int, ...] = ()) -> Tensor:
    """MuSe's output ``(batch, tokens, heads, dim_v)``, in the dtype of autocast where that is on; rows of padding are zero.

    Args:
        call: one that :func:`left_to_exact` has nothing against.
        config: the options of its layer.
        exact_heads: key heads whose query heads get exact attention.
    """
    batch, heads, tokens, dim = call.query.shape
    groups, width = call.key.shape[1], call.value.shape[3]
    if any(head >= groups for head in exact_heads):
        raise ConfigError(f"layers[{str(call.layer_idx)!r}].exact_heads={list(exact_heads)}: the layer has {groups} key heads")
    wide = max(dim, width)
    dtype = _dtype(call)
    query = pad(call.query.to(dtype), (0, wide - dim)).view(batch, groups, heads // groups, tokens, wide)
    key, value = pad(call.key.to(dtype), (0, wide - dim)), pad(call.value.to(dtype), (0, wide - width))
    run = functools.partial(_run, config=config, scale=call.scaling, exact_heads=exact_heads)
    if call.uniform:
        out = run(query, key, value, call.s_aux)
    else:
        out = query.new_zeros(query.shape)
        for row, start, stop in call.rows():
            span = (slice(row, row + 1), ..., slice(start, stop), slice(None))
            out[span] = run(query[span], key[span], value[span], call.s_aux)
    return out[..., :width].flatten(1, 2).transpose(1, 2).contiguous()


def _dtype(call: AttentionCall) -> torch.dtype:
    """What torch's own attention would work in: that of autocast, where it is on; rotary embeddings leave float32 there."""
    kind = call.query.device.type
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (call.query, call.key, call.value)))
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return dtype


def _run(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, config: MuSeConfig, scale: float,
         exact_heads: tuple[int, ...]) -> Tensor:  # fmt: skip
    """One document per row: ``query`` ``(batch, groups, heads of a group, tokens, dim)``, ``key``, ``value`` without heads."""
    batch, groups, g, tokens, _ = query.shape
    sinks = None if sinks is None else sinks.view(1, groups, g).expand(batch, -1, -1)
    if tokens <= 2 * config.block or tokens < config.min_length:
        return _exact(query, key, value, sinks, scale)
    chosen = [head for head in range(groups) if head not in exact_heads]
    if not exact_heads:
        return _muse(query, key, value, sinks, config, scale)
    left = list(exact_heads)
    out = torch.empty_like(query)
    out[:, left] = _exact(query[:, left], key[:, left], value[:, left], None if sinks is None else sinks[:, left], scale)
    if chosen:
        part = None if sinks is None else sinks[:, chosen]
        out[:, chosen] = _muse(query[:, chosen], key[:, chosen], value[:, chosen], part, config, scale)
    return out


def _muse(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, config: MuSeConfig, scale: float) -> Tensor:
    numbers = (config.clusters, config.query_clusters, config.block, config.retrieve, config.iterations)
    leaky = config.query_codebook != "past"
    flat = None if sinks is None else sinks.flatten(0, 1)
    out, *_ = muse(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), flat, *numbers, leaky, scale)
    return out.view_as(query)


def _exact(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    call = AttentionCall(query=query.flatten(1, 2), key=key, value=value, scaling=scale,
                         s_aux=None if sinks is None else sinks[0].flatten())  # fmt: skip
    return call.exact()[0].transpose(1, 2).view_as(query)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Let ``observer`` compute the calls of this context in MuSe's place."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def configure(model: nn.Module, **options: Any) -> Ledger:
    """Give a model's layers options of MuSe; see :func:`hfplug.seams.attention.configure`.

    Args:
        model: a transformers model, also inside PEFT; on ``attn_implementation="muse"`` or to be.
        options: fields of :class:`MuSeConfig`; those not given get their defaults.

    Returns:
        A ledger whose ``undo()`` restores the configuration.
    """
    return _configure(model, "muse", **options)
