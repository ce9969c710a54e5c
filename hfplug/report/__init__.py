"""``hfplug report RUN_DIR``: one HTML page about a training run, with its pictures.

Works for the output folder of any Trainer: what a run did not record is said on the page, not left out silently. The
page is one file (pictures inside it, nothing loaded from the network) and follows the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hfplug.report.data import ReportError, Run, read_run, update_facts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hfplug.report.figures import Theme
    from hfplug.report.page import Panel

__all__ = ["ReportError", "update_facts", "write_report"]


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a training run.

    Args:
        run_dir: Output folder of a Trainer; see :mod:`hfplug.report.data` for the files read from it.
        out: Folder for the page and its pictures, made if missing; default ``run_dir/report``.

    Returns:
        Path of ``report.html``. Beside it: ``loss.png``, ``utilisation.png``, ``sink.png`` as far as the run recorded
        them, each with a ``-dark`` version.

    Raises:
        ReportError: The folder holds no readable trainer state; the message names what is missing.
        HfplugError: matplotlib is not installed.

    """
    from hfplug.report import figures, page

    run = read_run(Path(run_dir))
    figures.require_matplotlib()
    folder = Path(out) if out is not None else Path(run_dir) / "report"
    if folder.exists() and not folder.is_dir():
        raise ReportError(f"out={str(folder)!r} is a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)

    def images(draw: Callable[[Theme], Figure], name: str) -> dict[str, Path]:
        return figures.save(draw, folder, name)

    panels = [_loss(run, images), _utilisation(run, images), _sink(run, images)]
    path = folder / "report.html"
    path.write_text(page.render(run, panels), encoding="utf-8")
    return path


_Images = Callable[[Callable[["Theme"], "Figure"], str], dict[str, Path]]


def _loss(run: Run, images: _Images) -> Panel:
    from hfplug.report import figures
    from hfplug.report.page import Panel

    title = "Loss"
    train, evaluation, term = run.curve("loss"), run.curve("eval_loss"), run.curve("nitp/loss")
    if not train and not evaluation:
        why = "The run logged neither a training nor an evaluation loss (logging_steps, eval_strategy)."
        if bad := run.left_out("loss", "eval_loss"):
            why = f"None of the {bad} logged losses is finite: training diverged."
        return Panel(title, why)
    text = "Mean loss per token over training."
    if bad := run.left_out("loss", "eval_loss", "nitp/loss"):
        text += f" {bad} logged values are not finite and cannot be drawn: training diverged."
    if not evaluation:
        text += " There is no held-out curve: the run did not evaluate (eval_strategy)."
    if term:
        text += (
            " The training loss contains the weighted NITP term, the held-out loss does not. NITP, below on its own axis, "
            "is 1 minus the cosine between the predicted and the actual next implicit token."
        )
    parts = [
        f"{name} from {curve.values[0]:.3g} at step {curve.steps[0]} to {curve.values[-1]:.3g} at step {curve.steps[-1]}"
        for name, curve in (("training loss", train), ("held-out loss", evaluation), ("NITP", term))
        if curve
    ]
    alt = "Line chart over optimiser steps: " + "; ".join(parts) + "."
    train_label = "training, with the NITP term" if term else "training"

    def draw(theme: Theme) -> Figure:
        return figures.draw_loss(theme, train, evaluation, term, train_label, "NITP (1 − cosine)")

    return Panel(title, text, alt, images(draw, "loss"))


def _utilisation(run: Run, images: _Images) -> Panel:
    from hfplug.report import figures
    from hfplug.report.page import Panel, describe_utilisation

    title = "Use of the low-rank directions"
    found = run.utilisation
    if isinstance(found, str):
        return Panel(title, found)
    text, alt = describe_utilisation(found)
    return Panel(title, text, alt, images(lambda theme: figures.draw_utilisation(theme, found), "utilisation"))


def _sink(run: Run, images: _Images) -> Panel:
    from hfplug.report import figures
    from hfplug.report.page import Panel

    title = "Attention sink"
    mass, value_norm = run.by_layer("sink/mass/layer_"), run.by_layer("sink/value_norm/layer_")
    if mass is None and value_norm is None:
        return Panel(title, "The run logged no sink statistics: it did not use the sink_monitor callback.")
    series = mass or value_norm
    assert series is not None
    text = "How much attention the first token gets, by layer and over training"
    if value_norm is not None:
        text += ", and how long its value vector is compared with the others (a true sink: much attention, short value)"
    if mass is None or value_norm is None:
        text += f". {'Attention mass' if mass is None else 'Value norms'} were not logged"
    text += ". On the right, the same by layer at the first and the last measurement."
    alt = (
        f"Heat map of {len(series.layers)} layers by {len(series.steps)} measurements from step {series.steps[0]} to "
        f"{series.steps[-1]}."
    )
    if mass is not None:
        import numpy as np

        last = mass.values[:, -1]
        top = int(np.nanargmax(last)) if np.isfinite(last).any() else 0
        alt += f" At the end layer {mass.layers[top]} has the largest sink: {last[top]:.2f} of the attention."

    return Panel(title, text, alt, images(lambda theme: figures.draw_sink(theme, mass, value_norm), "sink"))
