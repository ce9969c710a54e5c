"""Triton kernels of the grouped matrix product: one for the product and its input gradient, one for the weight gradient.

Rows are sorted by expert and each expert owns a run of them, of any length. A tile of rows never crosses from one expert
into the next, so there are at most ``ceil(N / BM) + E`` of them, whatever the runs; that many programs are launched, each
finds its expert from ``offsets`` on the device, and those left over return. The host never waits for ``offsets``.

Sums are accumulated in float32 in a fixed order: no atomics, so two runs agree bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hfplug.launch import Launch


@triton.jit  # type: ignore[untyped-decorator]
def rows_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    offsets,
    N,
    K,
    J,
    E,
    stride_x,
    stride_we,
    stride_wk,
    stride_wj,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BJ: tl.constexpr,
    BK: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``out[n, j] = sum_k x[n, k] weight[e(n), k, j]``, one tile of ``BM`` rows of one expert by ``BJ`` columns per program."""
    columns = tl.cdiv(J, BJ)
    tile = tl.program_id(0) // columns
    column = tl.program_id(0) % columns

    # The expert of this tile: the first whose tiles, and those before it, reach beyond it. Experts without rows have none.
    experts = tl.arange(0, BE)
    starts = tl.load(offsets + experts, mask=experts < E, other=0)
    stops = tl.load(offsets + experts + 1, mask=experts < E, other=0)
    tiles = (stops - starts + BM - 1) // BM
    reached = tl.cumsum(tiles, 0)
    expert = tl.sum((reached <= tile).to(tl.int32), 0)
    if expert >= E:
        return
    mine = experts == expert
    start = tl.sum(tl.where(mine, starts, 0), 0)
    # Offsets that were not validated can give wrong rows, but no access outside of x and out.
    stop = tl.minimum(tl.sum(tl.where(mine, stops, 0), 0), N)
    first = start + (tile - tl.sum(tl.where(mine, reached - tiles, 0), 0)) * BM

    # int64 throughout: N * K, and E * K * J, can exceed 2^31.
    rows = (first + tl.arange(0, BM)).to(tl.int64)
    js = (column * BJ + tl.arange(0, BJ)).to(tl.int64)
    ks = tl.arange(0, BK).to(tl.int64)
    row_mask = (rows >= 0) & (rows < stop)
    j_mask = js < J
    x_at = x + rows[:, None] * stride_x + ks[None, :]
    w_at = weight + expert.to(tl.int64) * stride_we + ks[:, None] * stride_wk + js[None, :] * stride_wj

    acc = tl.zeros((BM, BJ), dtype=tl.float32)
    for k in range(tl.cdiv(K, BK)):
        k_mask = ks < K - k * BK
        a = tl.load(x_at, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
        b = tl.load(w_at, mask=k_mask[:, None] & j_mask[None, :], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        x_at += BK
        w_at += BK * stride_wk
    at = out + rows[:, None] * J + js[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=row_mask[:, None] & j_mask[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def weight_kernel(  # type: ignore[no-untyped-def]
    x,
    grad,
    out,
    offsets,
    N,
    I,  # noqa: E741
    O,  # noqa: E741
    stride_x,
    stride_g,
    BM: tl.constexpr,
    BI: tl.constexpr,
    BO: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``out[e, o, i] = sum over the rows n of e of grad[n, o] x[n, i]``, one tile of one expert per program; 0 without rows."""
    across = tl.cdiv(I, BI)
    tiles = across * tl.cdiv(O, BO)
    expert = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    start = tl.maximum(tl.load(offsets + expert), 0)
    stop = tl.minimum(tl.load(offsets + expert + 1), N)

    inputs = ((tile % across) * BI + tl.arange(0, BI)).to(tl.int64)
    outputs = ((tile // across) * BO + tl.arange(0, BO)).to(tl.int64)
    i_mask = inputs < I
    o_mask = outputs < O
    rows = start + tl.arange(0, BM)
    g_at = grad + rows[:, None] * stride_g + outputs[None, :]
    x_at = x + rows[:, None] * stride_x + inputs[None, :]

    acc = tl.zeros((BO, BI), dtype=tl.float32)
    for step in range(tl.cdiv((stop - start).to(tl.int32), BM)):
        row_mask = rows < stop - step * BM
        g = tl.load(g_at, mask=row_mask[:, None] & o_mask[None, :], other=0.0)
        a = tl.load(x_at, mask=row_mask[:, None] & i_mask[None, :], other=0.0)
        if WIDEN:
            g = g.to(tl.float32)
            a = a.to(tl.float32)
        acc = tl.dot(tl.trans(g), a, acc, input_precision=PRECISION)
        g_at += BM * stride_g
        x_at += BM * stride_x
    at = out + expert * O * I + outputs[:, None] * I + inputs[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=o_mask[:, None] & i_mask[None, :])


def rows_launch(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> Launch:
    """How ``out[n] = x[n] @ weight[e(n)]`` is started: ``x`` (N, K), ``weight`` (E, K, J) of any strides, ``out`` (N, J)."""
    (N, K), (E, _, J) = x.shape, weight.shape
    mean_rows = triton.cdiv(N, E)
    BM, BJ, BK = _power(mean_rows, 16, 64), _power(J, 16, 128), _power(K, 16, 64)
    if x.dtype == torch.float32:
        # Exact float32 products run outside the tensor cores: with larger tiles ptxas spills registers on sm_80.
        BM, BJ, BK = min(BM, 32), min(BJ, 32), min(BK, 32)
    arguments = {
        "x": x, "weight": weight, "out": out, "offsets": offsets, "N": N, "K": K, "J": J, "E": E,
        "stride_x": x.stride(0), "stride_we": weight.stride(0), "stride_wk": weight.stride(1), "stride_wj": weight.stride(2),
        "BE": _power(E, 16, 1 << 20), "BM": BM, "BJ": BJ, "BK": BK, "WIDEN": _interpreted(), "PRECISION": _precision(),
    }  # fmt: skip
    # An empty output needs no program; a plain ceil(N / BM) would be short wherever a run ends inside a tile.
    programs = (triton.cdiv(N, BM) + E) * triton.cdiv(J, BJ) if out.numel() else 0
    return Launch(rows_kernel, programs, arguments, {"num_warps": 4, "num_stages": 3})


def weight_launch(x: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> Launch:
    """How the weight gradient is started: ``x`` (N, d_in), ``grad`` (N, d_out), ``out`` (E, d_out, d_in)."""
    E, d_out, d_in = out.shape
    # Wider tiles spill registers on sm_80, in float32 and in 16 bits.
    BM, BI, BO = 32, _power(d_in, 16, 32), _power(d_out, 16, 32)
    arguments = {
        "x": x, "grad": grad, "out": out, "offsets": offsets, "N": x.shape[0], "I": d_in, "O": d_out,
        "stride_x": x.stride(0), "stride_g": grad.stride(0),
        "BM": BM, "BI": BI, "BO": BO, "WIDEN": _interpreted(), "PRECISION": _precision(),
    }  # fmt: skip
    programs = E * triton.cdiv(d_in, BI) * triton.cdiv(d_out, BO) if out.numel() else 0
    return Launch(weight_kernel, programs, arguments, {"num_warps": 4, "num_stages": 3})


def multiply_rows(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """``out[n] = x[n] @ weight[e(n)]``; see :func:`rows_launch`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows_launch(x, weight, offsets, out).run()


def sum_outer(x: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """``out[e] = sum over the rows of e of outer(grad[n], x[n])``; see :func:`weight_launch`."""
    x, grad = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, grad))
    weight_launch(x, grad, offsets, out).run()


def _power(size: int, least: int, most: int) -> int:
    """The power of two a tile takes to cover ``size``; ``tl.dot`` wants at least 16."""
    return int(min(max(triton.next_power_of_2(max(size, 1)), least), most))


def _interpreted() -> bool:
    # The interpreter keeps bfloat16 as bit patterns and would multiply those; compiled, the tensor cores take it as it is.
    return not isinstance(rows_kernel, triton.JITFunction)


def _precision() -> str:
    # The user's setting for float32 products, as for torch's own; it changes nothing for 16-bit inputs.
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
