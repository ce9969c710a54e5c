"""How good stated probabilities are. Probabilities ``(examples, classes)``, labels ``(examples,)``; results are floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hfplug.errors import ConfigError


def _checked(probabilities: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    probabilities, labels = probabilities.detach().double().cpu(), labels.detach().cpu()
    if probabilities.dim() != 2 or labels.shape != probabilities.shape[:1] or labels.is_floating_point():
        raise ConfigError(
            f"probabilities of shape {tuple(probabilities.shape)} and labels of shape {tuple(labels.shape)}, {labels.dtype}: "
            "wanted (examples, classes) and (examples,) of an integer type"
        )
    if not len(labels):
        raise ConfigError("no examples to measure on")
    if int(labels.min()) < 0 or int(labels.max()) >= probabilities.shape[1]:
        raise ConfigError(
            f"labels go from {int(labels.min())} to {int(labels.max())}, but there are {probabilities.shape[1]} classes"
        )
    sums = probabilities.sum(1)
    if not torch.allclose(sums, torch.ones_like(sums), atol=1e-3) or bool((probabilities < 0).any()):
        raise ConfigError("probabilities must be >= 0 and sum to 1 over the classes; apply softmax to logits first")
    return probabilities, labels.long()


def _bins(probabilities: torch.Tensor, labels: torch.Tensor, bins: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count, mean confidence and accuracy of each bin of confidence, ``(bins,)`` each; the bins are ``(i/n, (i+1)/n]``."""
    if bins < 1:
        raise ConfigError(f"bins={bins!r} must be >= 1")
    confidence, predicted = probabilities.max(1)
    index = (confidence * bins).ceil().long().clamp(1, bins) - 1
    count = torch.zeros(bins, dtype=torch.double).index_add_(0, index, torch.ones_like(confidence))
    shares = [torch.zeros(bins, dtype=torch.double).index_add_(0, index, v) for v in (confidence, (predicted == labels).double())]
    return count, shares[0] / count.clamp(min=1), shares[1] / count.clamp(min=1)


def expected_calibration_error(probabilities: torch.Tensor, labels: torch.Tensor, bins: int = 15) -> float:
    """Mean distance between confidence and accuracy over equal bins of confidence (Guo et al. 2017), in ``[0, 1]``."""
    probabilities, labels = _checked(probabilities, labels)
    count, confidence, accuracy = _bins(probabilities, labels, bins)
    return float((count / count.sum() * (confidence - accuracy).abs()).sum())


def negative_log_likelihood(probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean of ``-log p(label)``, nats; infinite when a label was given no probability at all."""
    probabilities, labels = _checked(probabilities, labels)
    return float(-probabilities.gather(1, labels[:, None]).log().mean())


def brier_score(probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean squared distance between the probabilities and the one-hot label, summed over classes, in ``[0, 2]``."""
    probabilities, labels = _checked(probabilities, labels)
    target = torch.nn.functional.one_hot(labels, probabilities.shape[1])
    return float((probabilities - target).square().sum(1).mean())


def ood_auroc(in_distribution: torch.Tensor, out_of_distribution: torch.Tensor) -> float:
    """Chance that an out-of-distribution score exceeds an in-distribution one, ties half (area under the ROC), in ``[0, 1]``.

    Args:
        in_distribution: ``(n,)`` scores that should be low, such as ``Predictive.mutual_information``.
        out_of_distribution: ``(m,)`` scores that should be high.
    """
    low, high = (t.detach().double().flatten().cpu() for t in (in_distribution, out_of_distribution))
    if not len(low) or not len(high):
        raise ConfigError(f"ood_auroc needs scores of both kinds, got {len(low)} in and {len(high)} out of distribution")
    if not bool(torch.isfinite(torch.cat([low, high])).all()):
        raise ConfigError("ood_auroc: the scores are not all finite")
    ordered = low.sort().values
    below = torch.searchsorted(ordered, high, right=False)
    below_or_equal = torch.searchsorted(ordered, high, right=True)
    return float((below + below_or_equal).double().mean() / 2 / len(low))


def reliability_plot(probabilities: torch.Tensor, labels: torch.Tensor, path: str | Path, bins: int = 15, title: str = "") -> Any:
    """Draw accuracy against confidence, with the share of examples in each bin, into an image file.

    Needs matplotlib (``pip install "hfplug[plots]"``).

    Returns:
        the matplotlib figure.
    """
    from matplotlib.figure import Figure

    probabilities, labels = _checked(probabilities, labels)
    count, confidence, accuracy = _bins(probabilities, labels, bins)
    figure = Figure(figsize=(4.2, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    filled, edges = count > 0, torch.arange(bins).double() / bins
    upper.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1, label="perfect")
    upper.bar(edges[filled], accuracy[filled], width=1 / bins, align="edge", color="#3b75af", edgecolor="white", label="accuracy")
    upper.plot(confidence[filled], accuracy[filled], "o", color="#c44e52", markersize=3, label="mean confidence of the bin")
    error = expected_calibration_error(probabilities, labels, bins)
    upper.set(ylabel="accuracy", ylim=(0, 1), xlim=(0, 1), title=title or f"ECE {error:.3f}, {len(labels)} examples")
    upper.legend(frameon=False, loc="upper left", fontsize=8)
    lower.bar(edges, count / count.sum(), width=1 / bins, align="edge", color="0.7", edgecolor="white")
    lower.set(xlabel="confidence", ylabel="share")
    figure.savefig(path, dpi=150)
    return figure
