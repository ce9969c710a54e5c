"""The pictures of a report, each for a light and a dark page.

Colours: lines from the Okabe-Ito palette (distinct under the common colour vision deficiencies), shares in cividis
(made for them), ratios around 1 in blue to orange. Every figure is drawn on its own ``Figure`` with the Agg canvas: no
pyplot, so no global state and no window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hfplug.errors import HfplugError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from hfplug.report.data import Curve, LayerSeries, Utilisation

__all__ = ["THEMES", "Theme", "draw_loss", "draw_sink", "draw_utilisation", "require_matplotlib", "save"]

_DPI = 160
_MARKED_POINTS = 60
_WIDTH = 9.2  # inches; the page shows figures at 920 px at most


@dataclass(frozen=True)
class Theme:
    """Colours of one page style; ``lines`` are told apart by lightness too."""

    name: str
    surface: str
    ink: str
    muted: str
    grid: str
    lines: tuple[str, str, str]
    low: str
    middle: str
    high: str


THEMES = (
    Theme("light", "#ffffff", "#1c2330", "#667085", "#e4e7ec", ("#0072b2", "#d55e00", "#00805f"),
          "#0b5c9e", "#f4f4f2", "#c65102"),
    Theme("dark", "#171b22", "#e8eaee", "#98a2b3", "#2f3642", ("#56b4e9", "#f0a23b", "#3fc79a"),
          "#5db4f0", "#272c35", "#f39a3d"),
)  # fmt: skip


def require_matplotlib() -> None:
    """Raise :class:`HfplugError` with the line that installs matplotlib, where it is missing."""
    try:
        import matplotlib  # noqa: F401, ICN001
    except ImportError as error:
        raise HfplugError(f'a report needs matplotlib ({error}): pip install "hfplug[plots]"') from error


def save(draw: Callable[[Theme], Figure], folder: Path, name: str) -> dict[str, Path]:
    """Draw a figure in every theme; the files are ``<name>.png`` (light) and ``<name>-dark.png``."""
    paths = {}
    for theme in THEMES:
        path = folder / (f"{name}.png" if theme.name == "light" else f"{name}-{theme.name}.png")
        draw(theme).savefig(path, dpi=_DPI, facecolor=theme.surface, metadata={"Software": None})
        paths[theme.name] = path
    return paths


def draw_loss(theme: Theme, train: Curve, evaluation: Curve, extra: Curve, train_label: str, extra_label: str) -> Figure:
    """Training and evaluation loss over steps; an added loss term gets its own axis below, it has its own unit."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(theme, 4.9 if extra else 3.5)
    grid = figure.add_gridspec(2 if extra else 1, 1, height_ratios=[2.1, 1] if extra else [1])
    axis = figure.add_subplot(grid[0])
    _style(axis, theme)
    axis.set_ylabel("loss (nats per token)")
    if train:
        _line(axis, theme, train, 0, marker="o", ms=3.2, label=train_label)
    if evaluation:
        _line(axis, theme, evaluation, 1, marker="D", ms=6, mec=theme.surface, label="held-out", ls=(0, (5, 1.5)))
        _end_labels(axis, theme, evaluation, 1)
    axis.margins(x=0.03, y=0.16)
    axis.legend(loc="upper right", frameon=False, labelcolor=theme.ink, ncols=2, handlelength=2.6)
    last = axis
    if extra:
        axis.tick_params(labelbottom=False)
        last = figure.add_subplot(grid[1], sharex=axis)
        _style(last, theme)
        last.set_ylabel(extra_label)
        _line(last, theme, extra, 2, marker="s", ms=3.2)
        last.margins(y=0.25)
        _end_labels(last, theme, extra, 2)
    last.set_xlabel("optimiser step")
    last.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels()
    return figure


def draw_utilisation(theme: Theme, utilisation: Utilisation) -> Figure:
    """Heat map layers × low-rank directions, one block per adapted module, coloured around 1 (= plain LoRA)."""
    import numpy as np
    from matplotlib.colors import TwoSlopeNorm

    layers, modules, values = utilisation.layers, utilisation.modules, utilisation.values
    figure = _figure(theme, 1.5 + max(1.6, 0.135 * len(layers)))
    grid = figure.add_gridspec(1, len(modules) + 1, width_ratios=[*[1.0] * len(modules), 0.035 * len(modules)])
    spread = max(float(np.nanmax(np.abs(values - 1))), 1e-3)
    norm = TwoSlopeNorm(1.0, 1 - spread, 1 + spread)
    for column, module in enumerate(modules):
        axis = figure.add_subplot(grid[column])
        image = _heat(axis, theme, values[:, column], _diverging(theme), norm)
        axis.set_title(module, color=theme.ink, fontsize=10, fontfamily="monospace", pad=6)
        rank = values.shape[2]
        axis.set_xticks(range(rank) if rank <= 8 else range(0, rank, max(1, rank // 4)))
        _layer_ticks(axis, layers, labels=column == 0)
    figure.supxlabel("low-rank direction (index)", color=theme.muted, fontsize=9.5)
    bar = figure.colorbar(image, cax=figure.add_subplot(grid[-1]))
    _style_bar(bar, theme, "mean utilisation (1 = plain LoRA)")
    return figure


def draw_sink(theme: Theme, mass: LayerSeries | None, value_norm: LayerSeries | None) -> Figure:
    """Per statistic: a heat map layer × step, and beside it the profile over layers at the first and last step."""
    import numpy as np
    from matplotlib.colors import LogNorm, Normalize

    panels: list[tuple[LayerSeries, str, Colormap | str, Normalize]] = []
    if mass is not None:
        top = max(float(np.nanmax(mass.values)), 1e-6)
        panels.append((mass, "attention mass on the first token (share)", "cividis", Normalize(0, top)))
    if value_norm is not None:
        ratios = np.where(value_norm.values > 0, value_norm.values, np.nan)  # a ratio of 0 has no place on a log axis
        spread = max(float(np.nanmax(np.abs(np.log(ratios)))), 0.05) if np.isfinite(ratios).any() else 0.05
        label = "value norm of the first token ÷ median"
        panels.append((value_norm, label, _diverging(theme), LogNorm(float(np.exp(-spread)), float(np.exp(spread)))))
    count = max(len(series.layers) for series, *_ in panels)
    figure = _figure(theme, len(panels) * (1.15 + max(1.5, 0.085 * count)))
    grid = figure.add_gridspec(len(panels), 3, width_ratios=[3.4, 0.09, 2])
    for row, (series, label, colours, norm) in enumerate(panels):
        axis = figure.add_subplot(grid[row, 0])
        image = _heat(axis, theme, series.values, colours, norm)
        _layer_ticks(axis, series.layers, labels=True)
        _step_ticks(axis, series.steps)
        bar = figure.colorbar(image, cax=figure.add_subplot(grid[row, 1]))
        _style_bar(bar, theme, "")
        axis.set_title(label, color=theme.ink, fontsize=10, loc="left", pad=6)
        profile = figure.add_subplot(grid[row, 2], sharey=axis)
        _style(profile, theme)
        profile.grid(visible=True, axis="x", color=theme.grid, lw=0.8)
        _profiles(profile, theme, series)
        profile.tick_params(labelleft=False)
        if isinstance(norm, LogNorm):
            _log_axis(profile, theme, series.values)
        last = row == len(panels) - 1
        axis.set_xlabel("optimiser step" if last else "")
        profile.set_xlabel("value on the left, by layer" if last else "")
    return figure


def _profiles(axis: Axes, theme: Theme, series: LayerSeries) -> None:
    rows = range(len(series.layers))
    first, last = series.values[:, 0], series.values[:, -1]
    if len(series.steps) > 1:
        axis.plot(first, rows, color=theme.muted, lw=1.3, ls=(0, (3, 1.5)), label=f"step {series.steps[0]}")
    axis.plot(last, rows, color=theme.lines[0], lw=1.9, label=f"step {series.steps[-1]}")
    axis.legend(loc="best", frameon=False, labelcolor=theme.ink, fontsize=8.5)


def _log_axis(axis: Axes, theme: Theme, values: NDArray[np.float64]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    if not (values > 0).any():
        return
    axis.set_xscale("log")
    axis.axvline(1, color=theme.muted, lw=0.8)
    axis.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=5))
    axis.minorticks_off()
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def _figure(theme: Theme, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), facecolor=theme.surface, layout="constrained")
    cast("Any", figure.get_layout_engine()).set(h_pad=0.06, w_pad=0.05, hspace=0.04)
    FigureCanvasAgg(figure)
    return figure


def _style(axis: Axes, theme: Theme) -> None:
    axis.set_facecolor(theme.surface)
    axis.grid(visible=True, axis="y", color=theme.grid, lw=0.8)
    axis.set_axisbelow(True)
    for side, spine in axis.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.grid)
    _style_ticks(axis, theme)


def _style_ticks(axis: Axes, theme: Theme) -> None:
    axis.tick_params(colors=theme.muted, labelsize=9, length=0)
    axis.xaxis.label.set(color=theme.muted, fontsize=9.5)
    axis.yaxis.label.set(color=theme.muted, fontsize=9.5)


def _ratio_ticks(norm: Normalize) -> list[float]:
    """1, 2, 5, 10, ... and their inverses, within the range of ``norm``."""
    low, high = float(norm.vmin or 1.0), float(norm.vmax or 1.0)
    sizes = [1.0] + [step * 10.0**power for power in range(4) for step in (2, 5, 10)]
    ticks = [tick for tick in sorted({1 / size for size in sizes} | set(sizes)) if low <= tick <= high]
    return ticks if len(ticks) > 1 else [low, *ticks, high]


def _style_bar(bar: Any, theme: Theme, label: str) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter, NullFormatter

    bar.outline.set_visible(False)
    if isinstance(bar.norm, LogNorm):
        bar.set_ticks(_ratio_ticks(bar.norm))
    bar.ax.minorticks_off()
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.4g}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.set_label(label)
    _style_ticks(bar.ax, theme)


def _heat(axis: Axes, theme: Theme, values: NDArray[np.float64], colours: Colormap | str, norm: Normalize) -> Any:
    """One image, first row at the bottom: the first layer is where the text goes in."""
    axis.set_facecolor(theme.grid)  # shows where there is no value
    image = axis.imshow(values, aspect="auto", origin="lower", interpolation="nearest", cmap=colours, norm=norm)
    for spine in axis.spines.values():
        spine.set_visible(False)
    _style_ticks(axis, theme)
    return image


def _layer_ticks(axis: Axes, layers: Sequence[int], *, labels: bool) -> None:
    every = max(1, -(-len(layers) // 7))
    rows = list(range(0, len(layers), every))
    axis.set_yticks(rows, [str(layers[row]) for row in rows] if labels else [])
    if labels:
        axis.set_ylabel("layer")


def _step_ticks(axis: Axes, steps: Sequence[int]) -> None:
    every = max(1, -(-len(steps) // 8))
    columns = list(range(0, len(steps), every))
    axis.set_xticks(columns, [str(steps[column]) for column in columns])


def _line(axis: Axes, theme: Theme, curve: Curve, colour: int, *, marker: str, **style: Any) -> None:
    """A curve; its points are marked as long as they can be told apart."""
    shown = marker if len(curve.steps) <= _MARKED_POINTS else ""
    axis.plot(curve.steps, curve.values, color=theme.lines[colour], lw=1.8, marker=shown, **style)


def _end_labels(axis: Axes, theme: Theme, curve: Curve, colour: int) -> None:
    """Write the first and the last value at their points: the two numbers a reader looks for."""
    from matplotlib.patheffects import withStroke

    for end in [0, -1] if len(curve.steps) > 1 else [-1]:
        value = curve.values[end]
        axis.annotate(
            f"{value:.2f}" if 0.1 <= abs(value) < 100 else f"{value:.3g}", (curve.steps[end], value), xytext=(0, 8),
            color=theme.lines[colour], textcoords="offset points", ha="left" if end == 0 else "right", fontsize=9.5,
            fontweight="bold", zorder=5, path_effects=[withStroke(linewidth=3, foreground=theme.surface)],
        )  # fmt: skip


def _diverging(theme: Theme) -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    colours = [theme.low, theme.middle, theme.high]
    return cast("Colormap", LinearSegmentedColormap.from_list(f"hfplug-{theme.name}", colours))
