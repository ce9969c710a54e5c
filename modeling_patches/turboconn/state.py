"""The states of the last tokens, kept as a layer of the KV cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DummyLayer

from hfplug.errors import UnsupportedError

States = dict[int, Tensor]  # source layer -> (batch, tokens, d)
ROLLBACK = 64


def width(states: States) -> int:
    """Number of tokens."""
    return int(next(iter(states.values())).shape[1])


def joined(parts: list[States]) -> States:
    """Tokens of several, one after the other."""
    return parts[0] if len(parts) == 1 else {s: torch.cat([p[s] for p in parts], 1) for s in parts[0]}


class FeedbackLayer(DummyLayer):
    """States of the last tokens of a cache, so that every batch operation of the cache reaches them.

    Beam search reorders it, assisted decoding crops it, ``batch_repeat_interleave`` expands it, ``copy.deepcopy`` of a cache
    copies it, ``reset`` empties it. It keeps :data:`ROLLBACK` tokens more than the next token needs, for ``crop``; all of them
    after ``activate_past_recording``.

    Args:
        others: the other layers of the cache.
        needed: tokens the next one may look back (the group size).

    Attributes:
        length: tokens seen.
    """

    is_croppable = True

    def __init__(self, others: Sequence[Any], needed: int) -> None:
        super().__init__()
        self.needed = needed
        # As the others are, or transformers would take a static cache for one whose masks may be left out.
        self.is_compileable = all(layer.is_compileable for layer in others)
        self.record_past = False
        self.pieces: list[States] = []
        self.kept = self.length = 0

    def append(self, states: States) -> None:
        """The states of the next tokens, 0 for padding."""
        count = width(states)
        self.pieces.append(states)
        self.length, self.kept = self.length + count, self.kept + count
        if self.record_past:
            return
        limit = self.needed + ROLLBACK
        while self.kept - width(self.pieces[0]) >= limit:
            self.kept -= width(self.pieces.pop(0))
        if self.kept > 2 * limit:  # a whole prompt at once: do not hold on to its memory
            self.pieces = [{s: t[:, -limit:].clone() for s, t in joined(self.pieces).items()}]
            self.kept = limit

    def last(self, count: int) -> States | None:
        """The states of the last ``count`` tokens, of fewer at the start of a sequence; ``None`` before the first token."""
        taken: list[States] = []
        for piece in reversed(self.pieces):
            if count == 0:
                break
            here = min(count, width(piece))
            taken.append(piece if here == width(piece) else {s: t[:, -here:] for s, t in piece.items()})
            count -= here
        return joined(taken[::-1]) if taken else None

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.pieces:
            self.pieces = [{s: change(t) for s, t in joined(self.pieces).items()}]

    def activate_past_recording(self) -> None:
        """Keep everything from now on."""
        self.record_past = True

    def reset(self) -> None:
        """Forget everything."""
        self.pieces, self.kept, self.length = [], 0, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows in another order."""
        self._each(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row several times."""
        self._each(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Some rows."""
        self._each(lambda t: t[indices.to(t.device) if hasattr(indices, "to") else indices])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens.

        Raises:
            UnsupportedError: what the next token needs is not kept any more.
        """
        gone = min(abs(tokens_to_remove), self.length)
        if min(self.needed, self.length - gone) > self.kept - gone:
            raise UnsupportedError(
                f"turboconn: the cache was cropped by {gone} of {self.length} tokens, but states of only {self.kept} "
                f"are kept; call cache.activate_past_recording() before filling it, or crop by at most {ROLLBACK}"
            )
        if gone:
            left = max(self.kept - gone, 0)
            self.pieces = [{s: t[:, :left] for s, t in joined(self.pieces).items()}] if left else []
            self.kept, self.length = left, self.length - gone


def feedback_of(cache: Any) -> FeedbackLayer | None:
    """The states in a cache, if there are any."""
    return next((layer for layer in reversed(cache.layers) if isinstance(layer, FeedbackLayer)), None)


def attach(cache: Any, needed: int) -> FeedbackLayer:
    """Put a place for states into a cache that has all its other layers."""
    layer = FeedbackLayer(cache.layers, needed)
    cache.layers.append(layer)
    return layer


def scratch(cache: Any) -> Any:
    """A cache with the same keys and values, which a pass that does not count may write to.

    ``copy.deepcopy`` would refuse tensors with a gradient.
    """
    if cache is None:
        return None
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers if not isinstance(layer, FeedbackLayer)]
    for layer in twin.layers:
        vars(layer).update({k: v.clone() for k, v in vars(layer).items() if isinstance(v, Tensor)})
    return twin


__all__ = ["ROLLBACK", "FeedbackLayer", "States", "attach", "feedback_of", "joined", "scratch", "width"]
