"""The factor of a macro block: ``f = 1 + byte / 256`` in [1, 2), by which its numbers are multiplied before they are rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from hfplug.kernels.mxfp4_plus.bits import EXPONENT, LARGEST, MANTISSA, block_scales, powers, reciprocal, rounded
from hfplug.kernels.mxfp4_plus.formats import Format

CANDIDATES = 16  # of the dynamic form: 1 + j / 16


def factors_of(blocks: Tensor, magnitude: Tensor, fmt: Format, importance: Tensor | None = None) -> Tensor:
    """The factors' bytes ``(R, macros)``, uint8, of finite blocks ``(R, B, block)`` with largest magnitudes ``(R, B)``.

    ``static``: the first 8 bits of the significand of ``6 / (largest magnitude)``, cut off, not rounded; 1 where the quotient is
    infinite. ``dynamic``: of ``1 + j / 16`` the one with the least squared error over the macro block, the smallest of equals; 1
    is among them, hence it is never worse than no factor.
    """
    _, count, size = blocks.shape
    per = fmt.macro // fmt.block
    missing = -count % per
    if missing:
        blocks = torch.nn.functional.pad(blocks, (0, 0, 0, missing))
        magnitude = torch.nn.functional.pad(magnitude, (0, missing))
    blocks, magnitude = blocks.unflatten(1, (-1, per)), magnitude.unflatten(1, (-1, per))
    if fmt.mbs == "static":
        return static(magnitude.amax(-1))
    weights = None
    if importance is not None:
        weights = importance.to(blocks.device, torch.float32)
        weights = torch.nn.functional.pad(weights, (0, (count + missing) * size - len(weights))).view(-1, per, size)
    return dynamic(blocks, magnitude, fmt.scale, weights)


def static(largest: Tensor) -> Tensor:
    """Bytes of the static factors for macro blocks with these largest magnitudes, float32."""
    quotient = torch.full_like(largest, LARGEST).div_(largest)
    return ((quotient.view(torch.int32) >> (MANTISSA - 8)) & 0xFF).to(torch.uint8)


def dynamic(blocks: Tensor, magnitude: Tensor, rule: str, weights: Tensor | None) -> Tensor:
    """Bytes of the dynamic factors of ``(R, M, per, block)``, whose blocks' largest magnitudes are ``(R, M, per)``.

    Errors are taken of numbers divided by the power of two below the macro block's largest: the choice does not depend on the
    unit, and no square overflows.
    """
    exponent = (magnitude.amax(-1).view(torch.int32) & EXPONENT) >> MANTISSA
    unit = reciprocal(exponent)[..., None]
    x = blocks.mul(unit[..., None]).abs_()
    magnitude = magnitude * unit
    best = torch.full_like(unit[..., 0], float("inf"))
    chosen = torch.zeros_like(best, dtype=torch.uint8)
    for j in range(CANDIDATES):
        f = 1 + j / CANDIDATES
        scale = block_scales(magnitude * f, rule)
        error = rounded(x.mul(reciprocal(scale)[..., None] * f).clamp_(max=LARGEST))
        error.mul_(powers(scale)[..., None] / f).sub_(x).square_()
        if weights is not None:
            error.mul_(weights)
        total = error.flatten(-2).sum(-1)
        better = total < best
        best = torch.where(better, total, best)
        chosen.masked_fill_(better, j * 256 // CANDIDATES)
    return chosen
