"""Triton kernel of Flash-LoRA-Attention: one pass over the keys, two accumulators under one softmax (LRAgent, Algorithm 1).

Forward only. It writes ``P V`` and ``P low``; the factor of the heads, of a few queries, is applied outside: held in the kernel
it costs registers that the loop needs (with it, 28 bytes a thread went to memory on sm_80 at heads of 128).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hfplug.launch import Launch, launch_options


@triton.jit
def _tile(at, stride, rows, limit, dims, D):  # type: ignore[no-untyped-def]
    """``(rows, dims)`` of the tensor at ``at``, 0 outside."""
    places = at + rows[:, None].to(tl.int64) * stride + dims[None, :]
    return tl.load(places, mask=(rows[:, None] < limit) & (dims[None, :] < D), other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def attention_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  one loop, read from top to bottom
    query,
    key,
    value,
    low,
    out,
    mixed,
    segments,
    T,
    K,
    D,
    DV,
    R,
    heads,
    groups,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_lb,
    stride_lt,
    scaling,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
    CAUSAL: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``out[u] = sum_i P_ui V_i`` and ``mixed[u] = sum_i P_ui low_i`` of ``BM`` queries of one head per program."""
    blocks = tl.cdiv(T, BM)
    start = (tl.program_id(0) % blocks) * BM
    pair = tl.program_id(0) // blocks
    row, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    group = head // groups
    rows = start + tl.arange(0, BM)
    dims, wide, ranks = tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, BR)
    k_of = key + row * stride_kb + group * stride_kh
    v_of = value + row * stride_vb + group * stride_vh
    l_of = low + row * stride_lb
    segments += row * K
    q = _tile(query + row * stride_qb + head * stride_qh, stride_qt, rows, T, dims, D)
    if WIDEN:
        q = q.to(tl.float32)
    places = rows + (K - T)
    if SEGMENTS:
        mine = tl.load(segments + places, mask=rows < T, other=0)

    top = tl.zeros((BM,), dtype=tl.float32) - float("inf")
    mass = tl.zeros((BM,), dtype=tl.float32)
    sum_v = tl.zeros((BM, BV), dtype=tl.float32)
    sum_l = tl.zeros((BM, BR), dtype=tl.float32)
    last = K
    if CAUSAL:
        last = tl.minimum(start + BM + K - T, K)
    for begin in range(0, last, BN):
        columns = begin + tl.arange(0, BN)
        k = _tile(k_of, stride_kt, columns, K, dims, D)
        if WIDEN:
            k = k.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        limits = places if CAUSAL else 0 * places + (K - 1)
        keep = columns[None, :] <= limits[:, None]
        if SEGMENTS:
            theirs = tl.load(segments + columns, mask=columns < K, other=0)
            theirs = tl.where(theirs > 0, theirs, -1)  # padding equals nobody
            keep = keep & (mine[:, None] == theirs[None, :])
        s = tl.where(keep, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row without a key so far
        shrink = tl.exp(top - base)
        p = tl.exp(s - base[:, None])
        mass = mass * shrink + tl.sum(p, 1)
        top = higher
        v = _tile(v_of, stride_vt, columns, K, wide, DV)
        low_rank = _tile(l_of, stride_lt, columns, K, ranks, R)
        if WIDEN:
            v = v.to(tl.float32)
            low_rank = low_rank.to(tl.float32)
        sum_v = tl.dot(p.to(v.dtype), v, sum_v * shrink[:, None], input_precision=PRECISION)
        sum_l = tl.dot(p.to(v.dtype), low_rank, sum_l * shrink[:, None], input_precision=PRECISION)
    share = tl.where(mass > 0, 1.0 / mass, 0.0)[:, None]  # padding sees no key: zero
    at = (pair.to(tl.int64) * T + rows)[:, None]
    tl.store(out + at * DV + wide[None, :], sum_v * share, mask=(rows[:, None] < T) & (wide[None, :] < DV))
    tl.store(mixed + at * R + ranks[None, :], sum_l * share, mask=(rows[:, None] < T) & (ranks[None, :] < R))


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    low: Tensor,
    segments: Tensor | None,
    scaling: float,
    causal: bool,
    out: Tensor,
    mixed: Tensor,
) -> Launch:
    """How the kernel is started.

    Args:
        query: ``(batch, heads, T, D)``; ``key`` ``(batch, kv heads, K, D)``, ``value`` ``(batch, kv heads, K, DV)`` and ``low``
            ``(batch, 1, K, R)``, each with the last dimension contiguous.
        segments: ``(batch, K)`` int32, 0 for padding, or ``None``.
        out, mixed: ``(batch, heads, T, DV)`` and ``(batch, heads, T, R)`` float32, contiguous.
    """
    (batch, heads, T, D), (kv_heads, K), DV, R = query.shape, key.shape[1:3], value.shape[3], low.shape[3]
    BD, BV, BR = (max(16, triton.next_power_of_2(n)) for n in (D, DV, R))
    single = query.dtype == torch.float32
    # Beyond these, ptxas spills registers: exact float32 products run outside the tensor cores, and two wide sums fill them.
    BM, BN = (16, 16) if single else (64, 16 if BV + BR > 160 else 32)
    arguments = {
        "query": query, "key": key, "value": value, "low": low, "out": out, "mixed": mixed,
        "segments": segments if segments is not None else mixed,
        "T": T, "K": K, "D": D, "DV": DV, "R": R, "heads": heads, "groups": heads // kv_heads,
        "stride_qb": query.stride(0), "stride_qh": query.stride(1), "stride_qt": query.stride(2),
        "stride_kb": key.stride(0), "stride_kh": key.stride(1), "stride_kt": key.stride(2),
        "stride_vb": value.stride(0), "stride_vh": value.stride(1), "stride_vt": value.stride(2),
        "stride_lb": low.stride(0), "stride_lt": low.stride(2), "scaling": float(scaling),
        "BM": BM, "BN": BN, "BD": BD, "BV": BV, "BR": BR, "CAUSAL": causal, "SEGMENTS": segments is not None,
        "WIDEN": _interpreted(), "PRECISION": _precision(),
    }  # fmt: skip
    return Launch(attention_kernel, triton.cdiv(T, BM) * batch * heads, arguments, launch_options(4, 2))


def attention(
    query: Tensor, key: Tensor, value: Tensor, low: Tensor, segments: Tensor | None, scaling: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """``P V`` ``(batch, heads, T, DV)`` and ``P low`` ``(batch, heads, T, R)``, float32; rows of padding are zero."""
    query, key, value, low = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value, low))
    shape = query.shape[:3]
    out, mixed = (query.new_empty((*shape, t.shape[3]), dtype=torch.float32) for t in (value, low))
    marks = None if segments is None else segments.contiguous()
    launch(query, key, value, low, marks, scaling, causal, out, mixed).run()
    return out, mixed


def _interpreted() -> bool:
    # The interpreter keeps bfloat16 as bit patterns and would multiply those; compiled, the tensor cores take it as it is.
    return not isinstance(attention_kernel, triton.JITFunction)


def _precision() -> str:
    # The user's setting for float32 products, as for torch's own; it changes nothing for 16-bit inputs.
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
