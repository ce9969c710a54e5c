"""Numbers of a few bits: groups with a step and a minimum, and their packing into bytes. Pure functions of tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hfplug.errors import ConfigError, UnsupportedError

WIDTHS = (1, 2, 4, 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Integers below ``2**bits`` along the last axis into bytes, the first in the lowest bits.

    Args:
        codes: uint8 ``(..., n)``; ``n`` is filled up with zeros to whole bytes.
        bits: one of 1, 2, 4, 8.

    Returns:
        uint8 ``(..., ceil(n * bits / 8))``.
    """
    _check(bits)
    per = 8 // bits
    if per == 1:
        return codes.contiguous()
    if extra := -codes.shape[-1] % per:
        codes = torch.nn.functional.pad(codes, (0, extra))
    split = codes.unflatten(-1, (-1, per))
    packed = split[..., 0].clone()
    for i in range(1, per):
        packed |= split[..., i] << (i * bits)
    return packed


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """What :func:`pack` was given, ``(..., length)`` uint8."""
    _check(bits)
    per = 8 // bits
    if per == 1:
        return packed
    mask = (1 << bits) - 1
    return torch.stack([(packed >> (i * bits)) & mask for i in range(per)], dim=-1).flatten(-2)[..., :length]


def _check(bits: int) -> None:
    if bits not in WIDTHS:
        raise ConfigError(f"bits={bits!r} is not one of {list(WIDTHS)}")


class Groups(NamedTuple):
    """Numbers as ``minimum + code * step``.

    Attributes:
        codes: uint8, of the shape of what was quantised, not packed.
        step, minimum: that shape with the grouped axis divided by the group.
    """

    codes: Tensor
    step: Tensor
    minimum: Tensor


def quantise(
    x: Tensor, bits: int, axis: int, group: int, counted: Tensor | None = None, dtype: torch.dtype = torch.float16
) -> Groups:
    """Groups of ``group`` neighbours along ``axis``: ``code = round((x - min) / step)``, ``step = (max - min) / (2**bits - 1)``.

    The codes are made for the step and minimum as they are stored, so that no element is further off than half a step, plus what
    rounding the minimum upwards and the step downwards cuts off at the ends of the range.

    Args:
        x: any shape; worked on in fp32.
        counted: bool, broadcastable to ``x``: elements that count for the range. The others get code 0. A group without a counted
            element has step and minimum 0.
        dtype: of step and minimum.

    Raises:
        ConfigError: ``group`` does not divide the axis.
        UnsupportedError: a step or minimum is too large for ``dtype``, or not finite.
    """
    if x.shape[axis] % group:
        raise ConfigError(f"group={group} does not divide the {x.shape[axis]} elements along axis {axis}")
    axis %= x.dim()
    grouped = x.float().unflatten(axis, (-1, group))
    low = high = grouped
    if counted is not None:
        counted = counted.expand_as(x).unflatten(axis, (-1, group))
        low, high = grouped.masked_fill(~counted, torch.inf), grouped.masked_fill(~counted, -torch.inf)
    least, most = low.amin(axis + 1, keepdim=True), high.amax(axis + 1, keepdim=True)
    if counted is not None:
        some = counted.any(axis + 1, keepdim=True)
        least, most = least.where(some, 0), most.where(some, 0)
        grouped = grouped.where(counted, least)
    minimum = least.to(dtype)
    step = ((most - minimum.float()).clamp(min=0) / (2**bits - 1)).to(dtype)
    if not bool((minimum.isfinite() & step.isfinite()).all()):
        raise UnsupportedError(
            f"numbers between {float(least.min()):.4g} and {float(most.max()):.4g} do not fit {dtype}; use a wider one"
        )
    scale = torch.where(step > 0, step.float(), 1)
    codes = ((grouped - minimum.float()) / scale).round().clamp(0, 2**bits - 1).to(torch.uint8)
    return Groups(codes.flatten(axis, axis + 1), step.squeeze(axis + 1), minimum.squeeze(axis + 1))


def dequantise(groups: Groups, axis: int) -> Tensor:
    """``minimum + code * step`` in fp32, of the shape of the codes."""
    axis %= groups.codes.dim()
    grouped = groups.codes.unflatten(axis, (groups.step.shape[axis], -1)).float()
    return (grouped * groups.step.float().unsqueeze(axis + 1) + groups.minimum.float().unsqueeze(axis + 1)).flatten(
        axis, axis + 1
    )


__all__ = ["WIDTHS", "Groups", "dequantise", "pack", "quantise", "unpack"]
