"""Triton forms of MuSe's three products, forward; ``triton_backward.py`` holds the backward.

Two kernels: one for :func:`tilt`; one for softmax attention, whose keys are summaries with a bias (:func:`attend`), members
read where they lie (:func:`attend_gathered`) or the own and the previous block (:func:`near`). A program owns a tile of rows
and walks over its keys with the running maximum, sum and output of the online softmax (Milakov & Gimelshein, arXiv 1805.02867;
Rabe & Staats, arXiv 2112.05682): no logit reaches memory. Sums are in float32 and in a fixed order.

Inputs are float32, bfloat16 or float16, contiguous, all of one dtype; outputs have it too, except log-sum-exps and biases,
which are float32. Everything agrees with the torch forms in ``primitives.py``, where the arguments are described.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hfplug.kernels.muse.triton_backward import (
    attend_backward,
    attend_backward_launches,
    attend_gathered_backward,
    near_backward,
    tilt_backward,
    tilt_backward_launches,
)
from hfplug.kernels.muse.triton_common import (
    Seen,
    check_attend,
    check_gathered,
    check_near,
    check_tilt,
    common,
    hide,
    inner,
    rows_of,
    tiles,
)
from hfplug.launch import Launch

__all__ = [
    "attend", "attend_backward", "attend_gathered", "attend_gathered_backward", "launches_of_a_step", "near", "near_backward",
    "tilt", "tilt_backward",
]  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def tilt_kernel(  # type: ignore[no-untyped-def]
    mu,
    k,
    v,
    count,
    L,
    kbar,
    vbar,
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
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Log mass, mean key and mean value of one tile of keys, for ``BC`` centroids per program."""
    parts = tl.cdiv(C, BC)
    tile = (tl.program_id(0) // parts).to(tl.int64)  # of G * T
    group = tile // T
    cs = (tl.program_id(0) % parts) * BC + tl.arange(0, BC)
    ds, vs = tl.arange(0, BD), tl.arange(0, BV)
    c_mask = cs < C
    mu_at = mu + (group * C + cs) * D
    whole_mu = rows_of(mu_at, c_mask, ds, D, WIDEN) if BK == BD else 0
    members = tl.minimum(tl.load(count + tile), P)  # a count that is too large reads no memory outside

    top = tl.full((BC,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BC,), dtype=tl.float32)
    sum_k = tl.zeros((BC, BD), dtype=tl.float32)
    sum_v = tl.zeros((BC, BV), dtype=tl.float32)
    for first in range(0, members, BP):
        slots = first + tl.arange(0, BP)
        p_mask = slots < members
        k_at = k + (tile * P + slots) * D
        keys = rows_of(k_at, p_mask, ds, D, WIDEN)
        values = rows_of(v + (tile * P + slots) * Dv, p_mask, vs, Dv, WIDEN)
        S = scale * inner(whole_mu, mu_at, c_mask, keys, k_at, p_mask, D, BD, BK, WIDEN, PRECISION)
        S = tl.where(p_mask[None, :], S, float("-inf"))
        new = tl.maximum(top, tl.max(S, 1))  # finite: the first slot of the step is a member
        shrink = tl.exp(top - new)
        w = tl.exp(S - new[:, None])
        mass = mass * shrink + tl.sum(w, 1)
        w = w.to(keys.dtype)
        sum_k = tl.dot(w, keys, sum_k * shrink[:, None], input_precision=PRECISION)
        sum_v = tl.dot(w, values, sum_v * shrink[:, None], input_precision=PRECISION)
        top = new

    whole = tl.where(mass > 0, mass, 1.0)  # an empty tile: log mass -inf, means 0
    at = (group * C + cs) * T + tile % T
    tl.store(L + at, top + tl.log(whole), mask=c_mask)
    k_out = (sum_k / whole[:, None]).to(kbar.dtype.element_ty)
    v_out = (sum_v / whole[:, None]).to(vbar.dtype.element_ty)
    tl.store(kbar + at[:, None] * D + ds[None, :], k_out, mask=c_mask[:, None] & (ds < D)[None, :])
    tl.store(vbar + at[:, None] * Dv + vs[None, :], v_out, mask=c_mask[:, None] & (vs < Dv)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def attend_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    bias,
    index,
    source,
    o,
    lse,
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
    NEAR: tl.constexpr,
    GATHER: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Softmax attention of ``BR`` rows of one query head per program; ``heads`` query heads share a head of keys."""
    tiles = tl.cdiv(R, BR)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    group = head // heads
    start = (tl.program_id(0) % tiles) * BR
    rows = start + tl.arange(0, BR)
    ds, vs = tl.arange(0, BD), tl.arange(0, BV)
    r_mask = rows < R
    q_at = q + (head * R + rows) * D
    whole_q = rows_of(q_at, r_mask, ds, D, WIDEN) if BK == BD else 0

    first = group * M  # row of the keys, counted over all groups
    if GATHER:
        first = tl.load(source + group).to(tl.int64) * N
    low, high = 0, M
    if NEAR:
        low = tl.maximum(start // block - 1, 0) * block
        high = tl.minimum(start + BR, M)
    top = tl.full((BR,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BR,), dtype=tl.float32)
    out = tl.zeros((BR, BV), dtype=tl.float32)
    for step in range(low, high, BM):
        columns = step + tl.arange(0, BM)
        m_mask = columns < M
        positions = columns
        if GATHER:
            positions = tl.load(index + group * M + columns, mask=m_mask, other=-1)
            m_mask = positions >= 0
        k_at = k + (first + positions) * D
        keys = rows_of(k_at, m_mask, ds, D, WIDEN) if BK == BD else 0
        a = scale * inner(whole_q, q_at, r_mask, keys, k_at, m_mask, D, BD, BK, WIDEN, PRECISION)
        b = tl.zeros((BM,), dtype=tl.float32) if bias is None else tl.load(bias + group * M + columns, mask=m_mask, other=0.0)
        a = hide(a, b[None, :], rows[:, None], columns[None, :], m_mask[None, :], block, NEAR)
        new = tl.maximum(top, tl.max(a, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # nothing seen so far: -inf - -inf would be NaN
        shrink = tl.exp(top - safe)
        p = tl.exp(a - safe[:, None])
        mass = mass * shrink + tl.sum(p, 1)
        values = rows_of(v + (first + positions) * Dv, m_mask, vs, Dv, WIDEN)
        out = tl.dot(p.to(values.dtype), values, out * shrink[:, None], input_precision=PRECISION)
        top = new

    whole = tl.where(mass > 0, mass, 1.0)
    at = head * R + rows
    tl.store(lse + at, top + tl.log(whole), mask=r_mask)
    out = (out / whole[:, None]).to(o.dtype.element_ty)
    tl.store(o + at[:, None] * Dv + vs[None, :], out, mask=r_mask[:, None] & (vs < Dv)[None, :])


def tilt_launch(mu: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float, L: Tensor, kbar: Tensor, vbar: Tensor) -> Launch:
    """How :func:`tilt` is started; the last three are its outputs."""
    (G, T, P, D), C, Dv = k.shape, mu.shape[1], v.shape[3]
    arguments = {
        "mu": mu, "k": k, "v": v, "count": count, "L": L, "kbar": kbar, "vbar": vbar, "C": C, "T": T, "P": P, "scale": scale,
        **common(k.dtype, D, Dv),
    }  # fmt: skip
    BC, BP, options = tiles("tilt", k.dtype, max(D, Dv), C, P)
    return Launch(tilt_kernel, G * T * triton.cdiv(C, BC), {**arguments, "BC": BC, "BP": BP}, options)


def attend_launch(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float, o: Tensor, lse: Tensor) -> Launch:
    """How softmax attention is started: ``q`` ``(G, heads, R, D)``, keys as ``seen`` says; the last two are its outputs."""
    G, heads, R, D = q.shape
    arguments = {
        "q": q, "k": k, "v": v, "o": o, "lse": lse, "heads": heads, "R": R, "scale": scale,
        **seen.arguments(k), **common(q.dtype, D, v.shape[-1]),
    }  # fmt: skip
    gathered = " gathered" if seen.index is not None else ""
    BR, BM, options = tiles(f"attend{gathered}", q.dtype, max(D, v.shape[-1]), R, arguments["M"])
    return Launch(attend_kernel, G * heads * triton.cdiv(R, BR), {**arguments, "BR": BR, "BM": BM}, options)


def tilt(mu: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """``L`` ``(G, C, T)`` float32, ``kbar`` ``(G, C, T, D)``, ``vbar`` ``(G, C, T, Dv)``; see ``primitives.tilt``."""
    check_tilt(mu, k, v, count)
    (G, T, _, D), C = k.shape, mu.shape[1]
    L = k.new_empty(G, C, T, dtype=torch.float32)
    kbar, vbar = k.new_empty(G, C, T, D), k.new_empty(G, C, T, v.shape[3])
    tilt_launch(mu, k, v, count, scale, L, kbar, vbar).run()
    return L, kbar, vbar


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output ``(G, R, Dv)`` and log-sum-exp ``(G, R)`` float32; see ``primitives.attend``."""
    check_attend(q, k, v, bias)
    return _attend(q[:, None], q.shape[:2], k, v, Seen(bias=bias), scale)


def attend_gathered(q: Tensor, k: Tensor, v: Tensor, index: Tensor, source: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention to keys read where they lie, without a copy of them.

    Args:
        q: ``(G, R, D)``.
        k: ``(H, N, D)``.
        v: ``(H, N, Dv)``.
        index: ``(G, M)`` int32, positions in ``range(N)``; -1: none.
        source: ``(G,)`` int32, the head of keys of each group.
        scale: factor of the logits.

    Returns:
        Output ``(G, R, Dv)`` and log-sum-exp ``(G, R)`` float32; 0 and -inf for a row without keys.

    Raises:
        ConfigError: a shape, dtype, device or layout is not as above. Values of ``index`` and ``source`` are not checked.
        UnsupportedError: rows of more than 256 elements.
    """
    check_gathered(q, k, v, index, source)
    return _attend(q[:, None], q.shape[:2], k, v, Seen(index=index, source=source), scale)


def near(q: Tensor, k: Tensor, v: Tensor, block: int, scale: float) -> tuple[Tensor, Tensor]:
    """Output ``(G, g, N, Dv)`` and log-sum-exp ``(G, g, N)`` float32; see ``primitives.near``."""
    check_near(q, k, v, block)
    return _attend(q, q.shape[:3], k, v, Seen(block=block), scale)


def _attend(q: Tensor, shape: torch.Size, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
    o, lse = q.new_empty(*shape, v.shape[-1]), q.new_empty(shape, dtype=torch.float32)
    attend_launch(q, k, v, seen, scale, o, lse).run()
    return o, lse


def launches_of_a_step(
    D: int, Dv: int, dtype: torch.dtype, *, groups: int = 8, heads: int = 3, N: int = 4096, block: int = 1024,
    C: int = 64, T: int = 80, P: int = 16, R: int = 16, M: int = 160,
) -> dict[str, Launch]:  # fmt: skip
    """Every launch of a forward and a backward by name, over tensors without memory: for compiling, not for running.

    Args:
        D, Dv: elements of a key and of a value.
        dtype: of the inputs.
        groups: heads of keys; each serves ``heads`` query heads.
        N, block: positions, and those of a block of the near part.
        C, T, P: centroids, tiles of keys and their slots.
        R, M: queries of a tile, and the summaries or members they attend to.
    """

    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def single(*shape: int) -> Tensor:
        return make(*shape, dtype=torch.float32)

    def whole(*shape: int) -> Tensor:
        return make(*shape, dtype=torch.int32)

    mu, k, v, count = make(groups, C, D), make(groups, T, P, D), make(groups, T, P, Dv), whole(groups, T)
    L, kbar, vbar = single(groups, C, T), make(groups, C, T, D), make(groups, C, T, Dv)
    grads = L, single(groups, C, T, D), single(groups, C, T, Dv)
    found = {"tilt": tilt_launch(mu, k, v, count, 0.1, L, kbar, vbar)}
    backward = tilt_backward_launches(mu, k, v, count, 0.1, L, kbar, vbar, *grads, L, k, v)
    found |= {f"tilt_{name}": launch for name, launch in backward.items()}
    forms = {
        "attend": (Seen(bias=single(groups, M)), 1, R, M, single(groups, M)),
        "gathered": (Seen(index=whole(groups, M), source=whole(groups)), 1, R, N, None),
        "near": (Seen(block=block), heads, N, N, None),
    }
    for form, (seen, g, rows, keys, dbias) in forms.items():
        q, k, v, o, lse = make(groups, g, rows, D), make(groups, keys, D), make(groups, keys, Dv), make(groups, g, rows, Dv), L
        dk, dv = (single(*x.shape) if form == "gathered" else x for x in (k, v))  # sums, added to atomically
        found[form] = attend_launch(q, k, v, seen, 0.1, o, lse)
        backward = attend_backward_launches(q, k, v, seen, 0.1, lse, o, lse, q, dk, dv, dbias)
        found |= {f"{form}_{name}": launch for name, launch in backward.items()}
    return found
