"""Numbers to 4 bits and back, in torch.

Everything is decided on the bits of float32 (``bits.py``), in chunks that stay in the cache. ``reference.py`` says the same in
float64, slowly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from hfplug.errors import ConfigError
from hfplug.kernels.mxfp4_plus.bits import (
    EXPONENT,
    LARGEST,
    MAGNITUDE,
    MANTISSA,
    NAN,
    block_scales,
    large,
    macro_scales,
    powers,
    reciprocal,
    rounded,
    spread,
)
from hfplug.kernels.mxfp4_plus.formats import Format, Packed, checked
from hfplug.kernels.mxfp4_plus.macro import factors_of

__all__ = ["Format", "Packed", "dequantize", "fake_quantize", "quantize", "to_ocp"]

CHUNK = 1 << 17  # elements: a chunk and its intermediate results stay in a core's cache


def quantize(x: Tensor, fmt: Format, *, importance: Tensor | None = None) -> Packed:
    """Store ``x`` in a block format, rounding to nearest, ties to even, saturating at 6 times the scale.

    A block with an infinity or a NaN becomes NaN as a whole (scale 255, codes 0); a block of zeros has scale 0 and keeps its
    signs; a block too small for the smallest scale, 2^-127, is stored with that one (below 2^-124: its largest magnitude then
    is under 4 of the scale). ``hybrid`` is ``dynamic`` here: ask for ``fmt.activations`` to get the static form.

    Args:
        x: ``(..., K)`` float32, bfloat16 or float16.
        fmt: block, scale rule and macro block scaling.
        importance: ``(K,)`` non-negative: weight of each position in the squared error by which ``dynamic`` chooses; e.g. the
            mean square of the activations a weight's column meets. Only with ``dynamic`` or ``hybrid``.

    Raises:
        ConfigError: the dtype or the importance is not allowed.
    """
    fmt = fmt.weights
    rows = _rows(checked(x))
    _check_importance(importance, fmt, x)
    width = fmt.padded(x.shape[-1])
    codes = torch.empty(len(rows), width // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(rows), width // fmt.block, dtype=torch.uint8, device=x.device)
    factors = None if fmt.mbs == "none" else torch.empty(len(rows), fmt.macros(width), dtype=torch.uint8, device=x.device)
    for span in _chunks(rows, width):
        part = _padded(rows[span], width)
        blocks, scale, ratio, chosen = _scaled(part, fmt, importance)
        codes[span] = _packed(_codes(blocks, ratio)).view(-1, width // 2)
        scales[span] = scale
        if factors is not None and chosen is not None:
            factors[span] = chosen
    head = x.shape[:-1]
    stored = None if factors is None else factors.view(*head, factors.shape[-1])
    return Packed(codes.view(*head, width // 2), scales.view(*head, width // fmt.block), stored, tuple(x.shape), fmt)


def dequantize(p: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """What is stored: ``magnitude / f * 2^(s - 127)``, computed in float32 and rounded once to ``dtype``; ``(..., K)``."""
    out = torch.empty(p.shape, dtype=dtype, device=p.codes.device)
    rows, width = _rows(out), p.format.padded(p.shape[-1])
    codes, scales = (t.reshape(len(rows), t.shape[-1]) for t in (p.codes, p.scales))
    factors = None if p.factors is None else p.factors.reshape(len(rows), p.factors.shape[-1])
    table = _pairs(p.codes.device)
    for span in _chunks(rows, width):
        values = table.index_select(0, codes[span].reshape(-1).int()).view(torch.float32)
        blocks = values.view(-1, width // p.format.block, p.format.block)
        _rescale(blocks, scales[span], None if factors is None else factors[span], p.format)
        rows[span] = blocks.view(-1, width)[:, : p.shape[-1]].to(dtype)
    return out


def fake_quantize(x: Tensor, fmt: Format) -> Tensor:
    """``dequantize(quantize(x, fmt), x.dtype)`` without packing; for measuring and for activations. No gradient of its own."""
    fmt = fmt.weights
    x = checked(x).detach()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, into, width = _rows(x), _rows(out), fmt.padded(x.shape[-1])
    for span in _chunks(rows, width):
        part = _padded(rows[span], width)
        blocks, scale, ratio, chosen = _scaled(part, fmt, None)
        values = rounded(blocks.mul(ratio).abs_().clamp_(max=LARGEST)).copysign_(blocks)
        _rescale(values, scale, chosen, fmt)
        into[span] = values.view(-1, width)[:, : x.shape[-1]].to(x.dtype)
    return out


def to_ocp(p: Packed) -> Packed:
    """The nearest plain OCP MXFP4: block 32, no factors. Quantises again, so it loses what those gave; the rule is kept.

    A tensor that is plain already is returned as it is.
    """
    if p.format.block == 32 and p.format.mbs == "none":
        return p
    return quantize(dequantize(p), Format(32, p.format.scale))


def _scaled(part: Tensor, fmt: Format, importance: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Blocks ``(R, B, block)``, their scales ``(R, B)``, what they are multiplied by ``(R, B, 1)``, and the factors' bytes."""
    blocks = part.view(len(part), -1, fmt.block)
    magnitude = (blocks.view(torch.int32) & MAGNITUDE).amax(-1)
    broken = magnitude >= EXPONENT
    if bool(broken.any()):
        blocks = blocks.masked_fill(broken[..., None], 0.0)
        magnitude = magnitude.masked_fill(broken, 0)
    chosen = None
    if fmt.mbs == "none":
        scale = block_scales(magnitude.view(torch.float32), fmt.scale)
        ratio = reciprocal(scale)
    else:
        chosen = factors_of(blocks, magnitude.view(torch.float32), fmt, importance)
        f = spread(chosen, blocks.shape[1], fmt)
        scale = macro_scales(magnitude.view(torch.float32), f, fmt.scale)
        ratio = reciprocal(scale) * f
    scale.masked_fill_(broken, NAN)
    return blocks, scale.to(torch.uint8), ratio[..., None], chosen


def _rescale(values: Tensor, scale: Tensor, factors: Tensor | None, fmt: Format) -> None:
    """From E2M1's numbers ``(R, B, block)`` to what they stand for, in place."""
    if factors is not None:
        values.div_(spread(factors, values.shape[1], fmt)[..., None])
    values.mul_(powers(scale)[..., None])


def _codes(blocks: Tensor, ratio: Tensor) -> Tensor:
    """Codes, uint8, of blocks times their ratios; the sign is that of the number, also of zero."""
    y = blocks.mul(ratio).abs_().clamp_(max=LARGEST)
    # In the sum's bits, what stands at the low end counts E2M1's numbers from 0 in steps of .5, 1 or 2 as the exponent is
    # 149, 150 or 151; there are two numbers to each exponent, hence code = count + 2 (exponent - 149), modulo 256.
    sums = y.add_(large(y)).view(torch.int32)
    code = sums.to(torch.uint8).add_((sums >> (MANTISSA - 1)).to(torch.uint8)).sub_(2 * 149 % 256)
    return code.bitwise_or_((blocks.view(torch.int32) >> 28).to(torch.uint8).bitwise_and_(8))


def _packed(codes: Tensor) -> Tensor:
    """Two codes a byte: as little-endian pairs, the second is moved next to the first."""
    pairs = codes.view(-1).view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """The two numbers of each of the 256 bytes, as the bits of one int64."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], -1).view(torch.int64).flatten().to(device)


def _rows(x: Tensor) -> Tensor:
    """``(R, K)``, also where a dimension is 0."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _chunks(rows: Tensor, width: int) -> Iterator[slice]:
    size = max(1, CHUNK // max(width, 1)) if rows.device.type == "cpu" else max(len(rows), 1)
    return (slice(start, start + size) for start in range(0, len(rows) if width else 0, size))


def _padded(rows: Tensor, width: int) -> Tensor:
    """A contiguous float32 copy or view of the rows with zeros up to ``width``."""
    rows = rows.detach().float()
    return torch.nn.functional.pad(rows, (0, width - rows.shape[-1])) if width > rows.shape[-1] else rows.contiguous()


def _check_importance(importance: Tensor | None, fmt: Format, x: Tensor) -> None:
    if importance is None:
        return
    if fmt.mbs != "dynamic":
        raise ConfigError(f"importance is given, but mbs is {fmt.mbs!r}; it must be 'dynamic' or 'hybrid', which choose")
    if tuple(importance.shape) != (x.shape[-1],):
        raise ConfigError(f"importance has the shape {tuple(importance.shape)}; it must be {(x.shape[-1],)}")
    if not bool((importance >= 0).all()) or not bool(importance.isfinite().all()):
        raise ConfigError("importance holds a number that is negative or not finite")
