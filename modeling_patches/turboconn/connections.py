"""The projections of one target layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfplug.modelpatch import PatchModule

EPS = 1e-6


class Connections(PatchModule):
    """``hidden + gain * sum_s D_s(state_s)`` of the connections that end in one layer.

    ``D_s`` is ``weight_<s>`` ``(d, d)``, or ``up_<s> @ down_<s>`` of ``(d, rank)`` and ``(rank, d)``. ``weight`` and ``up``
    start at 0, so the sum does. They are the layer's own parameters: the unit of FSDP and ZeRO that holds the layer holds
    them, and ``modules_to_save=["turboconn"]`` of PEFT finds them.

    Args:
        sources: indices of the layers whose states come in.
        width: size of the hidden states ``d``.
        rank: of every ``D_s``; ``None``: full.
        gain: the factor, no parameter.
        normalize: divide each state by its root mean square first (our reading; the states of upper layers are large).
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        sources: Sequence[int],
        width: int,
        *,
        rank: int | None = None,
        gain: float = 1.0,
        normalize: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sources, self.width, self.rank, self.gain, self.normalize = tuple(sources), width, rank, gain, normalize
        for source in self.sources:
            shapes = {"weight": (width, width)} if rank is None else {"down": (rank, width), "up": (width, rank)}
            for name, shape in shapes.items():
                self.register_parameter(f"{name}_{source}", nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    def extra_repr(self) -> str:
        """What it prints as."""
        return f"sources={list(self.sources)}, width={self.width}, rank={self.rank}, gain={self.gain}"

    def reset_parameters(self) -> None:
        """``weight`` and ``up`` 0, ``down`` normal with variance ``1 / d``."""
        for name, parameter in self.named_parameters():
            if name.startswith("down_"):
                nn.init.normal_(parameter, std=self.width**-0.5)
            else:
                nn.init.zeros_(parameter)

    @property
    def silent(self) -> bool:
        """Whether every ``D_s`` is known to be 0; of weights that stand elsewhere (ZeRO-3, offloading) nothing is known."""
        final = "weight" if self.rank is None else "up"
        for source in self.sources:
            value: Any = self.get_parameter(f"{final}_{source}").detach()
            if value.is_meta or value.numel() == 0:
                return False
            if bool((value.full_tensor() if hasattr(value, "full_tensor") else value).any()):
                return False
        return True

    def forward(self, hidden: Tensor, states: Sequence[Tensor]) -> Tensor:
        """Hidden states with the feedback added.

        Args:
            hidden: ``(batch, tokens, d)``, the output of the layer.
            states: for each source ``(batch, tokens, d)``, its state ``group_size`` tokens earlier; 0 where there is none.
        """
        linear, total = nn.functional.linear, None
        for source, state in zip(self.sources, states, strict=True):
            inner = state.to(hidden.device)
            if self.normalize:
                inner = nn.functional.rms_norm(inner.float(), (self.width,), eps=EPS).to(inner.dtype)
            if self.rank is None:
                found = linear(inner, self.get_parameter(f"weight_{source}"))
            else:
                found = linear(linear(inner, self.get_parameter(f"down_{source}")), self.get_parameter(f"up_{source}"))
            total = found if total is None else total + found
        if total is None:
            return hidden
        return torch.add(hidden, total, alpha=self.gain) if total.dtype == hidden.dtype else hidden + self.gain * total


__all__ = ["Connections"]
