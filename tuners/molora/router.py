"""The router: what it computes for a token, and what it decides."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Slots = tuple[str | None, ...]


@dataclass
class Decision:
    """Which experts the tokens of a call go through.

    Attributes:
        slots: what a value of ``index`` means; ``None`` is the null expert.
        index: ``(batch, tokens, k)`` int64, the chosen slots of each token, each at most once.
        weight: ``(batch, tokens, k)`` float of them, with the router's gradient; ``None``: all are 1.
        probabilities: ``(batch, tokens, slots)`` float with the router's gradient, where all experts shall give it one.
    """

    slots: Slots
    index: Tensor
    weight: Tensor | None = None
    probabilities: Tensor | None = None
    _sorted: tuple[Tensor, list[int]] | None = field(default=None, repr=False)

    @property
    def learns(self) -> Tensor | None:
        """What carries the router's gradient, if anything does."""
        return next((t for t in (self.weight, self.probabilities) if t is not None and t.requires_grad), None)

    def by_slot(self) -> tuple[Tensor, list[int]]:
        """Positions of the flattened ``index`` sorted by slot (stable), and how many of them each slot has.

        Computed once: the modules of a decoder layer share one decision, and on a GPU the counts are a synchronisation.
        """
        if self._sorted is None:
            flat = self.index.reshape(-1)
            self._sorted = flat.argsort(stable=True), torch.bincount(flat, minlength=len(self.slots)).tolist()
        return self._sorted


def choose(
    logits: Tensor, slots: Slots, *, top_k: int = 1, soft: bool = False, temperature: float = 1.0, gradient: str = "all"
) -> Decision:
    """Turn logits into a decision.

    Hard, one expert: ``k = argmax``, ties to the lowest index, at scale 1, with a straight-through gradient: of ``p_k`` alone
    (``w = p_k + stopgrad(1 - p_k)``; written ``1 + (p_k - stopgrad(p_k))``, which rounding leaves at 1), or of all ``p``
    (:func:`hfplug.tuners.molora.dispatch.straight_through`). Hard, several: the best ``top_k`` with their probabilities
    renormalised. Soft: all, with their probabilities.

    Args:
        logits: ``(..., slots)`` float.
    """
    probabilities = torch.softmax(logits / temperature, dim=-1)
    # A stable sort breaks ties by index on every device; argmax and topk promise nothing.
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    if soft:
        index = torch.arange(len(slots), device=logits.device).expand(logits.shape)
        return Decision(slots, index, probabilities)
    index = order[..., :top_k]
    chosen = probabilities.gather(-1, index)
    if top_k > 1:
        return Decision(slots, index, chosen / chosen.sum(-1, keepdim=True))
    if not chosen.requires_grad:
        return Decision(slots, index)
    if gradient == "all":
        return Decision(slots, index, probabilities=probabilities)
    return Decision(slots, index, 1 + (chosen - chosen.detach()))


class Router(nn.Module):
    """``W2·silu(W1·rmsnorm(h)) + b``: a two-layer MLP that classifies tokens, in float32 (float64 for float64 inputs).

    Args:
        features: size of ``h``.
        hidden: rows of ``W1``.
        rows: the slots it chooses from.
        spread: start with small random rows instead of zeros.
    """

    def __init__(self, features: int, hidden: int, rows: int, *, spread: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(hidden, features))
        self.w2 = nn.Parameter(torch.empty(rows, hidden))
        self.bias = nn.Parameter(torch.zeros(rows))
        nn.init.kaiming_uniform_(self.w1, a=math.sqrt(5))
        # At zero all slots tie and the first wins: the null expert, so a fresh adapter is the base model. Where only the chosen
        # expert gives a gradient the null expert, whose delta is zero, would give none for ever: there the tokens start spread.
        if spread:
            nn.init.normal_(self.w2, std=0.02)
        else:
            nn.init.zeros_(self.w2)

    def forward(self, h: Tensor) -> Tensor:
        """``(..., features) -> (..., rows)``."""
        with torch.autocast(h.device.type, enabled=False):
            wide = torch.promote_types(h.dtype, torch.float32)
            h = h.to(wide)
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
            inner = nn.functional.silu(nn.functional.linear(h, self.w1.to(wide)))
            return nn.functional.linear(inner, self.w2.to(wide), self.bias.to(wide))
