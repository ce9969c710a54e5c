"""MuSe as one operator with a gradient: nothing of size N x N, and in memory between forward and backward no more than q, k, v,
the output, one number per query, and labels.

It is registered with torch, so ``torch.compile`` takes it whole although clusters have data-dependent sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hfplug.kernels.muse import scheme
from hfplug.kernels.muse.scheme import Setting


@torch.library.custom_op("hfplug::muse", mutates_args=())
def muse(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    clusters: int, query_clusters: int, block: int, retrieve: int, iterations: int, leaky: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Causal attention of whole sequences, approximated far away; see :mod:`hfplug.kernels.muse.scheme`.

    Args:
        q: ``(G, g, N, D)`` of a floating dtype; ``g`` query heads share a key head, ``G`` is batch times key heads.
        k: ``(G, N, D)``.
        v: ``(G, N, D)``; the same width as the keys.
        sinks: ``(G, g)`` learned sink logits, part of every softmax with a value of 0; or ``None``.
        clusters, query_clusters, block, retrieve, iterations, leaky, scale: see ``MuSeConfig``.

    Returns:
        Output ``(G, g, N, D)`` in the dtype of ``q``; log-sum-exp ``(G, g, N)``, labels and centroids, which the backward
        needs. Only the output has a gradient.
    """
    setting = Setting(clusters, query_clusters, block, retrieve, iterations, leaky, scale)
    wide = _accumulate(q.dtype)
    o, lse, made = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=wide), []
    for part in _portions(q):
        q_, k_, v_ = (x[part].to(wide).contiguous() for x in (q, k, v))
        with _as_written(q):
            out, lse_, clusters_ = scheme.forward(q_, k_, v_, setting)
        if sinks is not None:
            both = torch.logaddexp(lse_, sinks[part].to(wide)[..., None])
            out.mul_((lse_ - both).exp_()[..., None])
            lse_ = both
        o[part], lse[part] = out, lse_
        made += clusters_
    labels = [x.flatten() for x in made if x.dtype == torch.int32]
    centroids = [x.flatten() for x in made if x.dtype != torch.int32]
    empty = o.new_zeros(0)
    return o, lse, torch.cat([empty.int(), *labels]), torch.cat([empty.to(wide), *centroids])


@muse.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Any, clusters: int, query_clusters: int, block: int, retrieve: int,
      iterations: int, leaky: bool, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    setting = Setting(clusters, query_clusters, block, retrieve, iterations, leaky, scale)
    sizes = {torch.int32: 0, torch.float32: 0}
    for shape, dtype in made_shapes(q, setting):
        sizes[dtype] += math.prod(shape)
    wide = _accumulate(q.dtype)
    o, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=wide)
    return o, lse, q.new_empty(sizes[torch.int32], dtype=torch.int32), q.new_empty(sizes[torch.float32], dtype=wide)


def _as_written(q: Tensor) -> torch.autocast:
    """Autocast reaches into operators; the sums here are in the dtype they are written in, as in torch's own attention."""
    return torch.autocast(q.device.type, enabled=False)


def _portions(q: Tensor) -> list[slice]:
    """What runs at a time: on a CPU one key head, whose tiles then stay in its cache; elsewhere all of them."""
    size = 1 if q.device.type == "cpu" else len(q)
    return [slice(start, start + size) for start in range(0, len(q), size)]


def made_shapes(q: Tensor, setting: Setting) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes of what the forward records, in its order: centroids (float32 stands for floating) and int32 labels."""
    for part in _portions(q):
        yield from _made_shapes(q[part], setting)


def _made_shapes(q: Tensor, setting: Setting) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    groups, g, n, dim = q.shape
    for children in scheme.units(n, setting.block):
        first, last = children[0], children[-1]
        start, stop = (first.queries[0], last.queries[1]) if setting.leaky else first.codebook
        yield (groups * g, min(setting.query_clusters, stop - start), dim), torch.float32
        for begin, end in sorted({span for child in children for span in child.keys}):
            yield (groups, end - begin), torch.int32
        for child in children:
            yield (groups * g, child.queries[1] - child.queries[0]), torch.int32


@torch.library.custom_op("hfplug::muse_backward", mutates_args=())
def muse_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, labels: Tensor, centroids: Tensor, grad: Tensor,
    clusters: int, query_clusters: int, block: int, retrieve: int, iterations: int, leaky: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``q``, ``k``, ``v``, and ``sum(grad * o)`` ``(G, g, N)``, from which that of sink logits follows."""
    setting = Setting(clusters, query_clusters, block, retrieve, iterations, leaky, scale)
    wide = _accumulate(q.dtype)
    flat, at = {torch.int32: labels, torch.float32: centroids}, {torch.int32: 0, torch.float32: 0}

    def recorded(portion: Tensor) -> Iterator[Tensor]:
        for shape, dtype in _made_shapes(portion, setting):
            size = math.prod(shape)
            yield flat[dtype].narrow(0, at[dtype], size).view(shape)
            at[dtype] += size

    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta = torch.empty_like(lse)
    for part in _portions(q):
        q_, k_, v_, o_, grad_ = (x[part].to(wide).contiguous() for x in (q, k, v, o, grad))
        delta[part] = (o_ * grad_).sum(-1)
        with _as_written(q):
            dq[part], dk[part], dv[part] = scheme.backward(
                q_, k_, v_, setting, o_, lse[part], list(recorded(q_)), grad_, delta[part]
            )
    return dq, dk, dv, delta


@muse_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, torch.empty_like(lse)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, sinks, *output)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    q, k, v, sinks, o, lse, labels, centroids = ctx.saved_tensors
    dq, dk, dv, delta = muse_backward(q, k, v, o, lse, labels, centroids, grad, *ctx.numbers)
    dsinks = None
    if sinks is not None:
        dsinks = -((sinks.to(lse.dtype)[..., None] - lse).exp() * delta).sum(-1).to(sinks.dtype)
    return dq, dk, dv, dsinks, *[None] * len(ctx.numbers)


muse.register_autograd(_backward, setup_context=_setup)


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
