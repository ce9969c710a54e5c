"""The surrogates of SA-DPO: nonincreasing functions of the reward difference minus the margin, ``u = beta*Delta - gamma``.

A surrogate is a dataclass whose instances map a tensor ``u`` (any shape, reward units) to losses of the same shape and dtype.
Another plugin adds one by :class:`hfplug.Extension` at the point ``surrogate`` of ``sa_dpo``; those here come the same way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hfplug import ConfigError
from hfplug.extensions import build_extension


class Surrogate(Protocol):
    """What the point ``surrogate`` takes: a dataclass of options, callable, elementwise and nonincreasing."""

    def __call__(self, u: Tensor) -> Tensor:
        """``u -> Phi(u)``, same shape."""
        ...


@dataclasses.dataclass(frozen=True)
class Logistic:
    """``-log sigmoid(u)``: DPO's. Its slope is at most 1 and never quite 0."""

    def __call__(self, u: Tensor) -> Tensor:
        """``u -> log(1 + exp(-u))``."""
        return -torch.nn.functional.logsigmoid(u)


@dataclasses.dataclass(frozen=True)
class Hinge:
    """``max(0, 1 - u)``: exactly 0 from ``u = 1`` on."""

    def __call__(self, u: Tensor) -> Tensor:
        """``u -> relu(1 - u)``."""
        return torch.relu(1 - u)


@dataclasses.dataclass(frozen=True)
class Poly:
    """``max(0, 1 - u)^power``, the polynomial hinge which the abstract ranks above the logistic for models of bounded capacity.

    The slope ``power * (1 - u)^(power - 1)`` has no bound for ``power > 1``: a hard pair with u = -20 pulls 21 times as hard
    as one with u = 0 at power 2. Clip gradients.
    """

    power: float = dataclasses.field(default=2.0, metadata={"help": "exponent, >= 1; 1 is the hinge (our reading: 2)"})

    def __post_init__(self) -> None:
        if not (math.isfinite(self.power) and self.power >= 1):
            raise ConfigError(f"power={self.power!r} must be finite and >= 1")

    def __call__(self, u: Tensor) -> Tensor:
        """``u -> relu(1 - u) ** power``."""
        short = torch.relu(1 - u)
        # 0 ** (p - 1) in the derivative of pow is 1 for p = 1, so the hinge would have a slope beyond its kink.
        return short if self.power == 1 else short**self.power


@dataclasses.dataclass(frozen=True)
class Exponential:
    """``exp(-u)``: the slope grows with the loss; overflows float32 beyond u = -88."""

    def __call__(self, u: Tensor) -> Tensor:
        """``u -> exp(-u)``."""
        return torch.exp(-u)


def surrogate(name: str, **options: Any) -> Surrogate:
    """Build a surrogate by name: ``surrogate("poly", power=3)``.

    Raises:
        ConfigError: no plugin offers this name, or an option it does not have (naming the nearest).
    """
    built: Surrogate = build_extension("sa_dpo", "surrogate", name, options)
    if not callable(built):
        raise ConfigError(f"surrogate={name!r}: {type(built).__name__} is not callable; it has to map a tensor to losses")
    return built


def pair_losses(phi: Surrogate, rewards: Tensor, margins: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The loss of each pair: ``(1 - e) Phi(r - gamma) + e Phi(-r - gamma)``.

    Args:
        phi: the surrogate.
        rewards: ``beta * Delta``, ``(n,)``: the implicit reward of the chosen response minus that of the rejected.
        margins: ``gamma``, ``(n,)`` or 0-d, reward units.
        label_smoothing: e, the share of labels taken to be flipped. A flipped pair needs the same margin the other way
            (our reading: the form TRL gives its ``aot`` losses).
    """
    losses = phi(rewards - margins)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses + label_smoothing * phi(-rewards - margins)
    return losses


def margin_capacity_profile(phi: Surrogate, capacity: float, margins: Sequence[float]) -> list[float]:
    """``Phi(B - gamma)``: the least loss at each margin that a model of ``|beta * Delta| <= B`` can reach.

    The form in which the abstract's "Margin-Capacity Profile" can be computed (our reading): hinge and poly reach exactly 0
    while ``capacity - margin >= 1``; the logistic and exponential surrogates stay above 0 for every capacity.

    Args:
        phi: the surrogate, nonincreasing.
        capacity: B, reward units, >= 0.
        margins: gammas, reward units.

    Raises:
        ConfigError: a capacity below 0 or not finite.
    """
    if not (math.isfinite(capacity) and capacity >= 0):
        raise ConfigError(f"capacity={capacity!r} must be finite and >= 0: a bound of |beta * Delta| in reward units")
    found: list[float] = phi(capacity - torch.tensor([float(m) for m in margins], dtype=torch.float64)).tolist()
    return found
