"""How well a probe tells answers apart: AUROC over folds that keep a question together, and the baselines beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hfplug import ConfigError
from hfplug.callbacks.sink_probe.features import FEATURES, FeatureTable

if TYPE_CHECKING:
    from hfplug.callbacks.sink_probe.probe import SinkProbe


def auroc(labels: Sequence[int] | np.ndarray, scores: Sequence[float] | np.ndarray) -> float:
    """Probability that an answer of label 1 scores higher than one of label 0, ties counting half (Mann-Whitney U / n1 n0).

    Raises:
        ConfigError: lengths differ, a score is NaN, or one class is missing.
    """
    y, s = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    if y.shape != s.shape or y.ndim != 1 or np.isnan(s).any():
        raise ConfigError(f"labels {y.shape} and scores {s.shape} must be equally many numbers")
    ones, zeros = int(y.sum()), int((~y).sum())
    if not ones or not zeros:
        raise ConfigError(f"AUROC needs both classes: {ones} of label 1, {zeros} of label 0")
    _, place, count = np.unique(s, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    return float((ranks[y].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def grouped_folds(
    labels: np.ndarray, groups: Any, folds: int, seed: int, *, fewer: bool = False
) -> list[tuple[np.ndarray, np.ndarray]]:
    """``(train, test)`` indices, classes as even as the groups allow, no group on both sides.

    Args:
        labels: ``(answers,)`` 0 or 1.
        groups: one value per answer; ``None``: each for itself.
        folds: 2 or more.
        seed: of the shuffle.
        fewer: take fewer folds where there are too few groups.

    Raises:
        ConfigError: too few groups of a class, or a fold that lacks a class.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    named = np.arange(len(labels)) if groups is None else np.unique(np.asarray([str(g) for g in groups]), return_inverse=True)[1]
    if named.shape != labels.shape:
        raise ConfigError(f"groups must be {len(labels)}, one per answer; got {named.shape}")
    most = min(len(np.unique(named[labels == value])) for value in (0, 1))
    if most < 2 or (most < folds and not fewer):
        raise ConfigError(f"{folds} folds need as many questions of each class; there are {most}. Take fewer, or one C")
    splitter = StratifiedGroupKFold(min(folds, most), shuffle=True, random_state=seed)
    found = list(splitter.split(np.zeros((len(labels), 1)), labels, named))
    if any(len(np.unique(labels[part])) < 2 for fold in found for part in fold):
        raise ConfigError(f"{len(found)} folds by question leave one without a class: the questions are too few or too unequal")
    return found


@dataclasses.dataclass(frozen=True)
class CrossValidation:
    """AUROCs of held-out folds, one per fold and seed."""

    aurocs: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Their mean."""
        return float(np.mean(self.aurocs))

    @property
    def std(self) -> float:
        """Their standard deviation, which is that of single folds, not of the mean."""
        return float(np.std(self.aurocs))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.std:.3f}"


def cross_validate(
    probe: SinkProbe,
    features: FeatureTable | np.ndarray,
    labels: Sequence[int] | np.ndarray,
    groups: Any = None,
    folds: int = 5,
    seeds: Sequence[int] = (0, 1, 2),
    shuffle_labels: bool = False,
) -> CrossValidation:
    """Fit on some folds, measure on the one held out, for every fold and seed; ``C`` is chosen inside the training folds.

    Args:
        probe: its options count; it is left as it was.
        features, labels, groups: see :meth:`~hfplug.callbacks.sink_probe.probe.SinkProbe.fit`.
        folds: number of folds.
        seeds: each divides anew.
        shuffle_labels: permute the labels first: a control that has to give one half.

    Raises:
        ConfigError: see :meth:`~hfplug.callbacks.sink_probe.probe.SinkProbe.fit` and :func:`grouped_folds`.
    """
    x = features.values if isinstance(features, FeatureTable) else np.asarray(features, dtype=np.float64)
    known = None if groups is None else np.asarray([str(g) for g in groups])
    found = []
    for seed in seeds:
        y = np.asarray(labels)
        if shuffle_labels:
            y = np.random.default_rng(seed).permutation(y)
        for train, test in grouped_folds(y, known, folds, seed):
            fitted = probe.unfitted(seed=seed).fit(x[train], y[train], None if known is None else known[train])
            found.append(fitted.score(x[test], y[test]))
    return CrossValidation(tuple(found))


def baselines(probe: SinkProbe) -> dict[str, SinkProbe]:
    """One unfitted probe per feature, with the options of this one; the first is its own."""
    names = [probe.options["feature"], *(name for name in FEATURES if name != probe.options["feature"])]
    return {name: probe.unfitted(feature=name) for name in names}
