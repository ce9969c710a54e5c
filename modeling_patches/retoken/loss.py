"""The balance loss of MoRT's routers, as one loss term or by hand.

Per router, over the real tokens of a forward: ``n sum_i f_i P_i`` with ``f_i`` the share of the choices that fell on table
``i`` and ``P_i`` its mean of ``sigmoid(g_i) / sum_j sigmoid(g_j)`` over all ``n`` tables; then the mean over the layers. It is
1 when routing is uniform. The notes on the paper give ``n sum f P`` and its weight 1e-4; what ``P`` is for a sigmoid router
and the mean over layers are our reading.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hfplug.calls import Call, call_scope
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.families import unwrapped
from hfplug.ledger import Ledger
from hfplug.modeling_patches.retoken.tables import mixture
from hfplug.modeling_patches.retoken.tokens import BALANCE
from hfplug.seams.loss import LossTerm, Term


def balance(logits: Tensor, top_k: int, real: Tensor) -> Tensor:
    """``n sum_i f_i P_i``, 0-d.

    Args:
        logits: ``(batch, tokens, n)``.
        top_k: how many each token uses.
        real: ``(batch, tokens)`` bool: the tokens that count.
    """
    logits = logits[real]
    if not len(logits):
        return logits.sum() * 0
    _, experts = mixture(logits, top_k)
    share = nn.functional.one_hot(experts, logits.shape[-1]).sum(-2).to(logits.dtype).mean(0) / top_k
    mean = nn.functional.logsigmoid(logits).softmax(-1).mean(0)
    return logits.shape[-1] * (share * mean).sum()


def _of_call(call: Call, real: Tensor) -> Tensor:
    found: list[tuple[Tensor, int]] = call.memo.get(BALANCE, [])
    if not found:
        raise UnsupportedError("the balance loss of mort: no router of mort ran in this forward, or not in training mode")
    total: Any = 0.0
    for logits, top_k in found:
        if call.grad and not logits.requires_grad:
            raise UnsupportedError(
                "the balance loss of mort: a router's logits have no gradient: it is frozen, or reentrant gradient checkpointing "
                'hides it; set gradient_checkpointing_kwargs={"use_reentrant": False}'
            )
        total = total + balance(logits, top_k, real.to(logits.device)).to(found[0][0].device)
    return torch.as_tensor(total / len(found))


def _real(call: Call) -> Tensor:
    if call.attention_mask is not None:
        return call.attention_mask
    return torch.ones(call.batch, call.length, dtype=torch.bool)


def router_balance(model: nn.Module) -> Tensor:
    """The balance loss of the last training forward, 0-d, not yet weighted; add ``1e-4`` times it to the loss.

    Raises:
        UnsupportedError: the model ran no router of ``mort`` in training mode, or its gradient is hidden.
    """
    call = call_scope(unwrapped(model)).current
    if call is None:
        raise UnsupportedError("the balance loss of mort: the model has not run in training mode")
    return _of_call(call, _real(call))


@dataclasses.dataclass(frozen=True)
class RouterBalanceConfig:
    """Options of :class:`RouterBalance`."""

    weight: float = dataclasses.field(default=1e-4, metadata={"help": "relative to the language model loss"})

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight) or self.weight < 0:
            raise ConfigError(f"weight={self.weight!r} must be finite and >= 0")


class RouterBalance(LossTerm):
    """The term: ``hfplug.losses.add(trainer, RouterBalance(RouterBalanceConfig()))``."""

    method = "mort_balance"
    config_class: ClassVar[type[Any]] = RouterBalanceConfig
    config: RouterBalanceConfig

    def setup(self, model: nn.Module, stack: nn.Module, ledger: Ledger) -> None:
        """Nothing to install: the routers keep their logits in training."""

    def support(self, batch: Any) -> Tensor | None:
        """The real tokens of a batch."""
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
            return None
        mask = batch.get("attention_mask")
        ids: Tensor = batch["input_ids"]
        return torch.as_tensor(ids.numel()) if mask is None else mask.bool().sum()

    def compute(self, inputs: Mapping[str, Any], call: Call) -> Term:
        """The mean of one forward times the number of its real tokens."""
        if not call.training:  # evaluation: nothing was kept
            return Term(torch.zeros(()), torch.zeros(()))
        real = _real(call)
        value = _of_call(call, real)
        count = real.sum().to(value.device)
        return Term(value * count, count)


__all__ = ["RouterBalance", "RouterBalanceConfig", "balance", "router_balance"]
