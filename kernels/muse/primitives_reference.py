"""The three products of MuSe in float64, written for reading: every pair in a matrix, gradients by autograd or as formulas.

:func:`tilt`, :func:`attend` and :func:`near` are differentiable. :func:`tilt_gradients` and :func:`attend_gradients` are the
formulas that the other forms implement, written out once; the tests hold them to the autograd of the former. Shapes are those
of ``primitives.py``. Everything is our reading of the paper (arXiv 2509.10406).
"""

from __future__ import annotations

import torch
from torch import Tensor


def tilt(mu: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """``L`` ``(G, C, T)``, ``kbar`` ``(G, C, T, D)``, ``vbar`` ``(G, C, T, Dv)``; slots from ``count`` on hold no key."""
    free = torch.arange(k.shape[2], device=k.device) >= count[..., None]  # (G, T, P)
    # Whatever a free slot holds, even NaN, is replaced before anything is computed from it.
    k, v = (x.double().masked_fill(free[..., None], 0.0) for x in (k, v))
    S = scale * torch.einsum("gcd,gtpd->gctp", mu.detach().double(), k)
    S = S.masked_fill(free[:, None], float("-inf"))
    empty = (count == 0)[:, None, :, None]
    w = torch.softmax(S.masked_fill(empty, 0.0), -1).masked_fill(free[:, None], 0.0)
    L = torch.logsumexp(S.masked_fill(empty, 0.0), -1).masked_fill(empty[..., 0], float("-inf"))
    return L, torch.einsum("gctp,gtpd->gctd", w, k), torch.einsum("gctp,gtpd->gctd", w, v)


def tilt_gradients(
    mu: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float, dL: Tensor, dkbar: Tensor, dvbar: Tensor
) -> tuple[Tensor, Tensor]:
    """``dk`` and ``dv``, slot by slot: ``dS = w (dkbar (k - kbar) + dvbar (v - vbar) + dL)``; centroids are constants."""
    L, kbar, vbar = tilt(mu, k, v, count, scale)
    dk, dv = torch.zeros_like(k, dtype=torch.float64), torch.zeros_like(v, dtype=torch.float64)
    mu, dL, dkbar, dvbar = (x.double() for x in (mu, dL, dkbar, dvbar))
    for g in range(k.shape[0]):
        for t in range(k.shape[1]):
            for i in range(int(count[g, t])):
                ki, vi = k[g, t, i].double(), v[g, t, i].double()
                w = torch.exp(scale * mu[g] @ ki - L[g, :, t])  # (C,)
                dS = w * (
                    (dkbar[g, :, t] * (ki - kbar[g, :, t])).sum(-1)
                    + (dvbar[g, :, t] * (vi - vbar[g, :, t])).sum(-1)
                    + dL[g, :, t]
                )
                dk[g, t, i] = w @ dkbar[g, :, t] + scale * dS @ mu[g]
                dv[g, t, i] = w @ dvbar[g, :, t]
    return dk, dv


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output ``(…, R, Dv)`` and log-sum-exp ``(…, R)`` of attention with a bias ``(…, M)`` or ``(…, R, M)``.

    0 and -inf for a row whose biases are all -inf.
    """
    q, k, v, bias = (x.double() for x in (q, k, v, bias))
    a = scale * q @ k.mT + (bias if bias.dim() == q.dim() else bias[..., None, :])
    nothing = (a == float("-inf")).all(-1, keepdim=True)
    p = torch.softmax(a.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    return p @ v, torch.logsumexp(a.masked_fill(nothing, 0.0), -1).masked_fill(nothing[..., 0], float("-inf"))


def attend_gradients(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, lse: Tensor, grad: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dq``, ``dk``, ``dv`` and the gradient of the logits ``(…, R, M)`` of one part of rows.

    Of the whole rows are ``lse`` ``(…, R)``, the gradient ``grad`` ``(…, R, Dv)`` of the output, and
    ``delta = sum(grad * output)`` ``(…, R)``. The sum of the last result over the rows is the gradient of a bias per key.
    """
    q, k, v, bias, lse, grad, delta = (x.double() for x in (q, k, v, bias, lse, grad, delta))
    a = scale * q @ k.mT + (bias if bias.dim() == q.dim() else bias[..., None, :])
    p = torch.exp(a - lse.masked_fill(lse == float("-inf"), float("inf"))[..., None])
    ds = p * (grad @ v.mT - delta[..., None])
    return scale * ds @ k, scale * ds.mT @ q, p.mT @ grad, ds


def near_bias(n: int, block: int) -> Tensor:
    """``(n, n)``: 0 where the key is not later than the query and in its own block of positions or the one before, else -inf."""
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    seen = (j <= i) & (j // block >= i // block - 1)
    return torch.zeros(n, n, dtype=torch.float64).masked_fill(~seen, float("-inf"))


def near(q: Tensor, k: Tensor, v: Tensor, block: int, scale: float) -> tuple[Tensor, Tensor]:
    """Output ``(G, g, N, Dv)`` and log-sum-exp ``(G, g, N)``; ``g`` query heads share a head of keys."""
    shape = (*q.shape[:2], -1, -1)
    k, v = (x[:, None].expand(shape) for x in (k, v))
    return attend(q, k, v, near_bias(q.shape[2], block).to(q.device).expand(*q.shape[:2], -1, -1), scale)
