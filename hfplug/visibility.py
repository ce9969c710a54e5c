"""Who sees whom in a call of attention, block by block, so that nothing of size queries x keys is made."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hfplug.errors import ConfigError, UnsupportedError


class Block(NamedTuple):
    """Who sees whom among some consecutive queries.

    Attributes:
        low, high: only keys ``low:high`` can be seen by any of them.
        free: this many of those, from ``low`` on, are seen by all.
        keep: ``(batch or 1, heads or 1, queries, high - low - free)`` bool: who sees the rest; ``None``: all do.
        bias: ``(batch or 1, heads or 1, queries, high - low)`` fp32 added to the logits, or ``None``.
    """

    low: int
    high: int
    free: int
    keep: Tensor | None
    bias: Tensor | None = None


class Pairs:
    """Which query sees which key, produced block by block so that nothing of size queries x keys is made."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        causal: bool,
        window: int | None,
        documents: Tensor | None,
    ) -> None:
        if query.dim() != 4 or key.dim() != 4 or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
            raise ConfigError(f"query {tuple(query.shape)} and key {tuple(key.shape)} do not fit together")
        self.batch, self.length, self.keys, self.device = query.shape[0], query.shape[2], key.shape[2], query.device
        if self.keys < self.length:
            raise ConfigError(f"{self.length} queries but only {self.keys} keys")
        if window is not None and not causal:
            raise UnsupportedError(f"window={window} without causal attention is not supported")
        self.mask: Tensor | None = None
        self.padding: Tensor | None = None
        self.causal, self.window, self.documents = causal, window, documents
        if mask is not None and mask.dim() == 4:
            fits = all(a in (b, 1) for a, b in zip(mask.shape[:2], query.shape[:2], strict=True))
            if not fits or mask.shape[2:] != (self.length, self.keys):
                raise ConfigError(f"mask {tuple(mask.shape)} does not fit {tuple(query.shape[:3])} queries and {self.keys} keys")
            self.mask = mask
        elif mask is not None:
            if tuple(mask.shape) != (self.batch, self.keys):
                raise ConfigError(f"mask {tuple(mask.shape)} must have 4 dimensions or be ({self.batch}, {self.keys})")
            self.padding = mask.bool()
        if documents is not None and tuple(documents.shape) != (self.batch, self.keys):
            raise ConfigError(f"documents {tuple(documents.shape)} must be ({self.batch}, {self.keys})")

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """``(low, high)``: the keys that the queries ``begin:end`` can see at most lie in ``low:high``."""
        if self.mask is not None or not self.causal:
            return 0, self.keys
        offset = self.keys - self.length
        low = 0 if self.window is None else max(0, begin + offset - self.window + 1)
        return low, end + offset

    def block(self, begin: int, end: int) -> Block:
        """What the queries ``begin:end`` see."""
        low, high = self.span(begin, end)
        if self.mask is not None:
            keep, bias = split_mask(self.mask[:, :, begin:end])
            if self.device.type == "cpu" and len(seen := keep.any(dim=0).any(dim=0).any(dim=0).nonzero()):
                # Most masks are causal: what lies behind the last visible key is not computed. Asking costs a GPU a wait.
                # The diagonal is kept, seen or not.
                offset = self.keys - self.length
                low, high = min(int(seen[0]), begin + offset), max(int(seen[-1]) + 1, end + offset)
                keep, bias = keep[..., low:high], None if bias is None else bias[..., low:high]
            return Block(low, high, 0, keep, bias)
        alone = self.window is None and self.padding is None and self.documents is None
        if alone and not self.causal:
            return Block(low, high, high - low, None)
        offset, place = self.keys - self.length, torch.arange(self.keys, device=self.device)
        free = begin + offset if alone else 0  # without padding all see everything before the first of them
        keep = self._sees(place[begin + offset : end + offset, None], place[None, low + free : high])
        return Block(low, high, free, keep)

    def _sees(self, query: Tensor, key: Tensor) -> Tensor:
        # query and key are broadcastable positions; the result has two leading dimensions, batch (or 1) and heads (1).
        keep = torch.ones_like(query - key, dtype=torch.bool)[None]
        if self.causal:
            keep = keep & (key <= query)
        if self.window is not None:
            keep = keep & (key > query - self.window)
        if self.padding is not None:
            keep = keep & self.padding[:, key]
        if self.documents is not None:
            keep = keep & (self.documents[:, query] == self.documents[:, key])
        return keep[:, None]

    def tokens(self) -> tuple[Tensor, Tensor]:
        """``(real, starts)``, each ``(batch, queries)`` bool; see :class:`SinkScores`.

        A padding token cannot see itself, whichever side it is on and whatever its garbage row of the softmax looks like.
        """
        offset = self.keys - self.length
        if self.mask is not None:
            diagonal = torch.diagonal(self.mask, offset=offset, dim1=2, dim2=3)
            before = torch.diagonal(self.mask, offset=offset - 1, dim1=2, dim2=3)  # lacks query 0 when offset is 0
            real, sees_before = (split_mask(part)[0].any(dim=1) for part in (diagonal, before))
        else:
            place = torch.arange(self.keys, device=self.device)
            mine, former = place[offset:], place[max(offset - 1, 0) : self.keys - 1]
            real = self._sees(mine, mine)[:, 0]
            sees_before = self._sees(mine[len(mine) - len(former) :], former)[:, 0]
        real = real.expand(self.batch, -1)
        missing = self.length - sees_before.shape[1]
        sees_before = torch.nn.functional.pad(sees_before.expand(self.batch, -1), (missing, 0))
        return real, real & ~sees_before


def split_mask(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """A 4-D mask as ``(keep, bias)``: bool, and for a floating point one what is added to the logits.

    Raises:
        ConfigError: a mask of integers.
    """
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.dtype.is_floating_point:
        raise ConfigError(f"a 4-D mask must be bool or floating point, not {mask.dtype}")
    # Half of the minimum: transformers adds the minimum itself, and sums of two masks overflow to -inf.
    keep = mask > torch.finfo(mask.dtype).min / 2
    return keep, mask.float()
