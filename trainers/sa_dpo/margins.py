"""The margin each pair is asked for, ``gamma``, and the ``margin`` column of TRL's ``RewardTrainer``."""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, overload

from torch import Tensor

from hfplug import ConfigError
from hfplug.errors import nearest

Margin = Literal["constant", "structure", "column"]
MARGINS = ("constant", "structure", "column")


@overload
def structure_margin(distance: Tensor, gamma_max: float, tau: float) -> Tensor: ...
@overload
def structure_margin(distance: float, gamma_max: float, tau: float) -> float: ...
def structure_margin(distance: Any, gamma_max: float, tau: float) -> Any:
    """``gamma = gamma_max * min(d / tau, 1)``: nothing for the same answer twice, all of it from distance ``tau`` on.

    Args:
        distance: d in [0, 1], a number or a tensor of any shape.
        gamma_max: the full margin, reward units (beta * log ratio), >= 0.
        tau: the distance from which on the margin is full, in (0, 1].
    """
    share = distance / tau
    return gamma_max * (share.clamp(max=1) if isinstance(share, Tensor) else min(share, 1.0))


def check_margin_options(margin: str, gamma_max: float, tau: float) -> None:
    """Raise :class:`~hfplug.ConfigError` for a margin kind, size or threshold that cannot be."""
    if margin not in MARGINS:
        raise ConfigError(f"margin={margin!r} is not one of {list(MARGINS)}{nearest(margin, MARGINS)}")
    if not (math.isfinite(gamma_max) and gamma_max >= 0):
        raise ConfigError(f"gamma_max={gamma_max!r} must be finite and >= 0 (reward units)")
    if not 0 < tau <= 1:
        raise ConfigError(f"tau={tau!r} must be in (0, 1]: the distance from which on the margin is full")


def check_values(values: Any, column: str, most: float | None) -> None:
    """Raise :class:`~hfplug.ConfigError` for a value of a column that is missing, not finite, below 0 or above ``most``."""
    for row, value in enumerate(values):
        number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (most is not None and value > most):
            allowed = "a finite number >= 0" if most is None else f"a number in [0, {most:g}]"
            raise ConfigError(f"column {column!r}: {value!r} in row {row} is not {allowed}")


def add_margin(
    dataset: Any,
    *,
    gamma_max: float = 0.5,
    tau: float = 0.25,
    margin: Margin = "structure",
    distance_column: str = "semantic_distance",
    column: str = "margin",
) -> Any:
    """Add the column ``margin``, which stock ``RewardTrainer`` reads: ``-logsigmoid(r+ - r- - margin)``.

    So a reward model is trained with the margins of SA-DPO and no trainer of its own. Rewards there are the model's own scale,
    not ``beta * log ratio``.

    Args:
        dataset: a ``datasets.Dataset``, ``IterableDataset`` or dict of them.
        gamma_max: the full margin, reward units.
        tau: the distance from which on the margin is full.
        margin: ``"structure"`` (reads ``distance_column``) or ``"constant"``.
        distance_column: column with d in [0, 1]; see :func:`add_semantic_distance`.
        column: the column to write.

    Raises:
        ConfigError: an option that cannot be, a missing column, or a distance outside [0, 1].
    """
    check_margin_options(margin, gamma_max, tau)
    if margin == "column":
        raise ConfigError(f"margin='column': the margins are in a column already; rename it to {column!r}")

    def row(example: dict[str, Any]) -> dict[str, float]:
        if margin == "constant":
            return {column: float(gamma_max)}
        if distance_column not in example:
            raise ConfigError(missing(distance_column, example, "distance_column"))
        value = example[distance_column]
        value = value.item() if hasattr(value, "item") else value  # of a dataset with a format
        check_values([value], distance_column, 1.0)
        return {column: float(structure_margin(float(value), gamma_max, tau))}

    return dataset.map(row)


def missing(column: str, present: Any, option: str) -> str:
    """The message for a column that is not there."""
    hint = "" if option == "sa_dpo_margin_column" else ". add_semantic_distance() computes distances"
    return f"{option}={column!r}: the dataset has no such column{nearest(column, present)}; it has {sorted(present)}{hint}"
