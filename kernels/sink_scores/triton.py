"""Triton kernels of the sink scores: one pass over the keys for each query's normaliser, one over the queries for each key's sum.

Neither holds more of the attention map than a tile. Sums are accumulated in float32 in a fixed order: no atomics, so two runs
agree bit for bit. Forward only: scores have no gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hfplug.errors import UnsupportedError
from hfplug.launch import Launch
from hfplug.sinks import SinkScores
from hfplug.visibility import Pairs


@triton.jit
def _tile(at, stride, rows, limit, dims, D):  # type: ignore[no-untyped-def]
    """``(rows, dims)`` of the tensor at ``at``, 0 outside."""
    places = at + rows[:, None].to(tl.int64) * stride + dims[None, :]
    return tl.load(places, mask=(rows[:, None] < limit) & (dims[None, :] < D), other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _product(q, k, acc, WIDEN: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    if WIDEN:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    return tl.dot(q, tl.trans(k), acc, input_precision=PRECISION)


@triton.jit  # type: ignore[untyped-decorator]
def _cap(s, softcap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    if SOFTCAP:  # tanh(x) = 2 sigmoid(2x) - 1
        s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)
    return s


@triton.jit  # type: ignore[untyped-decorator]
def _pieces(  # type: ignore[no-untyped-def]
    q_of,
    stride_qt,
    rows,
    T,
    k_of,
    stride_kt,
    columns,
    K,
    D,
    acc,
    BD: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``q k^T`` piece by piece: a tile that stays the same would be kept in registers whole, which float32 has too few of."""
    for piece in range(0, D, BD):
        dims = piece + tl.arange(0, BD)
        q = _tile(q_of, stride_qt, rows, T, dims, D)
        acc = _product(q, _tile(k_of, stride_kt, columns, K, dims, D), acc, WIDEN, PRECISION)
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _keep(  # type: ignore[no-untyped-def]
    rows,
    columns,
    T,
    K,
    segments,
    mask,
    stride_mq,
    stride_mk,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    MASK: tl.constexpr,
):
    """``(rows, columns)`` bool: which keys the queries see; ``segments`` and ``mask`` point to this row's and head's.

    What rows beyond the last query see is left open: every two-dimensional condition costs registers.
    """
    places = rows + (K - T)
    if MASK:
        at = mask + rows[:, None].to(tl.int64) * stride_mq + columns[None, :].to(tl.int64) * stride_mk
        return tl.load(at, mask=(rows[:, None] < T) & (columns[None, :] < K), other=0) != 0
    limits = places if CAUSAL else 0 * places + (K - 1)
    keep = columns[None, :] <= limits[:, None]
    if WINDOW:
        keep = keep & (columns[None, :] > places[:, None] - window)
    if SEGMENTS:
        mine = tl.load(segments + places, mask=rows < T, other=0)
        theirs = tl.load(segments + columns, mask=columns < K, other=0)
        theirs = tl.where(theirs > 0, theirs, -1)  # padding equals nobody
        keep = keep & (mine[:, None] == theirs[None, :])
    return keep


@triton.jit  # type: ignore[untyped-decorator]
def rows_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    total,
    diagonal,
    segments,
    mask,
    sinks,
    T,
    K,
    D,
    heads,
    groups,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    scaling,
    softcap,
    window,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PIECES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``total[u] = log sum_i exp(s_ui)`` and ``diagonal[u] = s_uu - total[u]`` of ``BM`` queries of one head per program."""
    blocks = tl.cdiv(T, BM)
    start = (tl.program_id(0) % blocks) * BM
    pair = tl.program_id(0) // blocks
    row, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    rows = start + tl.arange(0, BM)
    dims = tl.arange(0, BD)
    q_of = query + row * stride_qb + head * stride_qh
    k_of = key + row * stride_kb + (head // groups) * stride_kh
    if not PIECES:
        q = _tile(q_of, stride_qt, rows, T, dims, D)
    segments += row * K
    mask += row * stride_mb + head * stride_mh

    if SINKS:
        top = tl.zeros((BM,), dtype=tl.float32) + tl.load(sinks + head)
        mass = tl.zeros((BM,), dtype=tl.float32) + 1.0
    else:
        top = tl.zeros((BM,), dtype=tl.float32) - float("inf")
        mass = tl.zeros((BM,), dtype=tl.float32)
    first, last = 0, K
    if CAUSAL:
        last = tl.minimum(start + BM + K - T, K)
    if WINDOW:
        first = tl.maximum(start + K - T - window + 1, 0) // BN * BN
    for begin in range(first, last, BN):
        columns = begin + tl.arange(0, BN)
        s = tl.zeros((BM, BN), dtype=tl.float32)
        if PIECES:
            s = _pieces(q_of, stride_qt, rows, T, k_of, stride_kt, columns, K, D, s, BD, WIDEN, PRECISION)
        else:
            s = _product(q, _tile(k_of, stride_kt, columns, K, dims, D), s, WIDEN, PRECISION)
        s = _cap(s * scaling, softcap, SOFTCAP)
        keep = _keep(
            rows, columns, T, K, segments, mask, stride_mq, stride_mk, window, CAUSAL, WINDOW, SEGMENTS, MASK
        )  # fmt: skip
        s = tl.where(keep, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row without a key so far
        mass = mass * tl.exp(top - base) + tl.sum(tl.exp(s - base[:, None]), 1)
        top = higher
    base = tl.where(top == float("-inf"), 0.0, top)
    log_mass = base + tl.log(mass)

    at = pair.to(tl.int64) * T + rows
    tl.store(total + at, log_mass, mask=rows < T)
    own = tl.zeros((BM,), dtype=tl.float32)
    for piece in range(0, D, BD):
        dims = piece + tl.arange(0, BD)
        mine = _tile(q_of, stride_qt, rows, T, dims, D).to(tl.float32)
        own += tl.sum(mine * _tile(k_of, stride_kt, rows + (K - T), K, dims, D).to(tl.float32), 1)
    tl.store(diagonal + at, _cap(own * scaling, softcap, SOFTCAP) - log_mass, mask=rows < T)


@triton.jit  # type: ignore[untyped-decorator]
def columns_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    total,
    sums,
    counts,
    counted,
    segments,
    mask,
    T,
    K,
    D,
    heads,
    groups,
    count_heads,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    scaling,
    softcap,
    window,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PIECES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``sums[i] = sum_u exp(s_ui - total[u])`` and the number of queries in it, for ``BN`` keys of one query head per program."""
    blocks = tl.cdiv(K, BN)
    start = (tl.program_id(0) % blocks) * BN
    pair = tl.program_id(0) // blocks
    row, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    columns = start + tl.arange(0, BN)
    dims = tl.arange(0, BD)
    q_of = query + row * stride_qb + head * stride_qh
    k_of = key + row * stride_kb + (head // groups) * stride_kh
    if not PIECES:
        k = _tile(k_of, stride_kt, columns, K, dims, D)
    segments += row * K
    mask += row * stride_mb + head * stride_mh

    received = tl.zeros((BN,), dtype=tl.float32)
    number = tl.zeros((BN,), dtype=tl.float32)
    first, last = 0, T
    if CAUSAL:
        first = tl.maximum(start - (K - T), 0) // BM * BM
    if WINDOW:
        last = tl.minimum(start + BN + window - 1 - (K - T), T)
    for begin in range(first, last, BM):
        rows = begin + tl.arange(0, BM)
        # Queries that do not count are not read: what stands there may be NaN.
        counts_here = tl.load(counted + row * T + rows, mask=rows < T, other=0) != 0
        chosen = tl.where(counts_here, rows, T)
        s = tl.zeros((BM, BN), dtype=tl.float32)
        if PIECES:
            s = _pieces(q_of, stride_qt, chosen, T, k_of, stride_kt, columns, K, D, s, BD, WIDEN, PRECISION)
        else:
            s = _product(_tile(q_of, stride_qt, chosen, T, dims, D), k, s, WIDEN, PRECISION)
        s = _cap(s * scaling, softcap, SOFTCAP)
        keep = _keep(
            rows, columns, T, K, segments, mask, stride_mq, stride_mk, window, CAUSAL, WINDOW, SEGMENTS, MASK
        )  # fmt: skip
        log_mass = tl.load(total + pair.to(tl.int64) * T + rows, mask=counts_here, other=float("inf"))
        received += tl.sum(tl.where(keep, tl.exp(s - log_mass[:, None]), 0.0), 0)
        number += tl.sum(tl.where(keep, tl.where(counts_here, 1.0, 0.0)[:, None], 0.0), 0)
    tl.store(sums + pair.to(tl.int64) * K + columns, received, mask=columns < K)
    if head < count_heads:
        tl.store(counts + (row * count_heads + head) * K + columns, number, mask=columns < K)


def launches(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    sinks: Tensor | None,
    counted: Tensor,
    scaling: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
    buffers: dict[str, Tensor],
) -> tuple[Launch, Launch]:
    """How the two passes are started.

    Args:
        query: ``(batch, heads, T, D)`` and ``key`` ``(batch, kv heads, K, D)``, last dimension contiguous.
        mask: ``(batch or 1, heads or 1, T, K)`` bool, which then says everything; or ``None``.
        segments: ``(batch, K)`` int32, 0 for padding, or ``None``.
        sinks: ``(heads,)`` float32, or ``None``.
        counted: ``(batch, T)`` int8.
        buffers: ``total`` and ``diagonal`` ``(batch, heads, T)``, ``sums`` ``(batch, heads, K)``, ``counts``
            ``(batch, 1 or heads, K)``, all float32.
    """
    (batch, heads, T, D), (kv_heads, K) = query.shape, key.shape[1:3]
    BD = max(16, triton.next_power_of_2(D))
    # Exact float32 products run outside the tensor cores: with larger tiles ptxas spills registers on sm_80; so it does for
    # 16 bits where heads are wider than 128. The second pass takes half as many keys at a time, for gfx942.
    pieces = query.dtype == torch.float32
    size = 32 if pieces or BD > 128 else 64
    BD = min(BD, 32) if pieces else BD
    dense = mask if mask is not None else counted  # any memory: it is not read
    strides = (0, 0, 0, 0) if mask is None else tuple(0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True))
    shared = {
        "query": query, "key": key, "total": buffers["total"],
        "segments": segments if segments is not None else counted, "mask": dense,
        "T": T, "K": K, "D": D, "heads": heads, "groups": heads // kv_heads,
        "stride_qb": query.stride(0), "stride_qh": query.stride(1), "stride_qt": query.stride(2),
        "stride_kb": key.stride(0), "stride_kh": key.stride(1), "stride_kt": key.stride(2),
        "stride_mb": strides[0], "stride_mh": strides[1], "stride_mq": strides[2], "stride_mk": strides[3],
        "scaling": float(scaling), "softcap": float(softcap or 0.0), "window": window or 0,
        "BM": size, "BN": size, "BD": BD, "PIECES": pieces, "CAUSAL": causal and mask is None,
        "WINDOW": window is not None and mask is None, "SEGMENTS": segments is not None and mask is None,
        "MASK": mask is not None, "SOFTCAP": softcap is not None,
        "WIDEN": _interpreted(), "PRECISION": _precision(),
    }  # fmt: skip
    rows = {**shared, "diagonal": buffers["diagonal"], "sinks": sinks if sinks is not None else buffers["total"]}
    columns = {**shared, "sums": buffers["sums"], "counts": buffers["counts"], "counted": counted}
    columns |= {"count_heads": buffers["counts"].shape[1], "BN": 32}
    pairs, options = batch * heads, {"num_warps": 4, "num_stages": 2}
    return (
        Launch(rows_kernel, triton.cdiv(T, size) * pairs, {**rows, "SINKS": sinks is not None}, options),
        Launch(columns_kernel, triton.cdiv(K, 32) * pairs, columns, options),
    )


def sink_scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    scaling: float | None = None,
    chunk: int = 256,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    counted: Tensor | None = None,
    argmax: bool = False,
    log_diagonal: bool = False,
) -> SinkScores:
    """:func:`hfplug.sinks.sink_scores` by the kernels; ``chunk`` does not matter here.

    Raises:
        UnsupportedError: ``argmax``, or a 4-D mask that is not bool.
        ConfigError: as the torch form.
    """
    if argmax:
        raise UnsupportedError("argmax is not computed by the Triton kernels")
    pairs = Pairs(query, key, mask, causal, window, documents)
    dense = pairs.mask
    if dense is not None and dense.dtype != torch.bool:
        raise UnsupportedError(f"the Triton kernels take 4-D masks of bool, not {dense.dtype}")
    real, starts = pairs.tokens()
    chosen = real if counted is None else real & counted.bool()
    segments = None
    if pairs.padding is not None or documents is not None:
        ones = torch.ones(key.shape[0], key.shape[2], dtype=torch.int32, device=key.device)
        known = ones if documents is None else (documents - documents.min() + 1).int()  # 0 is for padding
        segments = (known if pairs.padding is None else known * pairs.padding).contiguous()
    (batch, heads, length, dim), keys = query.shape, key.shape[2]
    buffers = {name: query.new_empty((batch, heads, length), dtype=torch.float32) for name in ("total", "diagonal")}
    buffers["sums"] = query.new_empty((batch, heads, keys), dtype=torch.float32)
    buffers["counts"] = query.new_empty((batch, 1 if dense is None else dense.shape[1], keys), dtype=torch.float32)
    query, key = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key))
    for launch in launches(
        query, key, dense, segments, None if sinks is None else sinks.float().contiguous(), chosen.to(torch.int8).contiguous(),
        dim**-0.5 if scaling is None else scaling, softcap, causal, window, buffers,
    ):  # fmt: skip
        launch.run()
    pad = (keys - length, 0)
    logarithm = torch.nn.functional.pad(buffers["diagonal"].masked_fill(~chosen[:, None], 0.0), pad)
    own = torch.nn.functional.pad(chosen.float(), pad)
    diagonal = logarithm.exp() * own[:, None]
    return SinkScores(
        buffers["sums"], diagonal, buffers["counts"], real, starts, own, None, logarithm if log_diagonal else None
    )  # fmt: skip


def _interpreted() -> bool:
    # The interpreter keeps bfloat16 as bit patterns and would multiply those; compiled, the tensor cores take it as it is.
    return not isinstance(rows_kernel, triton.JITFunction)


def _precision() -> str:
    # The user's setting for float32 products, as for torch's own; it changes nothing for 16-bit inputs.
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
