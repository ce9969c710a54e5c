"""Returns of rollouts and the weights they get; plain numbers, no torch.

Authors' code (the formulas), with the order of operations fixed here: penalties are added to the discounted return, weights
are normalised over all rollouts of a prompt, and only then bounded.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from hfplug.errors import ConfigError


def discounted_return(rewards: Sequence[float], gamma: float = 0.9) -> float:
    """``sum_t gamma^(t-1) r_t`` over the turns of one rollout, the first turn undiscounted.

    Raises:
        ConfigError: a reward is no finite number, or ``gamma`` is not in [0, 1].
    """
    if not 0 <= number(gamma, "gamma") <= 1:
        raise ConfigError(f"gamma={gamma!r} must be in [0, 1]")
    return math.fsum(gamma**t * number(reward, f"rewards[{t}]") for t, reward in enumerate(rewards))


def repeat_penalty(answers: Sequence[str], coefficient: float = 0.5) -> float:
    """``-coefficient * (1 - n_new / n_turns)``: what a rollout loses for giving the same answer again, or none.

    Args:
        answers: the normalised answer of each turn, ``""`` or ``None`` where none was found; ``n_new`` counts the distinct
            ones that are not empty. An empty list (answers are not known) costs nothing.
        coefficient: >= 0.
    """
    if number(coefficient, "coefficient") < 0:
        raise ConfigError(f"coefficient={coefficient!r} must be >= 0")
    if not answers:
        return 0.0
    return -coefficient * (1 - len({a for a in answers if a}) / len(answers))


def drift_weights(
    returns: Sequence[float], groups: Sequence[Hashable], beta: float = 0.1, max_weight: float | None = None
) -> list[float]:
    """``w_i = exp(R_i / beta) / mean_{j in the group of i} exp(R_j / beta)``: mean 1 in each group.

    The exponents are shifted by the largest of the group, so any finite return and any ``beta`` give finite weights.

    Args:
        returns: ``(N,)``, one per rollout.
        groups: ``(N,)``, the prompt of each.
        beta: the strength of the KL term in the RL problem whose optimum is fitted, > 0; ``inf`` gives 1 everywhere, towards 0
            a group's weight goes to its best rollouts.
        max_weight: an upper bound, put on after normalisation (the mean is then <= 1), > 0; ``None``: none.

    Returns:
        ``(N,)``, >= 0, in the order given.

    Raises:
        ConfigError: lengths that differ, or a value out of range.
    """
    if len(returns) != len(groups):
        raise ConfigError(f"{len(returns)} returns for {len(groups)} groups; one group per return")
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or math.isnan(beta) or beta <= 0:
        raise ConfigError(f"beta={beta!r} must be > 0")
    if max_weight is not None and number(max_weight, "max_weight") <= 0:
        raise ConfigError(f"max_weight={max_weight!r} must be > 0, or None")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    weights = [0.0] * len(returns)
    for indices in members.values():
        values = [number(returns[i], f"returns[{i}]") for i in indices]
        top = max(values)
        # A difference too small for beta to see is exactly 0, also where beta is too small to divide by.
        exponentials = [math.exp((v - top) / beta) if v < top else 1.0 for v in values]
        mean = math.fsum(exponentials) / len(indices)
        for index, exponential in zip(indices, exponentials, strict=True):
            weights[index] = exponential / mean if max_weight is None else min(exponential / mean, max_weight)
    return weights


def effective_sample_size(weights: Sequence[float]) -> float:
    """``(sum w)^2 / sum w^2``: how many equally weighted rows the weighted ones are worth; 0 where all weights are 0."""
    squares = math.fsum(w * w for w in weights)
    return math.fsum(weights) ** 2 / squares if squares else 0.0


def number(value: Any, where: str) -> float:
    """A finite number, or a ConfigError that names the place."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{where}={value!r} is not a finite number")
    return float(value)
