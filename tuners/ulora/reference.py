"""U-LoRA written out token by token in float64: slow and obvious; the layer is tested against it."""

from __future__ import annotations

import torch


def utilisation(
    z: torch.Tensor,
    token: torch.Tensor,
    context: torch.Tensor,
    bias: torch.Tensor,
    *,
    gate_range: float,
    eps: float,
    ema: torch.Tensor,
    ema_weight: float,
    valid: torch.Tensor | None = None,
    restarts: torch.Tensor | None = None,
    bidirectional: bool = False,
) -> torch.Tensor:
    """Utilisation ``(batch, tokens, r)`` in float64 of the codes ``z`` ``(batch, tokens, r)``."""
    z, token, context, bias, ema = (t.double() for t in (z, token, context, bias, ema))
    batch, length, _ = z.shape
    out = torch.ones_like(z)
    for row in range(batch):
        hats = [z[row, t] / (z[row, t].square().mean().sqrt() + eps) for t in range(length)]
        again = [] if restarts is None else restarts[row % restarts.shape[0]].nonzero().flatten().tolist()
        starts = [0, *again]
        for t in range(length):
            start = max(s for s in starts if s <= t)
            stop = t + 1
            if bidirectional:
                stop = min([s for s in starts if s > t], default=length)
            seen = [hats[i] for i in range(start, stop) if valid is None or bool(valid[row, i])]
            mean = torch.stack(seen).mean(0) if seen else torch.zeros_like(hats[0])
            p, q = token @ hats[t], context @ mean + bias
            u = 2 * torch.sigmoid(q + gate_range * torch.tanh(p))
            out[row, t] = u + ema_weight * (ema - u)
    return out
