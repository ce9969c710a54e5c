"""Triton kernel: attention of a few queries on PatternKV's blocks as they are stored.

One program takes one key-value head of one row, 16 of its queries and a stretch of tokens, and leaves a partial softmax; the
partial results and the exact tokens are put together in torch. Codes are widened in registers, nothing is rebuilt in memory:
scores take what the pattern adds from the table ``q . patterns`` (unrotated keys: from the pattern, which is turned with the
difference), values leave the weights summed per pattern. Forward only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from hfplug.launch import Launch, launch_options

if TYPE_CHECKING:
    from hfplug.kernels.patternkv.cache import PatternKVLayer

STRETCH = 512
QUERIES = 16


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(  # type: ignore[no-untyped-def]
    codes,
    step,
    least,
    tokens,
    limit,
    channels,
    width,
    bytes_each,
    groups,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ALONG: tl.constexpr,
):
    """``least + code * step`` ``(tokens, channels)``, 0 outside; groups of tokens of a channel (``ALONG``), or of channels."""
    inside = (tokens[:, None] < limit) & (channels[None, :] < width)
    per = 8 // BITS
    packed = tl.load(codes + tokens[:, None].to(tl.int64) * bytes_each + (channels // per)[None, :], mask=inside, other=0)
    code = (packed >> ((channels % per) * BITS).to(tl.uint8)[None, :]) & ((1 << BITS) - 1)
    if ALONG:
        at = (tokens[:, None] // GROUP).to(tl.int64) * width + channels[None, :]
    else:
        at = tokens[:, None].to(tl.int64) * groups + (channels // GROUP)[None, :]
    scale = tl.load(step + at, mask=inside, other=0.0).to(tl.float32)
    return code.to(tl.float32) * scale + tl.load(least + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _index(packed, tokens, limit, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pattern of each token."""
    per = 8 // BITS
    found = tl.load(packed + tokens // per, mask=tokens < limit, other=0)
    return ((found >> ((tokens % per) * BITS).to(tl.uint8)) & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def blocks_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  one loop, read from top to bottom
    query, key_codes, key_step, key_least, key_index, key_patterns, table, frequencies,
    value_codes, value_step, value_least, value_index, mask, start,
    out, mixed, top_of, mass_of,
    T, heads, M, queries, D, DV, KB, VB, VG, K_PATTERNS, V_PATTERNS, pattern_rows_k, half, sinks, stretches,
    stride_mb, stride_mq, scaling,
    STRETCH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr,
    BITS: tl.constexpr, KEY_GROUP: tl.constexpr, VALUE_GROUP: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    ROTATE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial softmax over ``STRETCH`` tokens of ``BM`` queries; ``…_BITS`` of an index are 0 where there are no patterns."""
    stretch, rest = tl.program_id(0) % stretches, tl.program_id(0) // stretches
    blocks = tl.cdiv(M, BM)
    first, pair = (rest % blocks) * BM, (rest // blocks).to(tl.int64)
    row = pair // heads
    rows = first + tl.arange(0, BM)
    dims, wide, slots = tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, BP)
    q = tl.load(query + (pair * M + rows[:, None]) * D + dims[None, :], mask=(rows[:, None] < M) & (dims[None, :] < D), other=0.0)
    begins = tl.load(start + row)
    key_codes += pair * T * KB
    key_step += pair * (T // KEY_GROUP) * D
    key_least += pair * (T // KEY_GROUP) * D
    value_codes += pair * T * VB
    value_step += pair * T * VG
    value_least += pair * T * VG
    patterns = key_patterns + (row % pattern_rows_k * heads + pair % heads) * K_PATTERNS * D
    if ROTATE:
        low_half = dims < half
        turned = dims < 2 * half
        partner = tl.where(low_half, dims + half, tl.where(turned, dims - half, dims))
        rate = tl.load(frequencies + tl.where(low_half, dims, dims - half), mask=turned, other=0.0)
        sign = tl.where(low_half, -1.0, tl.where(turned, 1.0, 0.0))

    top = tl.zeros((BM,), dtype=tl.float32) - float("inf")
    mass = tl.zeros((BM,), dtype=tl.float32)
    sum_v = tl.zeros((BM, BV), dtype=tl.float32)
    sum_p = tl.zeros((BM, BP), dtype=tl.float32)
    stop = tl.minimum((stretch + 1) * STRETCH, T)
    for at in range(stretch * STRETCH, stop, BN):
        tokens = at + tl.arange(0, BN)
        position = tokens - begins
        k = _numbers(key_codes, key_step, key_least, tokens, T, dims, D, KB, 0, KEY_GROUP, BITS, True)
        if KEY_BITS:
            index = _index(key_index + pair * (T // (8 // KEY_BITS)), tokens, T, KEY_BITS)
        if ROTATE:
            other = _numbers(key_codes, key_step, key_least, tokens, T, partner, D, KB, 0, KEY_GROUP, BITS, True)
            if KEY_BITS:
                inside = (tokens[:, None] < T) & (dims[None, :] < D)
                k += tl.load(patterns + index[:, None] * D + dims[None, :], mask=inside, other=0.0)
                other += tl.load(patterns + index[:, None] * D + partner[None, :], mask=inside, other=0.0)
            angle = position.to(tl.float32)[:, None] * rate[None, :]
            k = k * tl.cos(angle) + other * tl.sin(angle) * sign[None, :]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if KEY_BITS and not ROTATE:
            entry = table + (pair * M + rows[:, None]) * K_PATTERNS + index[None, :]
            s += tl.load(entry, mask=(rows[:, None] < M) & (tokens[None, :] < T), other=0.0)
        s = s * scaling
        exact = (position >= 0) & (position < sinks)  # these are attended to as they came, elsewhere
        keep = ((tokens < stop) & (exact == 0))[None, :] & (rows[:, None] < M)
        if MASK:
            seen = mask + row * stride_mb + (rows % queries)[:, None] * stride_mq + tokens[None, :]
            keep = keep & (tl.load(seen, mask=(rows[:, None] < M) & (tokens[None, :] < T), other=0) != 0)
        s = tl.where(keep, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a query without a key so far
        shrink = tl.exp(top - base)
        p = tl.exp(s - base[:, None])
        mass = mass * shrink + tl.sum(p, 1)
        top = higher
        v = _numbers(value_codes, value_step, value_least, tokens, T, wide, DV, VB, VG, VALUE_GROUP, BITS, False)
        sum_v = tl.dot(p, v, sum_v * shrink[:, None], input_precision=PRECISION)
        if VALUE_BITS:
            index = _index(value_index + pair * (T // (8 // VALUE_BITS)), tokens, T, VALUE_BITS)
            one = tl.where(index[:, None] == slots[None, :], 1.0, 0.0)
            sum_p = tl.dot(p, one, sum_p * shrink[:, None], input_precision=PRECISION)
    place = (pair * stretches + stretch) * M + rows
    tl.store(top_of + place, top, mask=rows < M)
    tl.store(mass_of + place, mass, mask=rows < M)
    tl.store(out + place[:, None] * DV + wide[None, :], sum_v, mask=(rows[:, None] < M) & (wide[None, :] < DV))
    if VALUE_BITS:
        seen = (rows[:, None] < M) & (slots[None, :] < V_PATTERNS)
        tl.store(mixed + place[:, None] * V_PATTERNS + slots[None, :], sum_p, mask=seen)


def launch(
    query: Tensor, layer: PatternKVLayer, scaling: float, mask: Tensor | None, queries: int, outputs: dict[str, Tensor]
) -> Launch:
    """How the kernel is started.

    Args:
        query: ``(rows, heads, M, dim)`` float32, contiguous: all queries of a key-value head, ``queries`` of each query head.
        layer: with at least one block.
        mask: ``(rows or 1, queries or 1, >= blocked)`` bool, or ``None``.
        outputs: ``top``, ``mass`` ``(rows, heads, stretches, M)``, ``out`` ``(…, dim_v)``, ``mixed`` ``(…, patterns)``, float32.
    """
    rows, heads, M, D = query.shape
    state, options, T = layer.state, layer.options, layer.blocked
    DV, VG = outputs["out"].shape[-1], state["value_step"].shape[3]
    patterns, value_patterns = layer.patterns("key"), outputs["mixed"].shape[-1]
    counts = {part: layer.pattern_count(part) for part in ("key", "value")}
    empty = outputs["top"]  # any memory: it is not read
    rotation = layer.rotation
    table = query @ patterns.transpose(2, 3) if counts["key"] and rotation is None else empty
    marks = empty if mask is None else mask.to(torch.int8)
    strides = (
        (0, 0) if mask is None else tuple(0 if n == 1 else s for n, s in zip(mask.shape[:2], marks.stride()[:2], strict=True))
    )
    BD, BV = (max(16, triton.next_power_of_2(n)) for n in (D, DV))
    arguments = {
        "query": query, "key_codes": state["key_codes"], "key_step": state["key_step"], "key_least": state["key_minimum"],
        "key_index": state.get("key_index", empty), "key_patterns": patterns, "table": table,
        "frequencies": empty if rotation is None else rotation.frequencies.to(query.device),
        "value_codes": state["value_codes"], "value_step": state["value_step"], "value_least": state["value_minimum"],
        "value_index": state.get("value_index", empty), "mask": marks, "start": state["start"],
        "out": outputs["out"], "mixed": outputs["mixed"], "top_of": outputs["top"], "mass_of": outputs["mass"],
        "T": T, "heads": heads, "M": M, "queries": queries, "D": D, "DV": DV, "KB": state["key_codes"].shape[3],
        "VB": state["value_codes"].shape[3], "VG": VG, "K_PATTERNS": patterns.shape[2], "V_PATTERNS": value_patterns,
        "pattern_rows_k": patterns.shape[0], "half": 0 if rotation is None else rotation.size // 2,
        "sinks": options.sink_tokens, "stretches": triton.cdiv(T, STRETCH), "stride_mb": strides[0], "stride_mq": strides[1],
        "scaling": float(scaling), "STRETCH": STRETCH, "BM": QUERIES, "BN": 16, "BD": BD, "BV": BV,
        "BP": max(16, triton.next_power_of_2(value_patterns)), "BITS": options.bits,
        "KEY_GROUP": T // state["key_step"].shape[2], "VALUE_GROUP": DV // VG,
        "KEY_BITS": layer.index_bits("key") if counts["key"] else 0,
        "VALUE_BITS": layer.index_bits("value") if counts["value"] else 0,
        "ROTATE": rotation is not None, "MASK": mask is not None, "PRECISION": _precision(),
    }  # fmt: skip
    programs = triton.cdiv(T, STRETCH) * triton.cdiv(M, QUERIES) * rows * heads
    return Launch(
        blocks_kernel, programs, arguments, launch_options(4 if max(BD, BV) <= 64 else 8, 2)
    )  # with fewer, ptxas spills registers


def blocks(
    query: Tensor, layer: PatternKVLayer, scaling: float, mask: Tensor | None, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention on the blocks alone, their exact tokens left out; arguments as :func:`launch`.

    Returns:
        The unnormalised output ``(rows, heads, M, dim_v)``, and ``(rows, heads, M, 1)`` the largest score (minus infinity where
        no key is seen) and the mass relative to it.
    """
    rows, heads, M, _ = query.shape
    patterns, stretches = layer.patterns("value"), triton.cdiv(layer.blocked, STRETCH)
    shape = (rows, heads, stretches, M)
    outputs = {name: query.new_empty(shape) for name in ("top", "mass")}
    outputs["out"] = query.new_empty(*shape, layer.sizes["value"])
    outputs["mixed"] = query.new_zeros(*shape, patterns.shape[2])
    launch(query.contiguous(), layer, scaling, mask, queries, outputs).run()
    top = outputs["top"].amax(2, keepdim=True)
    share = (outputs["top"] - top.masked_fill(top.isinf(), 0.0)).exp()[..., None]  # 0 of a stretch where no key is seen
    out, mixed = ((outputs[name] * share).sum(2) for name in ("out", "mixed"))
    return out + mixed @ patterns, top.transpose(2, 3), (outputs["mass"][..., None] * share).sum(2)


def _precision() -> str:
    # The user's setting for float32 products, as for torch's own.
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
