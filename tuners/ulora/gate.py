"""The gate: utilisation of each direction for each token, from its code and the mean code of its context."""

from __future__ import annotations

import torch
from torch import nn


def normalised(z: torch.Tensor, eps: float) -> torch.Tensor:
    """``z / (rms(z) + eps)`` over the last dimension, so that the gate does not depend on the scale of ``A``.

    A code of exact zeros (a padding token whose embedding is zero) has the gradient ``1 / eps``, not the NaN of ``sqrt`` at 0.
    """
    return z / (z.square().mean(-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny).sqrt() + eps)


def context_mean(
    code: torch.Tensor,
    valid: torch.Tensor | None,
    restarts: torch.Tensor | None,
    past: tuple[torch.Tensor, torch.Tensor] | None,
    bidirectional: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean of the codes each token may see.

    Args:
        code: ``(batch, tokens, r)``.
        valid: ``(batch, tokens)`` bool, or ``None`` when every token is real; others are left out.
        restarts: ``(batch or 1, tokens)`` bool, true where a new document begins; the mean starts again there.
        past: sum ``(batch, r)`` and count ``(batch, 1)`` of the tokens before this chunk.
        bidirectional: the mean over the whole chunk instead of the tokens so far.

    Returns:
        the mean ``(batch, tokens, r)``, and sum and count at the end of the chunk, to be ``past`` of the next one.
    """
    weight = torch.ones_like(code[..., :1]) if valid is None else valid.unsqueeze(-1).to(code.dtype)
    masked = code if valid is None else code * weight
    if restarts is not None:
        # A difference of running sums loses digits over a long pack; double precision keeps documents independent.
        total, count = _segment_sums(masked.double(), weight.double(), restarts, bidirectional)
        total, count = total.to(code.dtype), count.to(code.dtype)
    elif bidirectional:
        total, count = masked.sum(1, keepdim=True).expand_as(masked), weight.sum(1, keepdim=True).expand_as(weight)
    else:
        total, count = masked.cumsum(1), weight.cumsum(1)
    if past is not None:
        reach = 1.0 if restarts is None else (restarts.cumsum(1) == 0).unsqueeze(-1).to(code.dtype)
        total, count = total + past[0].unsqueeze(1) * reach, count + past[1].unsqueeze(1) * reach
    return total / count.clamp(min=1), total[:, -1], count[:, -1]


def _segment_sums(
    masked: torch.Tensor, weight: torch.Tensor, restarts: torch.Tensor, bidirectional: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    length = masked.shape[1]
    index = torch.arange(length, device=masked.device)
    first = torch.where(restarts, index, 0).cummax(1).values.expand(masked.shape[0], length)
    out = []
    for values in (masked, weight):
        before = torch.cat([torch.zeros_like(values[:, :1]), values.cumsum(1)], dim=1)  # sums of the tokens before each
        at_first = before.gather(1, first.unsqueeze(-1).expand_as(values))
        end = index + 1
        if bidirectional:  # the end of a document is where the next one begins
            starts = torch.where(restarts, index, length)
            following = starts.roll(-1, 1)
            following[:, -1] = length
            end = following.flip(1).cummin(1).values.flip(1).expand(masked.shape[0], length).unsqueeze(-1)
            out.append(before.gather(1, end.expand_as(values)) - at_first)
        else:
            out.append(before[:, 1:] - at_first)
    return out[0], out[1]


class Gate(nn.Module):
    """``u = 2·sigmoid(q + gate_range·tanh(p))`` in ``(0, 2)^r``; all zeros at the start, so ``u = 1`` exactly.

    Parameters: ``token`` ``(r, r)`` (or ``(r, d)`` for ``gate_input="hidden"``), ``context`` ``(r, r)``, ``bias`` ``(r,)``:
    ``2r² + r`` per module.
    """

    def __init__(self, r: int, token_features: int, gate_range: float) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(r, token_features))
        self.context = nn.Parameter(torch.zeros(r, r))
        self.bias = nn.Parameter(torch.zeros(r))
        self.gate_range = gate_range

    def forward(self, token: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Utilisation ``(batch, tokens, r)`` from the token's features and the context's mean code."""
        dtype = token.dtype
        p = nn.functional.linear(token, self.token.to(dtype))
        q = nn.functional.linear(context, self.context.to(dtype), self.bias.to(dtype))
        return 2 * torch.sigmoid(q + self.gate_range * torch.tanh(p))
