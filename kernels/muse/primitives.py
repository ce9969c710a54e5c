"""The three products MuSe is made of, forward and backward: torch here, Triton in ``triton.py``.

* :func:`tilt`: what a cluster of keys looks like to a query centroid: its log mass, mean key and mean value under the softmax
  that the centroid sees.
* :func:`attend`: softmax attention over keys with a bias each, with its log-sum-exp: of queries to summaries, and to keys
  retrieved one by one.
* :func:`near`: exact causal attention to one's own block and the one before.

Backward functions take the log-sum-exp and the output of the *whole* row, of which each part is one summand; then the softmax
gradient of a part is exact. ``delta`` is ``sum(grad * output)`` over the last dimension. A row that sees nothing has
``lse = -inf`` and output 0.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from hfplug import UnsupportedError

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _kernels(tensor: Tensor) -> ModuleType | None:
    """The Triton forms, for tensors on a GPU; the forms here are those of a CPU."""
    if tensor.device.type == "cpu":
        return None
    if tensor.device.type != "cuda":
        raise UnsupportedError(f"MuSe runs on CPU and CUDA (ROCm) tensors; got {tensor.device.type!r}")
    from hfplug.kernels.muse import triton

    return triton


def tilt(mu: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Summaries of tiles of keys as seen from query centroids.

    Args:
        mu: ``(G, C, D)`` centroids.
        k: ``(G, T, P, D)`` keys, the first ``count`` of each tile.
        v: ``(G, T, P, Dv)`` values.
        count: ``(G, T)`` int.
        scale: factor of the logits.

    Returns:
        ``L`` ``(G, C, T)`` log of the summed weights, -inf for an empty tile; ``kbar`` ``(G, C, T, D)``, ``vbar``
        ``(G, C, T, Dv)`` weighted means, 0 for an empty tile.
    """
    if kernels := _kernels(k):
        return kernels.tilt(mu, k, v, count, scale)
    S, L = _tilted(mu, k, count, scale)
    w = S.sub_(torch.where(L.isinf(), 0.0, L)[..., None]).exp_()
    kbar, vbar = (torch.matmul(w, x).transpose(1, 2).contiguous() for x in (k, v))
    return L.transpose(1, 2).contiguous(), kbar, vbar


def _tilted(mu: Tensor, k: Tensor, count: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Logits ``(G, T, C, P)``, -inf in free slots, and their log-sum-exp ``(G, T, C)``."""
    S = torch.matmul(mu.mul(scale)[:, None], k.transpose(2, 3))
    free = torch.arange(k.shape[2], device=k.device) >= count[..., None]
    S.masked_fill_(free[:, :, None], float("-inf"))
    return S, torch.logsumexp(S, -1)


def tilt_backward(
    mu: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float,
    L: Tensor, kbar: Tensor, vbar: Tensor, dL: Tensor, dkbar: Tensor, dvbar: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients ``dk``, ``dv`` of :func:`tilt`; centroids have none. ``L``, ``kbar``, ``vbar`` are what the forward gave."""
    if kernels := _kernels(k):
        return kernels.tilt_backward(mu, k, v, count, scale, L, kbar, vbar, dL, dkbar, dvbar)
    S, _ = _tilted(mu, k, count, scale)
    w = S.sub_(torch.where(L.isinf(), 0.0, L).transpose(1, 2)[..., None]).exp_()
    dkbar_, dvbar_ = (x.transpose(1, 2) for x in (dkbar, dvbar))  # (G, T, C, ·)
    mean = (dkbar * kbar).sum(-1).add_((dvbar * vbar).sum(-1)).sub_(dL).transpose(1, 2)[..., None]
    dw = torch.matmul(dkbar_, k.transpose(2, 3)).add_(torch.matmul(dvbar_, v.transpose(2, 3)))
    dS = dw.sub_(mean).mul_(w).mul_(scale)
    wt = w.transpose(2, 3)
    dk = torch.matmul(wt, dkbar_).add_(torch.matmul(dS.transpose(2, 3), mu[:, None]))
    return dk, torch.matmul(wt, dvbar_)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention with one bias per key.

    Args:
        q: ``(G, R, D)``.
        k: ``(G, M, D)``.
        v: ``(G, M, D)``; the same width as the keys.
        bias: ``(G, M)``, added to the logits; -inf: not attended.
        scale: factor of the logits.

    Returns:
        Output ``(G, R, D)`` and log-sum-exp ``(G, R)``.
    """
    if kernels := _kernels(q):
        return kernels.attend(q, k, v, bias, scale)
    o, lse = _flash(q[:, None], k[:, None], v[:, None], attn_mask=bias[:, None, None], scale=scale)
    nothing = (bias == float("-inf")).all(-1)  # there the CPU kernel says 0 for the log-sum-exp
    return o[:, 0], lse[:, 0].masked_fill(nothing[:, None], float("-inf"))


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, lse: Tensor, grad: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients ``dq``, ``dk``, ``dv``, ``dbias`` of this part of rows with ``lse`` ``(G, R)`` and ``delta`` ``(G, R)``."""
    if kernels := _kernels(q):
        return kernels.attend_backward(q, k, v, bias, scale, lse, grad, delta)
    p = torch.baddbmm(bias[:, None], q, k.transpose(1, 2), alpha=scale)
    p = p.sub_(torch.where(lse.isinf(), float("inf"), lse)[..., None]).exp_()
    ds = torch.bmm(grad, v.transpose(1, 2)).sub_(delta[..., None]).mul_(p)
    dv = torch.bmm(p.transpose(1, 2), grad)
    dbias = ds.sum(1)
    ds.mul_(scale)
    return torch.bmm(ds, k), torch.bmm(ds.transpose(1, 2), q), dv, dbias


def near(q: Tensor, k: Tensor, v: Tensor, block: int, scale: float) -> tuple[Tensor, Tensor]:
    """Exact causal attention of each query to its own block and the block before.

    Args:
        q: ``(G, g, N, D)``: ``g`` query heads share a key head.
        k: ``(G, N, D)``.
        v: ``(G, N, D)``; the same width as the keys.
        block: number of positions in a block; the last may be shorter.
        scale: factor of the logits.

    Returns:
        Output ``(G, g, N, D)`` and log-sum-exp ``(G, g, N)``.
    """
    if kernels := _kernels(q):
        return kernels.near(q, k, v, block, scale)
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for rows, keys, causal in _near_parts(q.shape[2], block):
        for group in range(q.shape[0]):
            qs, ks, vs = _blocks(q[group], k[group], v[group], rows, keys)
            part, part_lse = _flash(qs, ks, vs, is_causal=causal, scale=scale)
            goal, goal_lse = rows.of(o[group]), rows.of(lse[group][..., None])[..., 0]
            if causal:
                goal.copy_(part)
                goal_lse.copy_(part_lse)
            else:
                merge_(goal, goal_lse, part, part_lse)
    return o, lse


def near_backward(
    q: Tensor, k: Tensor, v: Tensor, block: int, scale: float, o: Tensor, lse: Tensor, grad: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients ``dq`` ``(G, g, N, D)``, ``dk``, ``dv`` ``(G, N, D)`` of :func:`near`, given whole rows' ``o`` and ``lse``."""
    if kernels := _kernels(q):
        return kernels.near_backward(q, k, v, block, scale, o, lse, grad, delta)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys, causal in _near_parts(q.shape[2], block):
        for group in range(q.shape[0]):
            qs, ks, vs = _blocks(q[group], k[group], v[group], rows, keys)
            outs = rows.of(o[group]), rows.of(lse[group][..., None])[..., 0]
            grads = _flash_backward(rows.of(grad[group]), qs, ks, vs, *outs, 0.0, causal, scale=scale)
            rows.of(dq[group]).add_(grads[0])
            keys.of(dk[group]).add_(grads[1].sum(0))
            keys.of(dv[group]).add_(grads[2].sum(0))
    return dq, dk, dv


class _Blocks:
    """A run of whole blocks, or one short block, as a view ``(…, blocks, length, dim)``."""

    def __init__(self, start: int, blocks: int, length: int) -> None:
        self.start, self.blocks, self.length = start, blocks, length

    def of(self, x: Tensor) -> Tensor:
        return x.narrow(-2, self.start, self.blocks * self.length).unflatten(-2, (self.blocks, self.length))


def _near_parts(n: int, block: int) -> list[tuple[_Blocks, _Blocks, bool]]:
    """Queries, their keys, and whether the part is causal (the own block) or whole (the one before)."""
    whole, tail = divmod(n, block)
    parts = []
    if whole:
        own = _Blocks(0, whole, block)
        parts.append((own, own, True))
    if whole > 1:
        parts.append((_Blocks(block, whole - 1, block), _Blocks(0, whole - 1, block), False))
    if tail:
        short = _Blocks(whole * block, 1, tail)
        parts.append((short, short, True))
        if whole:
            parts.append((short, _Blocks((whole - 1) * block, 1, block), False))
    return parts


def _blocks(q: Tensor, k: Tensor, v: Tensor, rows: _Blocks, keys: _Blocks) -> tuple[Tensor, Tensor, Tensor]:
    # (heads of the group, blocks, length, dim): the key head is shared by a stride of 0
    qs = rows.of(q)
    return qs, keys.of(k).expand(qs.shape[0], -1, -1, -1), keys.of(v).expand(qs.shape[0], -1, -1, -1)


def merge_(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention to further keys into ``o`` ``(…, D)`` and ``lse`` ``(…)``, in place."""
    both = torch.logaddexp(lse, part_lse)
    # Where both are -inf nothing is seen; exp(-inf - -inf) would be NaN.
    safe = torch.where(both.isinf(), 0.0, both)
    o.mul_((lse - safe).exp_()[..., None]).addcmul_(part, (part_lse - safe).exp_()[..., None])
    lse.copy_(both)
