"""One road for metrics of losses and callbacks into ``log_history``, trainer_state.json and every tracker.

A metric added in a callback's own ``on_log`` is too late: ``Trainer.log`` has copied the dict into ``log_history`` already
and the ``report_to`` callbacks, which come first in the list, have sent it. So metrics wait as sums and counts on the
trainer's ``TrainerState``, and a relay registered in ``transformers.trainer.DEFAULT_CALLBACKS`` (which run before every
``report_to`` callback) puts them into both places, once per logging step. Sums and counts make the figure independent of
how a window was cut into micro-batches, and are added up over ranks.
"""

from __future__ import annotations

import functools
import numbers
from typing import Any, Literal

from hfplug.errors import ConfigError, nearest
from hfplug.ledger import Ledger

_ATTRIBUTE = "_hfplug_metrics"  # not a dataclass field, so it never reaches trainer_state.json
_FOLD = 64  # rows kept of one metric before they are added up
Mode = Literal["train", "eval"]


class PendingMetrics:
    """Sums and counts waiting for the next logging step of one trainer.

    Attributes:
        relayed: whether the relay stands in this trainer's list of callbacks, known from the first log on.
    """

    def __init__(self) -> None:
        self._pending: dict[Mode, dict[str, list[tuple[Any, Any]]]] = {"train": {}, "eval": {}}
        self.relayed = False

    def add(self, name: str, total: Any, count: Any = 1, mode: Mode = "train") -> None:
        """Add to a metric; the logged value is ``sum(total) / sum(count)`` over the window and all ranks.

        Args:
            name: key as logged; eval metrics get the prefix of the evaluation (``eval_``) in front.
            total: number or 0-d tensor; copied, kept on its device, added up in float64 at logging time or earlier.
            count: number or 0-d tensor: what ``total`` is a sum over (tokens, sequences, or 1 for a plain mean).

        Raises:
            ConfigError: ``mode``, or a ``total`` or ``count`` that is not one number. Raised here, where the caller can
                handle it: at logging time the error would end the training.
        """
        if mode not in self._pending:
            raise ConfigError(f"metric {name!r}: mode={mode!r} is not one of {list(self._pending)}{nearest(mode, self._pending)}")
        rows = self._pending[mode].setdefault(name, [])
        rows.append((_scalar(name, "total", total), _scalar(name, "count", count)))
        if len(rows) >= _FOLD:
            # An evaluation may add millions of times before it logs. Folding seldom keeps the device from being waited for.
            rows[:] = [(sum(float(t) for t, _ in rows), sum(float(c) for _, c in rows))]

    def drain(self, mode: Mode) -> dict[str, float]:
        """Return and forget the metrics of a mode, reduced over the window and over all ranks.

        Every rank must call it at the same time (``Trainer.log`` runs on all of them).
        """
        pending, self._pending[mode] = self._pending[mode], {}
        sums = {n: (sum(float(t) for t, _ in rows), sum(float(c) for _, c in rows)) for n, rows in pending.items()}
        return {name: total / count for name, (total, count) in _over_ranks(sums).items() if count}

    def __bool__(self) -> bool:
        return any(self._pending.values())


def _scalar(name: str, role: str, value: Any) -> Any:
    if hasattr(value, "detach"):
        if value.numel() != 1:
            raise ConfigError(f"metric {name!r}: {role} of shape {tuple(value.shape)} is not a single number; reduce it first")
        # A copy: the caller may go on to change its accumulator in place, and a view would pin all of its base in memory.
        return value.detach().clone()
    if not isinstance(value, numbers.Real):
        raise ConfigError(f"metric {name!r}: {role}={value!r} ({type(value).__name__}) is not a number or a tensor of one number")
    return value


def _over_ranks(sums: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return sums
    # As objects: a rank whose shard had nothing to count lacks the key, and a tensor reduction would then mix metrics up.
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sums)
    out: dict[str, tuple[float, float]] = {}
    for part in gathered:
        for name, (total, count) in part.items():
            former = out.get(name, (0.0, 0.0))
            out[name] = (former[0] + total, former[1] + count)
    return out


def metrics_of(state: Any) -> PendingMetrics:
    """The pending metrics of a trainer, by its ``TrainerState`` (``trainer.state``, or the ``state`` a callback gets)."""
    found = vars(state).get(_ATTRIBUTE)
    if found is None:
        found = PendingMetrics()
        object.__setattr__(state, _ATTRIBUTE, found)
    return found


def add_totals(state: Any, model: Any) -> None:
    """Log what the modules of a model say of themselves: ``module.hfplug_totals()`` (name -> number), summed over modules."""
    totals: dict[str, float] = {}
    for module in model.modules():
        own = getattr(module, "hfplug_totals", None)
        for name, value in (own() if own is not None else {}).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    for name, total in totals.items():
        metrics_of(state).add(name, total)


def deliver(state: Any, logs: dict[str, Any]) -> bool:
    """Move the pending metrics that belong to this log entry into ``logs`` and the last entry of ``log_history``.

    Returns whether anything was delivered.
    """
    mode, prefix = _entry_of(logs)
    if mode is None:
        return False
    found = {prefix + name: value for name, value in metrics_of(state).drain(mode).items()}
    logs.update(found)
    if state.log_history and found:
        state.log_history[-1].update(found)
    return bool(found)


def _entry_of(logs: dict[str, Any]) -> tuple[Mode | None, str]:
    # A training entry has "loss"; an evaluation entry has "<prefix>_runtime"; the closing summary and whatever a user
    # logs by hand have neither, and must not swallow a window.
    if "loss" in logs:
        return "train", ""
    for key in logs:
        if key.endswith("_runtime") and key != "train_runtime":
            return "eval", key.removesuffix("runtime")
    return None, ""


@functools.cache
def relay_class() -> type[Any]:
    """The callback that delivers; built on demand because its base class is in transformers."""
    from transformers.trainer_callback import TrainerCallback

    class MetricsRelay(TrainerCallback):
        """Delivers hfplug metrics before any tracker sees the log."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
            metrics_of(state).relayed = True
            if logs is not None:
                if "loss" in logs and kwargs.get("model") is not None:
                    add_totals(state, kwargs["model"])
                deliver(state, logs)

        def on_predict(self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
            # predict() writes no log entry: what it counted belongs to its own metrics, not to the next evaluation.
            if metrics is not None:
                mode, prefix = _entry_of(metrics)
                if mode == "eval":
                    metrics.update({prefix + name: value for name, value in metrics_of(state).drain(mode).items()})

    return MetricsRelay


def activate(ledger: Ledger) -> None:
    """Add the relay to the callbacks every ``Trainer`` starts with."""
    import transformers.trainer

    ledger.append(transformers.trainer.DEFAULT_CALLBACKS, relay_class())
