"""Triton kernels: quantising activations, and products with weights, or both sides, in 4 bits.

The products decode to 16 bits in registers, where every number is exact, and use the tensor cores of any chip. Each macro block
of the reduction is summed on its own and divided by both factors before it is added: a factor belongs to a row and a slice, so it
cannot be pulled out of the whole sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hfplug.kernels.mxfp4_plus.formats import SCALES, Format, Packed, checked
from hfplug.launch import Launch, launch_options

MACROS = (32, 64, 128, 256)


@triton.jit
def _power(scale):  # type: ignore[no-untyped-def]
    """``2^(s - 127)`` of int32 bytes; NaN for 255."""
    bits = tl.where(scale == 0, 0x00400000, scale << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _block_scale(magnitude, ADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    bits = magnitude.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(((bits + ADDED) >> 23) - 2, 0), 254)


@triton.jit  # type: ignore[untyped-decorator]
def quantize_kernel(  # type: ignore[no-untyped-def]
    x,
    codes,
    scales,
    factors,
    R,
    K,
    padded,
    macros,
    BR: tl.constexpr,
    BLOCK: tl.constexpr,
    MACRO: tl.constexpr,
    ADDED: tl.constexpr,
    STATIC: tl.constexpr,
):
    """Codes, scales and static factors of ``BR`` rows and one macro block per program."""
    slices = tl.cdiv(padded, MACRO)
    piece = tl.program_id(0) % slices
    rows = (tl.program_id(0) // slices) * BR + tl.arange(0, BR)
    columns = piece * MACRO + tl.arange(0, MACRO)
    inside = rows < R
    at = x + rows[:, None].to(tl.int64) * K + columns[None, :]
    v = tl.load(at, mask=inside[:, None] & (columns < K)[None, :], other=0.0).to(tl.float32)
    COUNT: tl.constexpr = MACRO // BLOCK
    v = tl.reshape(v, (BR, COUNT, BLOCK))
    bits = v.to(tl.int32, bitcast=True)
    largest = tl.max(bits & 0x7FFFFFFF, axis=2)
    broken = largest >= 0x7F800000
    largest = tl.where(broken, 0, largest)
    magnitude = largest.to(tl.float32, bitcast=True)
    if STATIC:
        whole = tl.max(largest, axis=1).to(tl.float32, bitcast=True)
        byte = (tl.div_rn(tl.full((BR,), 6.0, tl.float32), whole).to(tl.int32, bitcast=True) >> 15) & 0xFF
        tl.store(factors + rows.to(tl.int64) * macros + piece, byte.to(tl.uint8), mask=inside)
        f = 1.0 + byte.to(tl.float32) * 0.00390625
        high = magnitude >= 18446744073709551616.0  # 2^64: f times it may be above the largest float32
        lowered = tl.where(high, magnitude * 5.421010862427522e-20, magnitude)
        scale = _block_scale(lowered * f[:, None], ADDED)
        scale = tl.where(high, tl.minimum(scale + 64, 254), scale)
    else:
        scale = _block_scale(magnitude, ADDED)
    inverse = tl.where(scale == 254, 0x00400000, (254 - scale) << 23).to(tl.float32, bitcast=True)
    if STATIC:
        inverse = inverse * f[:, None]
    y = tl.where(broken[:, :, None], 0.0, tl.minimum(tl.abs(v * inverse[:, :, None]), 6.0))
    # As in the torch form: the sum is rounded where E2M1 is, and its bits hold the code.
    large = ((tl.maximum(y, 1.0).to(tl.int32, bitcast=True) & 0x7F800000) + (22 << 23)).to(tl.float32, bitcast=True)
    total = (y + large).to(tl.int32, bitcast=True)
    code = ((total & 15) + (total >> 22) - 298) | tl.where(broken[:, :, None], 0, (bits >> 28) & 8)
    low, high_half = tl.split(tl.reshape(code, (BR, MACRO // 2, 2)))
    pairs = piece * (MACRO // 2) + tl.arange(0, MACRO // 2)
    tl.store(
        codes + rows[:, None].to(tl.int64) * (padded // 2) + pairs[None, :],
        (low | (high_half << 4)).to(tl.uint8),
        mask=inside[:, None] & (pairs < padded // 2)[None, :],
    )
    places = piece * COUNT + tl.arange(0, COUNT)
    tl.store(
        scales + rows[:, None].to(tl.int64) * (padded // BLOCK) + places[None, :],
        tl.where(broken, 255, scale).to(tl.uint8),
        mask=inside[:, None] & (places < padded // BLOCK)[None, :],
    )


@triton.jit
def _number(code):  # type: ignore[no-untyped-def]
    """Twice the number of a code, int32: 0, 1, 2, 3, 4, 6, 8, 12 with its sign."""
    index = code & 7
    size = tl.where(index < 4, index, (2 + (index & 1)) << tl.maximum((index >> 1) - 1, 0))
    return tl.where((code & 8) != 0, -size, size).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _halves(  # type: ignore[no-untyped-def]
    codes, scales, rows, R, start, padded, B: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr
):
    """The numbers at even and at odd places of ``BK`` columns from ``start``, each ``(B, BK / 2)`` float32, factors left in."""
    pairs = start // 2 + tl.arange(0, BK // 2)
    inside = (rows < R)[:, None]
    at = codes + rows[:, None].to(tl.int64) * (padded // 2) + pairs[None, :]
    byte = tl.load(at, mask=inside & (pairs < padded // 2)[None, :], other=0).to(tl.int32)
    places = start // BLOCK + tl.arange(0, BK // BLOCK)
    at = scales + rows[:, None].to(tl.int64) * (padded // BLOCK) + places[None, :]
    scale = tl.load(at, mask=inside & (places < padded // BLOCK)[None, :], other=127).to(tl.int32)
    unit = (_power(scale) * 0.5)[:, :, None]  # numbers are counted in halves
    low = tl.reshape(_number(byte & 15), (B, BK // BLOCK, BLOCK // 2)) * unit
    high = tl.reshape(_number(byte >> 4), (B, BK // BLOCK, BLOCK // 2)) * unit
    return tl.reshape(low, (B, BK // 2)), tl.reshape(high, (B, BK // 2))


@triton.jit
def _inverse(factors, rows, R, piece, macros):  # type: ignore[no-untyped-def]
    """``1 / f`` of the rows in a slice."""
    byte = tl.load(factors + rows.to(tl.int64) * macros + piece, mask=rows < R, other=0)
    return 1.0 / (1.0 + byte.to(tl.float32) * 0.00390625)


@triton.jit
def _finish(total, bias, y, rows, columns, M, N):  # type: ignore[no-untyped-def]
    """Add the bias to a tile of ``y`` and store it."""
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    at = y + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(at, total, mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def weights_kernel(  # type: ignore[no-untyped-def]
    x,
    codes,
    scales,
    factors,
    bias,
    y,
    M,
    N,
    K,
    padded,
    macros,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BLOCK: tl.constexpr,
    MACRO: tl.constexpr,
    FACTORS: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``y = x W^T + bias``, ``W`` in 4 bits: a tile ``(BM, BN)`` per program. ``WIDE``: products of float32."""
    tiles = tl.cdiv(N, BN)
    rows = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    columns = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, padded, MACRO):
        part = tl.zeros((BM, BN), dtype=tl.float32)
        for first in range(start, start + MACRO, BK):
            ks = first + tl.arange(0, BK)
            at = x + rows[:, None].to(tl.int64) * K + ks[None, :]
            a = tl.load(at, mask=(rows < M)[:, None] & (ks < K)[None, :], other=0.0)
            low, high = _halves(codes, scales, columns, N, first, padded, BN, BK, BLOCK)
            w = tl.reshape(tl.join(low, high), (BN, BK))
            if WIDE:
                a = a.to(tl.float32)
            else:
                w = w.to(a.dtype)
            part = tl.dot(a, tl.trans(w), part, input_precision=PRECISION)
        if FACTORS:
            part = part * _inverse(factors, columns, N, start // MACRO, macros)[None, :]
        total += part
    _finish(total, bias, y, rows, columns, M, N)


@triton.jit  # type: ignore[untyped-decorator]
def both_kernel(  # type: ignore[no-untyped-def]
    a_codes,
    a_scales,
    a_factors,
    codes,
    scales,
    factors,
    bias,
    y,
    M,
    N,
    a_padded,
    padded,
    a_macros,
    macros,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    A_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    MACRO: tl.constexpr,
    A_FACTORS: tl.constexpr,
    FACTORS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``y = a W^T + bias``, both in 4 bits: even and odd places multiplied apart, as they are packed."""
    tiles = tl.cdiv(N, BN)
    rows = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    columns = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, padded, MACRO):
        part = tl.zeros((BM, BN), dtype=tl.float32)
        for first in range(start, start + MACRO, BK):
            a_low, a_high = _halves(a_codes, a_scales, rows, M, first, a_padded, BM, BK, A_BLOCK)
            w_low, w_high = _halves(codes, scales, columns, N, first, padded, BN, BK, BLOCK)
            if not WIDE:
                a_low, a_high = a_low.to(tl.bfloat16), a_high.to(tl.bfloat16)
                w_low, w_high = w_low.to(tl.bfloat16), w_high.to(tl.bfloat16)
            part = tl.dot(a_low, tl.trans(w_low), part)
            part = tl.dot(a_high, tl.trans(w_high), part)
        if A_FACTORS:
            part = part * _inverse(a_factors, rows, M, start // MACRO, a_macros)[:, None]
        if FACTORS:
            part = part * _inverse(factors, columns, N, start // MACRO, macros)[None, :]
        total += part
    _finish(total, bias, y, rows, columns, M, N)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which would multiply bfloat16 as bit patterns."""
    return not isinstance(quantize_kernel, triton.JITFunction)


def why_not(weights: Format, act: Format | None) -> str | None:
    """Why the kernels do not take these formats; ``None`` if they do."""
    for fmt in (weights, act):
        if fmt is not None and fmt.mbs != "none" and fmt.macro not in MACROS:
            return f"macro blocks of {fmt.macro}, and the kernels take {', '.join(map(str, MACROS))}"
    return None


def quantize(x: Tensor, fmt: Format) -> Packed:
    """:func:`hfplug.kernels.mxfp4_plus.codec.quantize` without choosing: ``none`` and ``static``; ``hybrid`` is static here."""
    fmt = fmt.activations
    head, width = checked(x).shape[:-1], fmt.padded(x.shape[-1])
    sizes = [width // 2, width // fmt.block, *([] if fmt.mbs == "none" else [fmt.macros(x.shape[-1])])]
    made = [torch.empty(*head, size, dtype=torch.uint8, device=x.device) for size in sizes]
    p = Packed(made[0], made[1], made[2] if len(made) > 2 else None, tuple(x.shape), fmt)
    quantize_launch(x.reshape(head.numel(), x.shape[-1]).contiguous(), p).run()
    return p


def linear(x: Tensor, packed: Packed, bias: Tensor | None, act: Format | None) -> Tensor:
    """``x W^T + bias``: shapes and errors as :func:`hfplug.kernels.mxfp4_plus.ops.linear`, which checks."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    y = torch.empty(len(rows), packed.shape[0], dtype=x.dtype, device=x.device)
    bias = None if bias is None else bias.contiguous()
    if act is None:
        weights_launch(rows, packed, bias, y).run()
    else:
        both_launch(quantize(rows, act), packed, bias, y).run()
    return y.view(*x.shape[:-1], packed.shape[0])


def quantize_launch(x: Tensor, p: Packed) -> Launch:
    """How :func:`quantize` starts, for ``x`` ``(R, K)`` contiguous."""
    (R, K), fmt = x.shape, p.format
    macro = 128 if fmt.mbs == "none" else fmt.macro
    arguments = {
        "x": x, "codes": p.codes, "scales": p.scales, "factors": p.scales if p.factors is None else p.factors,
        "R": R, "K": K, "padded": fmt.padded(K), "macros": fmt.macros(K), "BR": 8, "BLOCK": fmt.block, "MACRO": macro,
        "ADDED": SCALES[fmt.scale], "STATIC": fmt.mbs == "static",
    }  # fmt: skip
    return Launch(quantize_kernel, triton.cdiv(R, 8) * triton.cdiv(fmt.padded(K), macro), arguments, launch_options(4, 1))


def weights_launch(x: Tensor, p: Packed, bias: Tensor | None, y: Tensor) -> Launch:
    """How the product with a packed weight starts, for ``x`` ``(M, K)`` and ``y`` ``(M, N)`` contiguous."""
    (M, K), N, fmt = x.shape, p.shape[0], p.format
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    wide = x.dtype != torch.bfloat16 or interpreted()  # float16 lacks the scales' range; it is exact in the tf32 products
    most = 32 if exact else 64
    BM, BN = size_of(M, most), size_of(N, 32)  # larger ones spill registers on sm_80: found by compiling, not timed
    arguments = {
        "x": x, "codes": p.codes, "scales": p.scales, "factors": p.scales if p.factors is None else p.factors,
        "bias": bias, "y": y, "M": M, "N": N, "K": K, "padded": fmt.padded(K), "macros": fmt.macros(K),
        "BM": BM, "BN": BN, "BLOCK": fmt.block, "FACTORS": fmt.mbs != "none",
        "WIDE": wide, "PRECISION": "ieee" if exact else "tf32",
    }  # fmt: skip
    arguments |= pieces(fmt, None, 32 if wide else 64)
    return Launch(weights_kernel, triton.cdiv(M, BM) * triton.cdiv(N, BN), arguments, launch_options(4, 1 if exact else 2))


def both_launch(a: Packed, p: Packed, bias: Tensor | None, y: Tensor) -> Launch:
    """How the product of two packed matrices starts, ``a`` ``(M, K)`` and ``p`` ``(N, K)``."""
    (M, K), N = a.shape, p.shape[0]
    BM, BN = size_of(M, 32), size_of(N, 32)  # larger ones spill registers: found by compiling, not timed
    arguments = {
        "a_codes": a.codes, "a_scales": a.scales, "a_factors": a.scales if a.factors is None else a.factors,
        "codes": p.codes, "scales": p.scales, "factors": p.scales if p.factors is None else p.factors, "bias": bias, "y": y,
        "M": M, "N": N, "a_padded": a.format.padded(K), "padded": p.format.padded(K), "a_macros": a.format.macros(K),
        "macros": p.format.macros(K), "BM": BM, "BN": BN, "A_BLOCK": a.format.block, "BLOCK": p.format.block,
        "A_FACTORS": a.factors is not None, "FACTORS": p.factors is not None, "WIDE": interpreted(),
    }  # fmt: skip
    arguments |= pieces(a.format, p.format, 32)  # 64 at a time spill where N is no multiple of 16
    return Launch(both_kernel, triton.cdiv(M, BM) * triton.cdiv(N, BN), arguments, launch_options(4, 2))


def pieces(one: Format, other: Format | None, most: int) -> dict[str, int]:
    """The slice between two corrections, and what of it is multiplied at a time."""
    macros = [fmt.macro for fmt in (one, other) if fmt is not None and fmt.mbs != "none"]
    macro = macros[0] if macros else 128
    return {"MACRO": macro, "BK": min(most, macro)}


def size_of(length: int, most: int) -> int:
    """The power of two that covers ``length``; ``tl.dot`` wants at least 16."""
    return int(min(max(triton.next_power_of_2(max(length, 1)), 16), most))
