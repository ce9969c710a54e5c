"""Training the router on more than the language model loss: token labels, load balance, z-loss, as one loss term.

Per forward, over the routers that ran (one per decoder layer for scope "layer") and the real tokens::

    CE = mean over labelled tokens of -log p_{label}         balance = K·sum_k f_k P_k         z = mean (logsumexp l)^2

``f_k`` is the share of tokens sent to slot ``k``, ``P_k`` its mean probability. Each is averaged over the routers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hfplug.calls import Call
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.ledger import Ledger
from hfplug.seams.loss import LossTerm, Term
from hfplug.tuners.molora.state import LOGITS, Logits

LABELS = "adapter_labels"


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class RouterLossConfig:
    """Options of :class:`RouterLoss`; weights are relative to the language model loss. Our reading throughout."""

    weight: float = _option(1.0, "weight of the whole term")
    label_weight: float = _option(1.0, "weight of the cross-entropy with adapter_labels")
    load_balance: float = _option(1e-2, "weight of the load balance; off in batches with adapter_labels")
    z_loss: float = _option(1e-3, "weight of the squared log-partition, which keeps logits small")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{f.name}={value!r} must be finite and >= 0")


class RouterLoss(LossTerm):
    """The term: ``hfplug.losses.add(trainer, hfplug.tuners.RouterLoss(hfplug.tuners.RouterLossConfig()))``.

    A batch may hold ``adapter_labels``: ``(batch, tokens)`` int64, the expert of each token as in ``routing(adapter_ids=)``
    (0: base), -100 where there is none. The model never sees that column.
    """

    method = "molora_router"
    config_class: ClassVar[type[Any]] = RouterLossConfig
    config: RouterLossConfig

    def setup(self, model: nn.Module, stack: nn.Module, ledger: Ledger) -> None:
        """Keep the label column from the model."""

        def pop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {k: v for k, v in kwargs.items() if k != LABELS}

        ledger.hook(model, "forward_pre", pop, with_kwargs=True)

    def support(self, batch: Any) -> Tensor | None:
        """The tokens with a label if the batch has any, else its real tokens."""
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
            return None
        return _counted(batch.get(LABELS), batch.get("attention_mask"), batch["input_ids"].shape).sum()

    def compute(self, inputs: Mapping[str, Any], call: Call) -> Term:
        """The term of one forward, times the number of tokens that count."""
        found: list[Logits] = call.memo.get(LOGITS, [])
        if not found:
            if not call.grad:  # evaluation: nothing was kept
                return Term(torch.zeros(()), torch.zeros(()))
            raise UnsupportedError("molora_router: no learned router of a molora adapter ran in this forward")
        labels = inputs.get(LABELS)
        shape = (call.batch, call.length)
        if labels is not None and tuple(labels.shape) != shape:
            raise ConfigError(f"{LABELS} is {tuple(labels.shape)}, the batch is {shape}")
        counted = _counted(labels, call.attention_mask, shape)
        total: Tensor | float = 0.0
        device = found[0].logits.device
        for each in found:
            if not each.logits.requires_grad:
                raise UnsupportedError(
                    "molora_router: a router's logits have no gradient: it is frozen, or reentrant checkpointing hides it"
                )
            total = total + self._of_router(each, labels, counted.to(each.logits.device)).to(device)
        count = counted.sum().to(device)
        return Term(torch.as_tensor(total) / len(found) * count, count)

    def _of_router(self, each: Logits, labels: Tensor | None, counted: Tensor) -> Tensor:
        slots = each.config.slots
        logits = each.logits[counted] / each.config.temperature
        if not len(logits):
            return each.logits.sum() * 0
        loss = self.config.z_loss * logits.logsumexp(-1).square().mean()
        if labels is None:
            chosen = nn.functional.one_hot(each.index[counted], len(slots)).sum(-2).to(logits.dtype)
            share = chosen.mean(0) / each.index.shape[-1]
            return loss + self.config.load_balance * len(slots) * (share * logits.softmax(-1).mean(0)).sum()
        target = labels.to(logits.device)[counted]
        low, high = int(target.min()), int(target.max())
        first = 0 if each.config.null_expert else 1
        if low < first or high > len(each.config.names):
            raise ConfigError(
                f"{LABELS} go from {low} to {high}; allowed: -100 (none), {first} to {len(each.config.names)}: "
                f"{dict(enumerate(each.config.names, 1))}{', 0: base' if not first else ''}"
            )
        return loss + self.config.label_weight * nn.functional.cross_entropy(logits, target - first)


def _counted(labels: Tensor | None, mask: Any, shape: Sequence[int]) -> Tensor:
    if labels is not None:
        return labels != -100
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.bool()
    return torch.ones(tuple(shape), dtype=torch.bool)


class LabelCollator:
    """Wraps a collator that knows nothing of ``adapter_labels``: takes the column off, and pads it as it padded the ids.

    Args:
        collator: any collator that returns ``input_ids`` of ``(batch, tokens)``, one row each (no packing).
        side: where it pads, ``"right"`` or ``"left"``.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, Any]], side: str = "right") -> None:
        if side not in ("right", "left"):
            raise ConfigError(f"side={side!r} must be 'right' or 'left'")
        self.collator, self.side = collator, side

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        labels = [list(row[LABELS]) for row in rows]
        batch = self.collator([{k: v for k, v in row.items() if k != LABELS} for row in rows])
        ids = batch["input_ids"]
        padded = torch.full(ids.shape, -100, dtype=torch.int64)
        if len(rows) != ids.shape[0] or max(map(len, labels)) > ids.shape[1]:
            longest = max(map(len, labels))
            raise ConfigError(f"{LABELS}: {len(rows)} rows of up to {longest} tokens, the collator made {tuple(ids.shape)}")
        for place, row in enumerate(labels):
            values = torch.tensor(row, dtype=torch.int64)
            padded[place, : len(row)] = values
            if self.side == "left":
                padded[place] = padded[place].roll(ids.shape[1] - len(row))
        return {**batch, LABELS: padded}
