"""Layers x heads as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from hfplug import ConfigError
from hfplug.callbacks.sink_probe.probe import SinkProbe


def check_matplotlib() -> None:
    """Say what is missing before anything has run.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("heatmap=True needs matplotlib: pip install 'hfplug[plots]', or set heatmap=False")


def draw(probe: SinkProbe, features: np.ndarray, path: Path, title: str) -> None:
    """Write a PNG of two maps: the mean feature of each head, and the sum of the probe's absolute weights there.

    Args:
        probe: fitted on features by layer and head.
        features: ``(layers, heads, k)`` float64, the mean over the answers.
        path: the file; its folder is made.
        title: above the maps.
    """
    from matplotlib.figure import Figure

    assert probe.layout is not None
    assert probe.coef is not None
    weights = np.abs(probe.coef).reshape(features.shape).sum(axis=-1)
    layers, heads = weights.shape
    # No pyplot: its global state, and its backend, are the user's.
    figure = Figure(figsize=(4 + 0.25 * heads, 2.2 + 0.14 * layers), layout="constrained")
    figure.suptitle(title)
    panels = zip(figure.subplots(1, 2), (features.mean(axis=-1), weights), ("mean feature", "sum of |weights|"), strict=True)
    for axes, values, name in panels:
        image = axes.imshow(values, aspect="auto", origin="lower", cmap="viridis")
        axes.set(title=name, xlabel="head", ylabel="layer")
        step = max(1, layers // 10)
        axes.set_yticks(range(0, layers, step), [str(i) for i in probe.layout.layers[::step]])
        figure.colorbar(image, ax=axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
