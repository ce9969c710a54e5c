"""How a tuner takes part in optimisation: parameter groups of its own, and a word before and after every optimizer step.

Both work in the ``Trainer``, under accelerate and in a hand-written loop alike, because they hang on torch's optimizers and
not on a trainer.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from hfplug.errors import ConfigError
from hfplug.ledger import Ledger

_REGROUPED = "_hfplug_regrouped"


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters of a tuner that want their own learning rate or weight decay.

    Attributes:
        parameters: the parameters.
        lr_multiplier: their learning rate divided by the run's.
        weight_decay: replaces the run's when not ``None``.
    """

    parameters: tuple[nn.Parameter, ...]
    lr_multiplier: float = 1.0
    weight_decay: float | None = None


def optimizer_groups(model: Any) -> list[OptimizerGroup]:
    """The groups the tuner layers of a model ask for (``layer.optimizer_groups()``), equal settings joined."""
    joined: dict[tuple[float, float | None], list[nn.Parameter]] = {}
    for module in model.modules():
        own: Any = getattr(module, "optimizer_groups", tuple)
        for group in own():
            trainable = [p for p in group.parameters if p.requires_grad]
            joined.setdefault((group.lr_multiplier, group.weight_decay), []).extend(trainable)
    return [OptimizerGroup(tuple(p), lr, decay) for (lr, decay), p in joined.items() if p]


def apply_optimizer_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Move the parameters :func:`optimizer_groups` names into groups of their own, in place. Call it before the first step.

    Raises:
        ConfigError: the optimizer has taken a step already, or does not hold the parameters.
    """
    if getattr(optimizer, _REGROUPED, False):
        return optimizer  # a second time would multiply the rates again
    if optimizer.state:
        raise ConfigError("apply_optimizer_groups: the optimizer has state already; regroup it before the first step")
    for wanted in optimizer_groups(model):
        ids = {id(p) for p in wanted.parameters}
        taken: dict[int, list[nn.Parameter]] = {}
        for index, group in enumerate(optimizer.param_groups):
            taken[index] = [p for p in group["params"] if id(p) in ids]
            group["params"] = [p for p in group["params"] if id(p) not in ids]
        if sum(map(len, taken.values())) != len(ids):
            raise ConfigError("apply_optimizer_groups: the optimizer does not hold all trainable parameters of the adapter")
        for index, params in taken.items():
            if params:
                base = {k: v for k, v in optimizer.param_groups[index].items() if k != "params"}
                decay = {} if wanted.weight_decay is None else {"weight_decay": wanted.weight_decay}
                optimizer.add_param_group({**base, **decay, "lr": base["lr"] * wanted.lr_multiplier, "params": params})
    optimizer.param_groups[:] = [g for g in optimizer.param_groups if g["params"]]
    setattr(optimizer, _REGROUPED, True)
    return optimizer


def use_optimizer_groups(trainer: Any) -> Ledger:
    """Make a stock ``Trainer`` build its optimizer with the tuner's groups: one line, before ``train()``."""
    if trainer.optimizer is not None:
        if trainer.lr_scheduler is not None and optimizer_groups(trainer.model):
            raise ConfigError(
                "the trainer was given an optimizer and a scheduler, which knows its groups already: call "
                "hfplug.tuners.apply_optimizer_groups(optimizer, model) before the scheduler is made"
            )
        apply_optimizer_groups(trainer.optimizer, trainer.model)
        return Ledger("optimizer_groups")
    stock, ledger = trainer.create_optimizer, Ledger("optimizer_groups")
    if getattr(stock, _REGROUPED, False):
        return ledger

    @functools.wraps(stock)
    def create_optimizer(*args: Any, **kwargs: Any) -> Any:
        fresh = trainer.optimizer is None  # a second train() comes here with the optimizer of the first
        optimizer = stock(*args, **kwargs)
        if fresh:
            apply_optimizer_groups(optimizer, trainer.model)
        return optimizer

    setattr(create_optimizer, _REGROUPED, True)
    ledger.set_attr(trainer, "create_optimizer", create_optimizer)
    return ledger


@runtime_checkable
class Preparable(Protocol):
    """A tuner layer that wants to see the trainer before training begins."""

    def prepare_training(self, trainer: Any) -> None:
        """Read what the layer needs to know of the run; called once for each layer."""


def prepare(trainer: Any) -> Ledger:
    """Ready a stock ``Trainer`` for the tuner of its model: one line, before ``train()``.

    The tuner's parameter groups are used (:func:`use_optimizer_groups`), and its layers read off the trainer what they need
    (the number of training tokens, for a tuner that weighs a prior against the data).

    Returns:
        the ledger of what was changed on the trainer; its ``undo()`` takes the groups back.
    """
    for module in trainer.model.modules():
        if isinstance(module, Preparable):
            module.prepare_training(trainer)
    return use_optimizer_groups(trainer)


_step_watchers: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_optimizer_steps(watcher: Any) -> None:
    """Tell ``watcher`` of every step of every torch optimizer, for as long as it lives.

    Called, where it has them: ``before_optimizer_step(optimizer, ids)``, when the gradients are complete (accumulated,
    reduced, unscaled, clipped), and ``after_optimizer_step(ids)``. ``ids`` are the ``id`` of the parameters that optimizer
    holds. A step skipped by a gradient scaler is no step. On all ranks at the same time.
    """
    _step_watchers.add(watcher)


def follow_steps(ledger: Ledger) -> None:
    """Hang the two hooks on torch's optimizers."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    ledger.run(lambda: register_optimizer_step_pre_hook(_before_step), lambda handle: handle.remove())
    ledger.run(lambda: register_optimizer_step_post_hook(_after_step), lambda handle: handle.remove())


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    if closure is None or not _step_watchers:
        _tell("before_optimizer_step", optimizer, optimizer)
        return None

    def with_word() -> Any:
        loss = closure()  # only now are the gradients complete
        _tell("before_optimizer_step", optimizer, optimizer)
        return loss

    if len(args) > 1:
        return (args[0], with_word, *args[2:]), kwargs
    return args, {**kwargs, "closure": with_word}


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    skipped = getattr(optimizer, "found_inf", None)  # a fused optimizer is told by the scaler to skip by itself
    if skipped is None or not bool(skipped):
        _tell("after_optimizer_step", optimizer)


def _tell(moment: str, optimizer: torch.optim.Optimizer, *what: Any) -> None:
    told = [getattr(watcher, moment) for watcher in list(_step_watchers) if hasattr(watcher, moment)]
    if told:
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for each in told:
            each(*what, ids)
