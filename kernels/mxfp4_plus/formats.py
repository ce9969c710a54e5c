"""What a block format is, and a tensor stored in it.

Elements are E2M1: a sign and one of 0, .5, 1, 1.5, 2, 3, 4, 6. A block shares an E8M0 scale: the byte ``s`` stands for
``2^(s - 127)``, and 255 makes the whole block NaN (OCP Microscaling Formats 1.0, sections 5.1 and 5.4). A macro block of several
blocks may share a factor ``f = 1 + byte / 256`` in [1, 2) on top (macro block scaling, arXiv 2603.08713): what is stored is
``f x``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from hfplug.errors import ConfigError, nearest

BLOCKS = (16, 32)
# What is added to the bits of a block's largest magnitude before its exponent is read off: it carries into the exponent where
# the significand m of the magnitude (1 <= m < 2) is above the rule's limit. The scale is that exponent less emax(E2M1) = 2.
SCALES = {
    "floor": 0,  # never: the minimal rule of the OCP specification, section 6.3; scaled magnitudes in [4, 8)
    "rceil": 0x3FFFFF,  # m > 1.5: the smallest scale without overflow; (3, 6]
    "ceil": 0x7FFFFF,  # m > 1; (2, 4]
    "even": 0x200000,  # m >= 1.75: the magnitude rounded to E2M1's one bit first; [3.5, 7)
    "oas": 0x1FFFFF,  # m > 1.75: overflow-aware scaling; (3.5, 7]
}
MACROS = ("none", "static", "dynamic", "hybrid")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Format:
    """How numbers are stored in 4 bits.

    Args:
        block: numbers that share a scale, along the last dimension: 16 or 32 (the OCP format is 32).
        scale: rule for a block's scale: ``floor`` (OCP), ``rceil``, ``ceil``, ``even`` or ``oas``.
        mbs: macro block scaling: ``none``; ``static``: the factor takes the macro block's largest magnitude to 6 times a power of
            two, so that it is stored almost exactly; ``dynamic``: the best of 16 factors by squared error; ``hybrid``: dynamic
            for what is quantised once (weights), static for what is quantised at every call (activations).
        macro: numbers that share a factor: a multiple of ``block``, 128 in the paper.

    Raises:
        ConfigError: a value that is not allowed, named.
    """

    block: int = 16
    scale: str = "oas"
    mbs: str = "none"
    macro: int = 128

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block not in BLOCKS:
            raise ConfigError(f"block is {self.block!r}; it must be 16 or 32")
        for name, allowed in (("scale", tuple(SCALES)), ("mbs", MACROS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}{nearest(value, allowed)}")
        if type(self.macro) is not int or self.macro < self.block or self.macro % self.block:
            raise ConfigError(f"macro is {self.macro!r}; it must be a multiple of block, {self.block}")

    @property
    def weights(self) -> Format:
        """The same for what is quantised once: hybrid is dynamic."""
        return dataclasses.replace(self, mbs="dynamic") if self.mbs == "hybrid" else self

    @property
    def activations(self) -> Format:
        """The same for what is quantised at every call: hybrid is static."""
        return dataclasses.replace(self, mbs="static") if self.mbs == "hybrid" else self

    @property
    def bits(self) -> float:
        """Bits per number of a long row."""
        return 4 + 8 / self.block + (0 if self.mbs == "none" else 8 / self.macro)

    def padded(self, width: int) -> int:
        """Numbers stored for a row of ``width``: up to the next multiple of the block."""
        return -(-width // self.block) * self.block

    def macros(self, width: int) -> int:
        """Factors stored for a row of ``width``; the last macro block may be shorter."""
        return -(-self.padded(width) // self.macro)


@dataclass
class Packed:
    """A tensor stored in a block format. Rows (the last dimension, ``K``) are padded with zeros and never mixed.

    Attributes:
        codes: uint8 ``(..., K_padded / 2)``: two E2M1 codes a byte, the even position in the low half; a code is the sign (8) and
            the index of the magnitude.
        scales: uint8 ``(..., K_padded / block)``: E8M0.
        factors: uint8 ``(..., ceil(K_padded / macro))``: ``f = 1 + byte / 256``; ``None`` without macro block scaling.
        shape: of the tensor stored.
        format: with ``hybrid`` resolved.
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor | None
    shape: tuple[int, ...]
    format: Format

    def __post_init__(self) -> None:
        self.shape = tuple(self.shape)
        if not self.shape:
            raise ConfigError("shape is (); a tensor with at least one dimension is needed")
        *rows, width = self.shape
        padded = self.format.padded(width)
        self._check("codes", self.codes, (*rows, padded // 2))
        self._check("scales", self.scales, (*rows, padded // self.format.block))
        if (self.factors is None) != (self.format.mbs == "none"):
            raise ConfigError(f"factors is {'None' if self.factors is None else 'given'}, but mbs is {self.format.mbs!r}")
        if self.factors is not None:
            self._check("factors", self.factors, (*rows, self.format.macros(width)))

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tensor.dtype != torch.uint8:
            raise ConfigError(f"{name} is {tensor.dtype}; it must be torch.uint8")
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{name} has the shape {tuple(tensor.shape)}; it must be {shape} for {self.shape} in {self.format}")

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return sum(t.numel() for t in (self.codes, self.scales, self.factors) if t is not None)

    def to(self, device: torch.device | str) -> Packed:
        """The same on another device."""
        factors = None if self.factors is None else self.factors.to(device)
        return Packed(self.codes.to(device), self.scales.to(device), factors, self.shape, self.format)


def checked(x: Tensor, name: str = "x") -> Tensor:
    """``x``, which has a dtype and a dimension that can be quantised.

    Raises:
        ConfigError: it has not.
    """
    if x.dtype not in DTYPES:
        raise ConfigError(f"{name} is {x.dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    if x.dim() < 1:
        raise ConfigError(f"{name} has no dimension; the last one is what is cut into blocks")
    return x
