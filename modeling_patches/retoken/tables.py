"""Tables of vectors by token id, and what is made of their rows: a gate (ReToken) or a routed sum (MoRT)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hfplug.modelpatch import PatchModule
from hfplug.optimization import OptimizerGroup

Norm = Literal["l2", "rms"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that norms and products are computed in: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def normalised(rows: Tensor, norm: Norm, eps: float) -> Tensor:
    """``Norm(u) = u / (‖u‖₂ + eps)``, or with ``"rms"`` the same times ``sqrt(width)``; in at least fp32.

    Args:
        rows: ``(..., width)``.
    """
    rows = rows.to(wide(rows.dtype))
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / (length / rows.shape[-1] ** 0.5 + eps) if norm == "rms" else rows / (length + eps)


def _first_values(weight: Tensor, std: float, seed: int) -> None:
    # A generator of its own: two processes that build the same model get the same tables, whatever they drew before.
    generator = None if weight.is_meta else torch.Generator(weight.device).manual_seed(seed)
    nn.init.normal_(weight, std=std, generator=generator)


class TokenTable(PatchModule):
    """Rows of ``width`` values.

    Args:
        rows, width: shape.
        std: of the first values, which are normal.
        seed: of the first values.
        like: a tensor with the device and dtype to use.
        sparse: whether gradients are sparse tensors that hold the rows of the batch alone.
        offload: whether the table stays in host memory when the model moves to an accelerator.
    """

    def __init__(self, rows: int, width: int, std: float, seed: int, like: Tensor, sparse: bool, offload: bool) -> None:
        super().__init__()
        self.rows, self.std, self.seed, self.sparse, self.offload = rows, std, seed, sparse, offload
        device = "cpu" if offload and not like.is_meta else like.device
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=like.dtype, device=device))
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Shape and where it is."""
        return f"{self.rows}, {self.weight.shape[-1]}, sparse={self.sparse}, offload={self.offload}"

    def reset_parameters(self) -> None:
        """Normal values."""
        _first_values(self.weight, self.std, self.seed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TokenTable:
        if not self.offload:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

        def stay(tensor: Tensor) -> Tensor:
            probe = fn(tensor.new_empty(0))  # what the move would do, without moving the table
            if probe.device == tensor.device:
                return fn(tensor)
            if probe.is_meta or tensor.is_meta:
                return torch.empty_like(tensor, dtype=probe.dtype, device="meta" if probe.is_meta else "cpu")
            return tensor.to("cpu", probe.dtype)

        return super()._apply(stay, recurse)  # type: ignore[no-untyped-call]

    def optimizer_groups(self) -> list[OptimizerGroup]:
        """No weight decay: it would shrink rare rows at every step, and a row's length means nothing."""
        return [OptimizerGroup((self.weight,), weight_decay=0.0)]

    def forward(self, rows: Tensor, known: Tensor | None = None, made: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Look rows up.

        Args:
            rows: ``(...)`` int64.
            known: ``(...)`` bool, false where the row does not count; ``None``: all do.
            made: what to make of all rows before; it runs in here, since ZeRO-3 and accelerate's offloading fetch the weight
                for this forward alone. Dense tables only.

        Returns:
            ``(..., width)`` on the device of ``rows``; any values where a row does not count.
        """
        if made is not None:
            return nn.functional.embedding(rows, made(self.weight))
        at = rows.to(self.weight.device)
        if known is None or not self.sparse:
            return nn.functional.embedding(at, self.weight, sparse=self.sparse).to(rows.device)
        # A sparse gradient names its rows: a row that does not count must not be among them.
        known = known.to(at.device)
        found = self.weight.new_zeros(*at.shape, self.weight.shape[1])
        found = found.masked_scatter(known[..., None], nn.functional.embedding(at[known], self.weight, sparse=True))
        return found.to(rows.device)


class Scaled(PatchModule):
    """Base: a scale ``s`` of ``(hidden,)``, 0 at first, times the normalised rows of a table.

    With ``rank`` the rows come as codes ``(..., rank)`` from a table that all layers share, and this layer's basis makes
    vectors of the hidden size of them.

    Args:
        like: ``(hidden,)``, for width, device and dtype.
        table: this layer's own table, or ``None``.
        bases: number of bases of ``(rank, hidden)``.
        rank: width of the shared codes; 0: none.
    """

    def __init__(self, like: Tensor, table: TokenTable | None, bases: int, rank: int, norm: Norm, eps: float, seed: int) -> None:
        super().__init__()
        self.norm: Norm = norm
        self.eps, self.seed, self.rank, self.bases = eps, seed, rank, bases
        self.scale = nn.Parameter(torch.empty_like(like, requires_grad=False))
        self.table = table
        if rank:
            self.basis = nn.Parameter(torch.empty(bases * rank, like.shape[0], dtype=like.dtype, device=like.device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale 0: the model is what it was, bit for bit."""
        nn.init.zeros_(self.scale)
        if self.rank:
            _first_values(self.basis, self.rank**-0.5, self.seed)

    def optimizer_groups(self) -> list[OptimizerGroup]:
        """No weight decay on the scale, which is what learns first."""
        return [OptimizerGroup((self.scale,), weight_decay=0.0)]

    def scaled(self, vectors: Tensor) -> Tensor:
        """``s ⊙ Norm(vectors)``, in at least fp32."""
        return self.scale * normalised(vectors, self.norm, self.eps)


class Gate(Scaled):
    """ReToken: ``p = 1 + s ⊙ Norm(E[x])``."""

    def forward(self, rows: Tensor, known: Tensor | None, codes: Tensor | None) -> Tensor:
        """``p`` of ``(..., hidden)``, in at least fp32; 1 where a token has no row.

        Args:
            rows: ``(...)`` int64.
            known: ``(...)`` bool, or ``None``: all.
            codes: ``(..., rank)``, with ``rank`` only.
        """
        if self.table is None:
            assert codes is not None
            codes = codes.to(wide(codes.dtype))
            gate = 1 + self.scaled(codes @ self.basis.to(codes.dtype))
        elif rows.numel() >= self.table.rows and not (self.table.sparse or self.table.offload):
            # More tokens than rows: the norms are taken of the rows, once each, and not of the tokens.
            gate = self.table(rows, made=lambda weight: 1 + self.scaled(weight))
        else:
            gate = 1 + self.scaled(self.table(rows, known))
        return gate if known is None else gate.masked_fill(~known[..., None], 1.0)


class Router(PatchModule):
    """``g = RMSNorm(h) R``, of ``(..., experts)``, in at least fp32; the norm has no weight, which ``R`` would take up."""

    def __init__(self, like: Tensor, experts: int, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.weight = nn.Parameter(torch.empty(experts, like.shape[0], dtype=like.dtype, device=like.device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """``N(0, 0.02)``."""
        _first_values(self.weight, 0.02, self.seed)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits.

        Args:
            hidden: ``(..., hidden)``, what the layer is given.
        """
        hidden = hidden.to(wide(hidden.dtype))
        hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden, self.weight.to(hidden.dtype))


def mixture(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """``(weights, experts)``, each ``(..., top_k)``: ``w_i = sigmoid(g_i) / sum over the chosen of sigmoid(g_j)``.

    The quotient is a softmax of the log-sigmoids, which does not end in 0 / 0 when all logits are far below 0.
    """
    best, experts = logits.topk(top_k, dim=-1)
    return nn.functional.logsigmoid(best).softmax(-1), experts


class RoutedSum(Scaled):
    """MoRT: ``dr = (2 N)^-1/2 · s ⊙ Norm(sum_i w_i E_i[x])``, with ``N`` layers."""

    def __init__(self, *args: Any, top_k: int, depth: int) -> None:
        super().__init__(*args)
        self.top_k, self.factor = top_k, (2 * depth) ** -0.5

    def forward(self, rows: Tensor, known: Tensor | None, codes: Tensor | None, logits: Tensor) -> Tensor:
        """``dr`` of ``(..., hidden)``, in at least fp32; 0 where a token has no row.

        Args:
            rows: ``(...)`` int64.
            known: ``(...)`` bool, or ``None``: all.
            codes: ``(..., rank)``, with ``rank`` only.
            logits: ``(..., experts)``.
        """
        weights, experts = mixture(logits, self.top_k)
        if self.table is None:
            assert codes is not None
            codes = codes.to(wide(codes.dtype))
            spread = torch.zeros_like(logits).scatter(-1, experts, weights).to(codes.dtype)
            vectors = (spread[..., None] * codes[..., None, :]).flatten(-2) @ self.basis.to(codes.dtype)
        else:
            size = self.table.rows // self.bases
            of_all = None if known is None else known[..., None].expand(experts.shape)
            found = self.table(experts * size + rows[..., None], of_all)
            vectors = (weights[..., None] * found.to(wide(found.dtype))).sum(-2)
        added = self.factor * self.scaled(vectors)
        return added if known is None else added.masked_fill(~known[..., None], 0.0)


__all__ = ["Gate", "Norm", "RoutedSum", "Router", "Scaled", "TokenTable", "mixture", "normalised", "wide"]
