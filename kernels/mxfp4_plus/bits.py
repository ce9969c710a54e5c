"""Exponents and roundings on the bits of float32.

A block's exponent is read off after one addition: a logarithm rounds wrongly next to powers of two. An element is rounded by the
floating-point unit itself, ties to even, after the addition that puts the last place where E2M1 has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfplug.kernels.mxfp4_plus.formats import SCALES, Format

MANTISSA, EXPONENT, MAGNITUDE = 23, 0x7F800000, 0x7FFFFFFF
LARGEST, NAN = 6.0, 255


def rounded(y: Tensor) -> Tensor:
    """Magnitudes ``0 <= y <= 6`` to the nearest of E2M1, ties to even.

    Adding ``2^(22 + e)``, where ``2^e`` is the largest power of two not above ``max(y, 1)``, leaves the unit's last place at the
    distance of E2M1's numbers there: .5, 1 and 2.
    """
    added = large(y)
    return (y + added).sub_(added)


def block_scales(magnitude: Tensor, rule: str) -> Tensor:
    """E8M0 bytes, int32, from the float32 magnitudes ``(...)`` of blocks; 255 where one is not finite."""
    bits = magnitude.view(torch.int32)
    scale = ((bits + SCALES[rule]) >> MANTISSA).sub_(2).clamp_(0, 254)
    return scale.masked_fill_(bits >= EXPONENT, NAN)


def macro_scales(magnitude: Tensor, f: Tensor, rule: str) -> Tensor:
    """:func:`block_scales` of ``f magnitude``, which may be above the largest float32: then a 64th power of two lower."""
    high = magnitude >= 2.0**64
    lifted = block_scales(torch.where(high, magnitude * 2.0**-64, magnitude) * f, rule)
    return torch.where(high, lifted + 64, lifted).clamp_(max=254)


def reciprocal(scale: Tensor) -> Tensor:
    """``2^(127 - s)`` in float32 of bytes ``s`` in 0..254."""
    bits = (254 - scale.int()) << MANTISSA
    return torch.where(bits == 0, 1 << (MANTISSA - 1), bits).view(torch.float32)  # 2^-127 is subnormal


def powers(scale: Tensor) -> Tensor:
    """``2^(s - 127)`` in float32 of E8M0 bytes, NaN for 255."""
    bits = scale.int() << MANTISSA
    bits = torch.where(scale == 0, 1 << (MANTISSA - 1), bits)
    return bits.masked_fill_(scale == NAN, 0x7FC00000).view(torch.float32)


def spread(factors: Tensor, blocks: int, fmt: Format) -> Tensor:
    """``f`` in float32 for each of ``blocks`` blocks ``(R, blocks)`` from the bytes ``(R, macros)``."""
    return factors.float().mul_(2.0**-8).add_(1.0).repeat_interleave(fmt.macro // fmt.block, -1)[:, :blocks]


def large(y: Tensor) -> Tensor:
    """What to add to magnitudes ``y`` so that the sum is rounded where E2M1 is."""
    return (y.clamp(min=1.0).view(torch.int32) & EXPONENT).add_(22 << MANTISSA).view(torch.float32)
