"""A linear map with a norm over the whole width of each of its parts: Psi(x) = Norm(W x)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hfplug.families import Split
from hfplug.modelpatch import PatchModule

Kind = Literal["rms", "layer"]


class PartNorm(PatchModule):
    """RMSNorm or LayerNorm (without a shift) of each part of a projection by itself, gain 1 at the start.

    Statistics are in fp32 whatever the input's dtype; the output has the input's dtype.

    Args:
        split: the parts of the projection's output: each is normalised over its whole width, all heads together.
        kind: ``"rms"``: ``x / sqrt(mean(x^2) + eps)``; ``"layer"``: ``(x - mean(x)) / sqrt(var(x) + eps)``.
        eps: added to the mean square or variance.
        affine: whether there is a gain: ``weight``, one for each output feature, in the projection's order.
        like: the projection's weight, for dtype and device of the gain.
    """

    def __init__(self, split: Split, kind: Kind, eps: float, affine: bool, like: Tensor) -> None:
        super().__init__()
        self.split, self.kind, self.eps = split, kind, eps
        self.width = sum(split.sizes) * (split.heads or 1)
        gain = torch.ones(self.width, dtype=like.dtype, device=like.device) if affine else None
        self.weight = None if gain is None else nn.Parameter(gain)

    def reset_parameters(self) -> None:
        """Gain 1."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``(..., width)``."""
        if self.split.heads:
            return self._interleaved(x)
        gains = [None] * len(self.split.sizes) if self.weight is None else self.weight.split(self.split.sizes)
        parts = [self._norm(part, gain) for part, gain in zip(x.split(self.split.sizes, -1), gains, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _norm(self, x: Tensor, gain: Tensor | None) -> Tensor:
        # torch's kernels keep the statistics in fp32 themselves: one pass over memory.
        if self.kind == "rms":
            return functional.rms_norm(x, x.shape[-1:], gain, self.eps)
        return functional.layer_norm(x, x.shape[-1:], gain, None, self.eps)

    def _interleaved(self, x: Tensor) -> Tensor:
        # (..., heads, parts, size): the width of a part goes over heads and size
        wide = x.unflatten(-1, (self.split.heads, len(self.split.sizes), self.split.sizes[0])).float()
        if self.kind == "layer":
            wide = wide - wide.mean((-3, -1), keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean((-3, -1), keepdim=True) + self.eps)
        flat = wide.flatten(-3)
        return (flat if self.weight is None else flat * self.weight.float()).to(x.dtype)

    def extra_repr(self) -> str:
        """Kind and parts."""
        return f"{self.kind}, {'|'.join(self.split.roles)}, {self.width}, eps={self.eps}"


_REFUSED = (
    "simplenorm: an adapter on a normalised projection is added after the norm, Norm(W x) + B A x, and merged it would stand "
    "inside, Norm((W + B A) x); keep the adapter, or train the weights"
)


class NormedLinear(nn.Linear):
    """``nn.Linear`` and its norm; shares the weight and bias it is made from, whose names stay the same."""

    merge_refused: ClassVar[str] = _REFUSED
    norm: PartNorm

    def __init__(self, linear: nn.Linear, norm: PartNorm) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        _share(self, linear, norm)

    def forward(self, x: Tensor) -> Tensor:
        """``Norm(W x + b)``: ``(..., in)`` to ``(..., out)``."""
        out: Tensor = self.norm(super().forward(x))
        return out


class NormedConv1D(Conv1D):
    """transformers' ``Conv1D`` (GPT-2: weight ``(in, out)``) and its norm."""

    merge_refused: ClassVar[str] = _REFUSED
    norm: PartNorm

    def __init__(self, linear: Any, norm: PartNorm) -> None:
        nn.Module.__init__(self)
        self.nf, self.nx = linear.nf, linear.nx
        _share(self, linear, norm)

    def forward(self, x: Tensor) -> Tensor:
        """``Norm(x W + b)``: ``(..., in)`` to ``(..., out)``."""
        out: Tensor = self.norm(super().forward(x))
        return out


def _share(module: Any, linear: Any, norm: PartNorm) -> None:
    module.weight = linear.weight
    module.register_parameter("bias", linear.bias)
    module.norm = norm
    module.train(linear.training)


def normed(linear: Any, norm: PartNorm) -> NormedLinear | NormedConv1D:
    """``linear`` with a norm after it."""
    return NormedConv1D(linear, norm) if isinstance(linear, Conv1D) else NormedLinear(linear, norm)


__all__ = ["NormedConv1D", "NormedLinear", "PartNorm", "normed"]
