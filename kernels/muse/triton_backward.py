"""Triton forms of MuSe's three products, backward; ``triton.py`` holds the forward.

Weights are recomputed from the log-sum-exps, so nothing of the size of the logits is ever kept. Each gradient is summed by the
program that owns it, in float32 and in a fixed order, without atomics; the one exception is
:func:`attend_gathered_backward`, where many rows of queries may have read the same key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hfplug.kernels.muse.triton_common import (
    Seen,
    check,
    check_attend,
    check_gathered,
    check_near,
    check_tilt,
    common,
    hide,
    inner,
    piece,
    row_totals,
    rows_of,
    tiles,
)
from hfplug.launch import Launch, launch_options


@triton.jit  # type: ignore[untyped-decorator]
def tilt_mean_kernel(  # type: ignore[no-untyped-def]
    kbar,
    vbar,
    dL,
    dkbar,
    dvbar,
    mean,
    rows,
    D: tl.constexpr,
    Dv: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """``dkbar kbar + dvbar vbar - dL`` of each summary, ``BG`` of the ``rows`` per program."""
    at = tl.program_id(0).to(tl.int64) * BG + tl.arange(0, BG)
    mask = at < rows
    ds, vs = tl.arange(0, BD), tl.arange(0, BV)
    k, v = rows_of(kbar + at * D, mask, ds, D, WIDEN), rows_of(vbar + at * Dv, mask, vs, Dv, WIDEN)
    # Rounded as in the next kernel: the difference taken there is small where a cluster is tight.
    grad_k = rows_of(dkbar + at * D, mask, ds, D, WIDEN).to(k.dtype).to(tl.float32)
    grad_v = rows_of(dvbar + at * Dv, mask, vs, Dv, WIDEN).to(k.dtype).to(tl.float32)
    total = tl.sum(grad_k * k.to(tl.float32), 1) + tl.sum(grad_v * v.to(tl.float32), 1)
    tl.store(mean + at, total - tl.load(dL + at, mask=mask, other=0.0), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def tilt_backward_kernel(  # type: ignore[no-untyped-def]
    mu,
    k,
    v,
    count,
    L,
    mean,
    dkbar,
    dvbar,
    dk,
    dv,
    C,
    T,
    P,
    scale,
    D: tl.constexpr,
    Dv: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    BKV: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``dk_i = sum_c w_ci dkbar_c + scale dS_ci mu_c`` and ``dv_i = sum_c w_ci dvbar_c`` of ``BP`` slots of one tile per program.

    ``dS_ci = w_ci (dkbar_c k_i + dvbar_c v_i - mean_c)``, the centroids walking by.
    """
    parts = tl.cdiv(P, BP)
    tile = (tl.program_id(0) // parts).to(tl.int64)  # of G * T
    group = tile // T
    slots = (tl.program_id(0) % parts) * BP + tl.arange(0, BP)
    ds, vs = tl.arange(0, BD), tl.arange(0, BV)
    members = tl.minimum(tl.load(count + tile), P)
    p_mask = slots < members
    k_at, v_at = k + (tile * P + slots) * D, v + (tile * P + slots) * Dv
    whole_k = rows_of(k_at, p_mask, ds, D, WIDEN) if BK == BD else 0
    whole_v = rows_of(v_at, p_mask, vs, Dv, WIDEN) if BKV == BV else 0

    sum_k = tl.zeros((BP, BD), dtype=tl.float32)
    sum_v = tl.zeros((BP, BV), dtype=tl.float32)
    # Slots that hold no key are given 0, whatever the gradients of an empty tile are.
    stop = tl.where((tl.program_id(0) % parts) * BP < members, C, 0)
    for first in range(0, stop, BC):
        cs = first + tl.arange(0, BC)
        c_mask = cs < C
        at = (group * C + cs) * T + tile % T
        mu_at = mu + (group * C + cs) * D
        centroids = rows_of(mu_at, c_mask, ds, D, WIDEN)
        grad_k = rows_of(dkbar + at * D, c_mask, ds, D, WIDEN).to(centroids.dtype)
        grad_v = rows_of(dvbar + at * Dv, c_mask, vs, Dv, WIDEN).to(centroids.dtype)
        S = scale * inner(whole_k, k_at, p_mask, centroids, mu_at, c_mask, D, BD, BK, WIDEN, PRECISION)
        w = tl.exp(S - tl.load(L + at, mask=c_mask, other=0.0)[None, :])
        w = tl.where(p_mask[:, None], w, 0.0)  # past the last centroid gradients are 0
        dw = inner(whole_k, k_at, p_mask, grad_k, dkbar + at * D, c_mask, D, BD, BK, WIDEN, PRECISION)
        dw += inner(whole_v, v_at, p_mask, grad_v, dvbar + at * Dv, c_mask, Dv, BV, BKV, WIDEN, PRECISION)
        dS = scale * w * (dw - tl.load(mean + at, mask=c_mask, other=0.0)[None, :])
        w = w.to(centroids.dtype)
        sum_k = tl.dot(w, grad_k, sum_k, input_precision=PRECISION)
        sum_k = tl.dot(dS.to(w.dtype), centroids, sum_k, input_precision=PRECISION)
        sum_v = tl.dot(w, grad_v, sum_v, input_precision=PRECISION)
    s_mask = (slots < P)[:, None]
    k_out = dk + (tile * P + slots)[:, None] * D + ds[None, :]
    v_out = dv + (tile * P + slots)[:, None] * Dv + vs[None, :]
    tl.store(k_out, sum_k.to(dk.dtype.element_ty), mask=s_mask & (ds < D)[None, :])
    tl.store(v_out, sum_v.to(dv.dtype.element_ty), mask=s_mask & (vs < Dv)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def attend_dq_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    bias,
    index,
    source,
    lse,
    grad,
    delta,
    dq,
    heads,
    R,
    M,
    N,
    block,
    scale,
    D: tl.constexpr,
    Dv: tl.constexpr,
    BR: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    BKV: tl.constexpr,
    NEAR: tl.constexpr,
    GATHER: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``dq = scale sum_j ds_j k_j`` of ``BR`` rows of one query head per program, ``ds = p (grad v - delta)``."""
    tiles = tl.cdiv(R, BR)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    group = head // heads
    start = (tl.program_id(0) % tiles) * BR
    rows = start + tl.arange(0, BR)
    ds, vs = tl.arange(0, BD), tl.arange(0, BV)
    r_mask = rows < R
    at = head * R + rows
    q_at, grad_at = q + at * D, grad + at * Dv
    whole_q = rows_of(q_at, r_mask, ds, D, WIDEN) if BK == BD else 0
    whole_grad = rows_of(grad_at, r_mask, vs, Dv, WIDEN) if BKV == BV else 0
    total = row_totals(lse, at, r_mask)
    mean = tl.load(delta + at, mask=r_mask, other=0.0)

    first = group * M  # row of the keys, counted over all groups
    if GATHER:
        first = tl.load(source + group).to(tl.int64) * N
    low, high = 0, M
    if NEAR:
        low = tl.maximum(start // block - 1, 0) * block
        high = tl.minimum(start + BR, M)
    out = tl.zeros((BR, BD), dtype=tl.float32)
    for step in range(low, high, BM):
        columns = step + tl.arange(0, BM)
        m_mask = columns < M
        positions = columns
        if GATHER:
            positions = tl.load(index + group * M + columns, mask=m_mask, other=-1)
            m_mask = positions >= 0
        k_at, v_at = k + (first + positions) * D, v + (first + positions) * Dv
        keys = rows_of(k_at, m_mask, ds, D, WIDEN)
        values = rows_of(v_at, m_mask, vs, Dv, WIDEN) if BKV == BV else 0
        a = scale * inner(whole_q, q_at, r_mask, keys, k_at, m_mask, D, BD, BK, WIDEN, PRECISION)
        b = tl.zeros((BM,), dtype=tl.float32) if bias is None else tl.load(bias + group * M + columns, mask=m_mask, other=0.0)
        a = hide(a, b[None, :], rows[:, None], columns[None, :], m_mask[None, :], block, NEAR)
        p = tl.exp(a - total[:, None])
        dp = inner(whole_grad, grad_at, r_mask, values, v_at, m_mask, Dv, BV, BKV, WIDEN, PRECISION)
        dS = p * (dp - mean[:, None])
        out = tl.dot(dS.to(keys.dtype), keys, out, input_precision=PRECISION)
    tl.store(dq + at[:, None] * D + ds[None, :], (scale * out).to(dq.dtype.element_ty), mask=r_mask[:, None] & (ds < D)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def attend_dkv_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915 - a kernel has no state to split it by
    q,
    k,
    v,
    bias,
    index,
    source,
    lse,
    grad,
    delta,
    dk,
    dv,
    dbias,
    heads,
    R,
    M,
    N,
    block,
    scale,
    D: tl.constexpr,
    Dv: tl.constexpr,
    BR: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    BKV: tl.constexpr,
    NEAR: tl.constexpr,
    GATHER: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of ``BM`` keys, values and biases per program, summed over the rows of all ``heads`` query heads."""
    parts = tl.cdiv(M, BM)
    group = (tl.program_id(0) // parts).to(tl.int64)
    start = (tl.program_id(0) % parts) * BM
    columns = start + tl.arange(0, BM)
    ds, vs = tl.arange(0, BD), tl.arange(0, BV)
    m_mask = columns < M
    positions = columns
    first = group * M
    if GATHER:
        positions = tl.load(index + group * M + columns, mask=m_mask, other=-1)
        m_mask = positions >= 0
        first = tl.load(source + group).to(tl.int64) * N
    k_at, v_at = k + (first + positions) * D, v + (first + positions) * Dv
    whole_k = rows_of(k_at, m_mask, ds, D, WIDEN) if BK == BD else 0
    whole_v = rows_of(v_at, m_mask, vs, Dv, WIDEN) if BKV == BV else 0
    b = tl.zeros((BM,), dtype=tl.float32) if bias is None else tl.load(bias + group * M + columns, mask=m_mask, other=0.0)

    low, high = 0, R
    if NEAR:
        low = start
        high = tl.minimum(((start + BM - 1) // block + 2) * block, R)
    steps = tl.cdiv(high - low, BR)
    sum_k = tl.zeros((BM, BD), dtype=tl.float32)
    sum_v = tl.zeros((BM, BV), dtype=tl.float32)
    sum_b = tl.zeros((BM,), dtype=tl.float32)
    for step in range(heads * steps):
        rows = low + (step % steps) * BR + tl.arange(0, BR)
        r_mask = rows < R
        at = (group * heads + step // steps) * R + rows
        q_at, grad_at = q + at * D, grad + at * Dv
        queries = rows_of(q_at, r_mask, ds, D, WIDEN)
        grads = rows_of(grad_at, r_mask, vs, Dv, WIDEN).to(queries.dtype)
        total = row_totals(lse, at, r_mask)
        mean = tl.load(delta + at, mask=r_mask, other=0.0)
        a = scale * inner(whole_k, k_at, m_mask, queries, q_at, r_mask, D, BD, BK, WIDEN, PRECISION)
        a = hide(a, b[:, None], rows[None, :], columns[:, None], m_mask[:, None], block, NEAR)
        p = tl.exp(a - total[None, :])
        dp = inner(whole_v, v_at, m_mask, grads, grad_at, r_mask, Dv, BV, BKV, WIDEN, PRECISION)
        dS = p * (dp - mean[None, :])
        sum_k = tl.dot(dS.to(queries.dtype), queries, sum_k, input_precision=PRECISION)
        sum_v = tl.dot(p.to(queries.dtype), grads, sum_v, input_precision=PRECISION)
        sum_b += tl.sum(dS, 1)
    k_out = dk + (first + positions)[:, None] * D + ds[None, :]
    v_out = dv + (first + positions)[:, None] * Dv + vs[None, :]
    k_mask, v_mask = m_mask[:, None] & (ds < D)[None, :], m_mask[:, None] & (vs < Dv)[None, :]
    if GATHER:
        tl.atomic_add(k_out, scale * sum_k, mask=k_mask, sem="relaxed")
        tl.atomic_add(v_out, sum_v, mask=v_mask, sem="relaxed")
    else:
        tl.store(k_out, (scale * sum_k).to(dk.dtype.element_ty), mask=k_mask)
        tl.store(v_out, sum_v.to(dv.dtype.element_ty), mask=v_mask)
    if bias is not None:
        tl.store(dbias + group * M + columns, sum_b, mask=m_mask)


def tilt_backward_launches(
    mu: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float,
    L: Tensor, kbar: Tensor, vbar: Tensor, dL: Tensor, dkbar: Tensor, dvbar: Tensor, mean: Tensor, dk: Tensor, dv: Tensor,
) -> dict[str, Launch]:  # fmt: skip
    """How :func:`tilt_backward` is started, in this order; ``mean`` ``(G, C, T)`` float32 is scratch."""
    (G, T, P, D), C, Dv = k.shape, mu.shape[1], v.shape[3]
    shared = common(k.dtype, D, Dv)
    BP, BC, options = tiles("tilt_backward", k.dtype, max(D, Dv), P, C)
    summaries = {
        "kbar": kbar, "vbar": vbar, "dL": dL, "dkbar": dkbar, "dvbar": dvbar, "mean": mean, "rows": L.numel(),
        "BG": 16, **{name: shared[name] for name in ("D", "Dv", "BD", "BV", "WIDEN")},
    }  # fmt: skip
    members = {
        "mu": mu, "k": k, "v": v, "count": count, "L": L, "mean": mean, "dkbar": dkbar, "dvbar": dvbar, "dk": dk, "dv": dv,
        "C": C, "T": T, "P": P, "scale": scale, **shared, "BKV": piece(k.dtype, Dv), "BC": BC, "BP": BP,
    }  # fmt: skip
    return {
        "mean": Launch(tilt_mean_kernel, triton.cdiv(L.numel(), 16), summaries, launch_options(4, 1)),
        "dkv": Launch(tilt_backward_kernel, G * T * triton.cdiv(P, BP), members, options),
    }


def attend_backward_launches(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float, lse: Tensor, grad: Tensor, delta: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, dbias: Tensor | None,
) -> dict[str, Launch]:  # fmt: skip
    """How the backward of softmax attention is started: ``q`` ``(G, heads, R, D)``; the last four are its outputs."""
    (G, heads, R, D), Dv = q.shape, v.shape[-1]
    arguments = {
        "q": q, "k": k, "v": v, "lse": lse, "grad": grad, "delta": delta, "heads": heads, "R": R, "scale": scale,
        **seen.arguments(k), **common(q.dtype, D, Dv), "BKV": piece(q.dtype, Dv),
    }  # fmt: skip
    M, gathered = arguments["M"], " gathered" if seen.index is not None else ""
    BR, BM, options = tiles("dq", q.dtype, max(D, Dv), R, M)
    for_q = {**arguments, "dq": dq, "BR": BR, "BM": BM}
    launches = {"dq": Launch(attend_dq_kernel, G * heads * triton.cdiv(R, BR), for_q, options)}
    BM, BR, options = tiles(f"dkv{gathered}", q.dtype, max(D, Dv), M, R)
    for_k = {**arguments, "dk": dk, "dv": dv, "dbias": dbias, "BR": BR, "BM": BM}
    return {**launches, "dkv": Launch(attend_dkv_kernel, G * triton.cdiv(M, BM), for_k, options)}


def tilt_backward(
    mu: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float,
    L: Tensor, kbar: Tensor, vbar: Tensor, dL: Tensor, dkbar: Tensor, dvbar: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients ``dk``, ``dv``, exactly 0 in free slots; see ``primitives.tilt_backward``.

    ``dkbar`` and ``dvbar`` may be of another dtype than the keys, such as float32 sums.
    """
    check_tilt(mu, k, v, count)
    (G, T, _, D), C, Dv = k.shape, mu.shape[1], v.shape[3]
    for name, tensor, shape, dtype in (
        ("L", L, (G, C, T), torch.float32), ("kbar", kbar, (G, C, T, D), k.dtype), ("vbar", vbar, (G, C, T, Dv), k.dtype),
        ("dL", dL, (G, C, T), torch.float32), ("dkbar", dkbar, (G, C, T, D), None), ("dvbar", dvbar, (G, C, T, Dv), None),
    ):  # fmt: skip
        check(name, tensor, shape, k, dtype)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for launch in tilt_backward_launches(
        mu, k, v, count, scale, L, kbar, vbar, dL, dkbar, dvbar, torch.empty_like(L), dk, dv
    ).values():
        launch.run()
    return dk, dv


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, lse: Tensor, grad: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients ``dq``, ``dk``, ``dv`` and ``dbias`` (float32) of this part of rows; see ``primitives.attend_backward``."""
    check_attend(q, k, v, bias)
    dq, dk, dv, dbias = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(bias)
    _attend_backward(q[:, None], k, v, Seen(bias=bias), scale, lse, grad, delta, dq, dk, dv, dbias)
    return dq, dk, dv, dbias


def attend_gathered_backward(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, source: Tensor, scale: float,
    lse: Tensor, grad: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
) -> Tensor:  # fmt: skip
    """Backward of ``attend_gathered``: ``dq`` ``(G, R, D)``; adds to ``dk`` ``(H, N, D)`` and ``dv`` ``(H, N, Dv)``, float32.

    It adds atomically, so the order of the sums, and with it their last bits, can change from run to run. ``lse``, ``grad`` and
    ``delta`` are those of the whole rows, as for ``primitives.attend_backward``.

    Raises:
        ConfigError, UnsupportedError: as the forward.
    """
    check_gathered(q, k, v, index, source)
    check("dk", dk, tuple(k.shape), q, torch.float32)
    check("dv", dv, tuple(v.shape), q, torch.float32)
    dq = torch.empty_like(q)
    _attend_backward(q[:, None], k, v, Seen(index=index, source=source), scale, lse, grad, delta, dq, dk, dv, None)
    return dq


def near_backward(
    q: Tensor, k: Tensor, v: Tensor, block: int, scale: float, o: Tensor, lse: Tensor, grad: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients ``dq`` ``(G, g, N, D)``, ``dk``, ``dv`` ``(G, N, ·)``; see ``primitives.near_backward``.

    ``o`` is not read: what is needed of it is in ``delta``.
    """
    check_near(q, k, v, block)
    check("o", o, (*q.shape[:3], v.shape[-1]), q, None)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _attend_backward(q, k, v, Seen(block=block), scale, lse, grad, delta, dq, dk, dv, None)
    return dq, dk, dv


def _attend_backward(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float, lse: Tensor, grad: Tensor, delta: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, dbias: Tensor | None,
) -> None:  # fmt: skip
    rows = tuple(dq.shape[:-1])
    check("lse", lse, rows, q, torch.float32)
    check("grad", grad, (*rows, v.shape[-1]), q, None)
    check("delta", delta, rows, q, torch.float32)
    for launch in attend_backward_launches(q, k, v, seen, scale, lse, grad, delta, dq, dk, dv, dbias).values():
        launch.run()
