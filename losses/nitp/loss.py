"""The NITP term (arXiv 2605.24956).

With ``h_t`` the last hidden state (after the final norm), ``z_t`` the hidden state after the first ``k`` decoder layers of
the same forward, and ``P`` a two-layer SwiGLU projector that is thrown away after training::

    L_NITP = mean_t [ 1 - cos(P(h_t), stopgrad(z_{t+1})) ],      L = L_NTP + weight * L_NITP
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hfplug import ConfigError, Ledger
from hfplug.calls import Call
from hfplug.losses.nitp.config import NITPConfig
from hfplug.positions import batch_pairs, decoder_layers, token_pairs
from hfplug.seams.loss import LossTerm, Term


class SwiGLUProjector(nn.Module):
    """``down(silu(gate(h)) * up(h))``: gate and up are d -> multiple * d, down the way back; 12 d² weights at multiple 4.

    No biases; ``nn.Linear``'s initialisation (our reading, the paper gives none).
    """

    def __init__(self, size: int, multiple: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(size, multiple * size, bias=False)
        self.up = nn.Linear(size, multiple * size, bias=False)
        self.down = nn.Linear(multiple * size, size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """``(n, d) -> (n, d)``, in the dtype of the weights unless autocast says otherwise."""
        hidden = hidden.to(self.gate.weight.dtype)
        out: Tensor = self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))
        return out


def cosine_distance(predicted: Tensor, target: Tensor, eps: float) -> Tensor:
    """``1 - cos`` of the rows of two ``(n, d)`` tensors, in float32 (float64 stays): ``(n,)``, each in [0, 2].

    A norm below ``eps`` counts as ``eps``, so a zero vector has distance 1.
    """
    wide = torch.promote_types(torch.float32, predicted.dtype)
    predicted, target = predicted.to(wide), target.to(wide)
    norms = predicted.norm(dim=-1).clamp(min=eps) * target.norm(dim=-1).clamp(min=eps)
    return 1 - (predicted * target).sum(-1) / norms


class NITPLoss(LossTerm):
    """Next implicit token prediction as a loss term; see the module's text."""

    method = "nitp"
    config_class = NITPConfig
    config: NITPConfig

    def setup(self, model: nn.Module, stack: nn.Module, ledger: Ledger) -> nn.Module:
        """Capture both hidden states and build the projector."""
        layers = decoder_layers(stack)
        k = self.config.layer if self.config.layer is not None else max(1, round(0.2 * len(layers)))
        if k > len(layers):
            raise ConfigError(f"nitp: layer={k} is not one of the decoder layers of {type(stack).__name__}, 1 to {len(layers)}")
        self.capture(ledger, layers[k - 1], "early", detach=True)
        self.capture(ledger, stack, "last")
        config: Any = stack.config
        self.projector = SwiGLUProjector(config.get_text_config().hidden_size, self.config.hidden_multiple)
        return self.projector

    def compute(self, inputs: Mapping[str, Any], call: Call) -> Term:
        """The summed distance over the pairs of this forward."""
        last, early = self.captured(call, "last"), self.captured(call, "early")
        pairs = token_pairs(call, inputs, self.config.pairs, last.device)
        # Only what counts goes through the projector: with completion-only labels that is a fraction of the positions.
        predicted, target = self.projector(last[:, :-1][pairs]), early.to(last.device)[:, 1:][pairs]
        return Term(cosine_distance(predicted, target, self.config.eps).sum(), pairs.sum())

    def support(self, batch: Any) -> Tensor | None:
        """Number of pairs in a batch."""
        return batch_pairs(batch, self.config.pairs)

    def weight(self, state: Any) -> float:
        """Lambda, from ``start_step`` on."""
        return self.config.weight if state.global_step >= self.config.start_step else 0.0
