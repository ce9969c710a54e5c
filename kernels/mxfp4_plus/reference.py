"""The formats by their definitions, in float64: slow, and what the fast forms are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from hfplug.kernels.mxfp4_plus.formats import Format

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
LIMITS = {"floor": 2.0, "rceil": 1.5, "ceil": 1.0, "even": 1.75, "oas": 1.75}  # significands above: one power of two more


def nearest(y: Tensor) -> Tensor:
    """Index of the nearest of the eight numbers, of two equally near the even one; above 6 the last."""
    distance = (y[..., None] - NUMBERS).abs()
    least = distance.amin(-1, keepdim=True)
    near = distance == least
    first, last = near.int().argmax(-1), 7 - near.flip(-1).int().argmax(-1)
    return torch.where(first % 2 == 0, first, last)


def scale_of(largest: Tensor, rule: str) -> Tensor:
    """Exponents of the blocks' scales, int64 in -127..127, from the largest magnitudes, float64 and finite."""
    m, e = torch.frexp(largest)  # largest = m 2^e, m in [.5, 1)
    m, e = 2 * m, e.long() - 1
    above = m >= LIMITS[rule] if rule == "even" else m > LIMITS[rule]
    return torch.where(largest > 0, e - 2 + above, -127).clamp(-127, 127)


def blocks(x: Tensor, rule: str, block: int) -> Tensor:
    """``x`` ``(..., K)`` as plain blocks store it, float64; ``K`` is a multiple of the block."""
    cut = x.double().unflatten(-1, (-1, block))
    exponent = scale_of(cut.abs().amax(-1, keepdim=True), rule)
    scale = torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent)
    return (NUMBERS[nearest((cut / scale).abs())].copysign(cut) * scale).flatten(-2)


def static_factor(largest: Tensor) -> Tensor:
    """``1 + m / 256`` with ``m`` the first 8 bits of the significand of ``6 / largest``; 1 for 0."""
    m, _ = torch.frexp(6.0 / largest.double())
    return torch.where(largest > 0, 1 + torch.floor((2 * m - 1) * 256) / 256, 1.0)


def fake_quantize(x: Tensor, fmt: Format) -> Tensor:
    """What ``x`` ``(..., K)``, finite, becomes, float64."""
    fmt, width = fmt.weights, x.shape[-1]
    x = torch.nn.functional.pad(x.double(), (0, -width % fmt.block))
    if fmt.mbs == "none":
        return blocks(x, fmt.scale, fmt.block)[..., :width]
    out = []
    for macro in x.split(fmt.macro, -1):
        if fmt.mbs == "static":
            candidates = [static_factor(macro.abs().amax(-1, keepdim=True))]
        else:
            candidates = [torch.full_like(macro[..., :1], 1 + j / 16) for j in range(16)]
        tried = torch.stack([blocks(f * macro, fmt.scale, fmt.block) / f for f in candidates])
        best = (tried - macro).square().sum(-1).argmin(0)  # the first of equals
        out.append(tried.gather(0, best[None, ..., None].expand(1, *macro.shape))[0])
    return torch.cat(out, -1)[..., :width]


def sliced_linear(a: Tensor, b: Tensor, fa: Tensor, fb: Tensor, macro: int) -> Tensor:
    """``(M, N)``: products of what is stored, ``f x``, one slice of ``macro`` at a time, each divided by both factors.

    Args:
        a: ``(M, K)`` and ``b`` ``(N, K)``: numbers times their factors.
        fa: ``(M, slices)`` and ``fb`` ``(N, slices)``: the factors.
        macro: width of a slice.
    """
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for index, (one, other) in enumerate(zip(a.double().split(macro, -1), b.double().split(macro, -1), strict=True)):
        total += one @ other.T / (fa[:, index, None].double() * fb[None, :, index].double())
    return total
