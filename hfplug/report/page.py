"""The HTML page of a report: one file, pictures inside it, nothing loaded from anywhere.

Every text that comes from a run goes through :func:`html.escape`; the template and this file hold the only markup.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from hfplug.report.data import Run, Utilisation

__all__ = ["Panel", "describe_utilisation", "render"]

Pair = tuple[str, Any]


@dataclass(frozen=True)
class Panel:
    """One section with a picture, or with the sentence that says why there is none.

    Attributes:
        title: Heading, plain text.
        text: What the picture shows, or why it is missing; plain text.
        alt: What a reader who does not see the picture should know; plain text.
        images: Theme name -> PNG file; empty for a missing panel.

    """

    title: str
    text: str
    alt: str = ""
    images: Mapping[str, Path] | None = None


def render(run: Run, panels: Sequence[Panel]) -> str:
    """The whole page as text."""
    template = Template((files("hfplug.report") / "template.html").read_text(encoding="utf-8"))
    model = _text(run.facts.get("model")) or run.name
    plugins = [entry for entry in _list(run.facts.get("plugins")) if isinstance(entry, Mapping)]
    names = [_text(entry.get("name")) for entry in plugins if entry.get("name")]
    headline = f"{model} with {_listing(names)}" if names else model
    sections = [_panel(panel) for panel in panels]
    return template.substitute(
        title=escape(f"{headline} · hfplug"),
        kicker=escape(" · ".join(filter(None, ["training run", run.name, _text(run.facts.get("date"))]))),
        headline=escape(headline),
        chips=_chips(plugins),
        tiles=_tiles(run),
        sections="\n".join([sections[0], _samples(run), *sections[1:], _facts(run, plugins)]),
        footer=escape("Made by hfplug report. The pictures are PNG files beside this page too."),
    )


def _panel(panel: Panel) -> str:
    if not panel.images:
        return f'<section class="absent"><h2>{escape(panel.title)}</h2><p>{escape(panel.text)}</p></section>'
    light, dark = (_data_uri(panel.images[theme]) for theme in ("light", "dark"))
    return (
        f"<section><h2>{escape(panel.title)}</h2><p>{escape(panel.text)}</p><figure><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(panel.alt, quote=True)}"></picture></figure></section>'
    )


def _data_uri(png: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(png.read_bytes()).decode("ascii")


def _chips(plugins: Iterable[Mapping[str, Any]]) -> str:
    items = []
    for entry in plugins:
        options = _options(entry.get("options"))
        label = f"<b>{escape(_text(entry.get('name')))}</b> <span>{escape(_text(entry.get('kind')))}</span>"
        items.append(f"<li>{label}{escape(' ' + options) if options else ''}</li>")
    return f'<ul class="chips">{"".join(items)}</ul>' if items else ""


def _options(options: Any) -> str:
    if not isinstance(options, Mapping):
        return ""
    return ", ".join(f"{key} {_text(value)}" for key, value in options.items() if not isinstance(value, Mapping))


def _tiles(run: Run) -> str:
    before, after = (_get(run.facts, "evaluation", when) for when in ("before", "after"))
    curve = run.curve("eval_loss")
    first = _number(_get(before, "loss"), curve.values[0] if curve else None)
    last = _number(_get(after, "loss"), curve.values[-1] if curve else None)
    tiles = [
        _tile("held-out loss", _change(first, last, "{:.3f}"), "nats per token"),
        _tile("held-out perplexity", _change(_exp(first), _exp(last), "{:.1f}"), _percent(_exp(first), _exp(last))),
    ]
    trainable, total = (_number(_get(run.facts, "parameters", key)) for key in ("trainable", "total"))
    if trainable is not None:
        share = f"{100 * trainable / total:.2g} % of {_amount(total)}" if total else ""
        tiles.append(_tile("trainable parameters", escape(_amount(trainable)), share))
    training = _number(_get(run.facts, "seconds", "training"), _last(run.curve("train_runtime").values))
    if training is not None:
        steps = _last(_all_steps(run))
        note = (f"{steps:.0f} steps" if steps else "") + (", evaluations included" if steps and curve else "")
        tiles.append(_tile("training time", escape(_duration(training)), note))
    return f'<div class="tiles">{"".join(filter(None, tiles))}</div>'


def _tile(label: str, value: str, note: str) -> str:
    """``value`` is markup made here; the other two are text."""
    if not value:
        return ""
    return f'<dl class="tile"><dt>{escape(label)}</dt><dd>{value}<small>{escape(note)}</small></dd></dl>'


def _change(first: float | None, last: float | None, form: str) -> str:
    if last is None:
        return ""
    if first is None or first == last:
        return escape(form.format(last))
    return f"<s>{escape(form.format(first))}</s><i>→</i>{escape(form.format(last))}"


def _percent(first: float | None, last: float | None) -> str:
    if not first or last is None or first == last:
        return ""
    change = 100 * (last / first - 1)
    return f"{abs(change):.0f} % {'lower' if change < 0 else 'higher'} than before training"


def _samples(run: Run) -> str:
    samples = [entry for entry in _list(run.facts.get("samples")) if isinstance(entry, Mapping)]
    if not samples:
        return _panel(Panel("Sample answers", "The run recorded no sample answers."))
    parts = []
    for sample in samples:
        after, reloaded = _text(sample.get("after")), _text(sample.get("reloaded"))
        columns = [("Before training", "before", _text(sample.get("before"))), ("After training", "after", after)]
        if reloaded and reloaded == after:
            columns[1] = ("After training, and again from the saved adapter in a new process", "after", after)
        elif reloaded:
            columns.append(("From the saved adapter, in a new process", "after", reloaded))
        boxes = "".join(
            f'<div class="{kind}"><h3>{escape(title)}</h3><p>{escape(text or "(nothing)")}</p></div>'
            for title, kind, text in columns
        )
        parts.append(f'<p class="question">{escape(_text(sample.get("question")))}</p><div class="answers">{boxes}</div>')
    return (
        f"<section><h2>Sample answers</h2><p>A question from the held-out part, answered greedily.</p>{''.join(parts)}</section>"
    )


def _facts(run: Run, plugins: Sequence[Mapping[str, Any]]) -> str:
    facts = run.facts
    rows: list[Pair] = [("Model", facts.get("model")), ("Data", facts.get("data"))]
    for entry in plugins:
        origin = f"from {_text(entry.get('distribution'))} {_text(entry.get('version'))}" if entry.get("distribution") else ""
        description = ", ".join(filter(None, [_text(entry.get("name")), _options(entry.get("options")), origin]))
        rows.append((f"{_text(entry.get('kind')).capitalize()}", description))
    losses = {when: _number(_get(facts, "evaluation", when, "loss")) for when in ("before", "after", "reloaded")}
    rows += [(f"Held-out loss, {when}", f"{loss:.4f}") for when, loss in losses.items() if loss is not None]
    if (everything := _number(_get(facts, "seconds", "everything"))) is not None:
        rows.append(("Time from start to report", _duration(everything)))
    rows.append(("Optimiser steps", _last(_all_steps(run))))
    rows += [("Weights", weights) for weights in [facts.get("weights")] if weights]
    rows += [("Note", note) for note in _list(facts.get("notes"))]
    versions = facts.get("versions")
    if isinstance(versions, Mapping):
        rows.append(("Versions", ", ".join(f"{name} {_text(version)}" for name, version in versions.items())))
    cells = "".join(
        f"<tr><th scope='row'>{escape(label)}</th><td>{escape(_text(value))}</td></tr>" for label, value in rows if _text(value)
    )
    return f"<section><h2>Facts</h2><table>{cells}</table></section>"


def describe_utilisation(utilisation: Utilisation) -> tuple[str, str]:
    """Text and alternative text of the utilisation picture."""
    import numpy as np

    values, modules = utilisation.values, utilisation.modules
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    at = np.unravel_index(int(np.nanargmax(values)), values.shape)
    where = f"layer {utilisation.layers[at[0]]}, {modules[at[1]]}, direction {at[2]}"
    text = (
        "Every low-rank direction of every adapted layer: how strongly tokens use it on average "
        f"(running mean over {utilisation.steps} optimiser steps). Plain LoRA is 1; orange is more, blue is less. "
        f"The range is {low:.3g} to {high:.3g}; most used is {where}."
    )
    alt = (
        f"Heat map of mean utilisation, {len(utilisation.layers)} layers by {values.shape[2]} directions for "
        f"{_listing(list(modules))}; values from {low:.3g} to {high:.3g}, where 1 is plain LoRA."
    )
    return text, alt


def _all_steps(run: Run) -> list[float]:
    steps = (entry.get("step") for entry in run.history)
    return sorted(float(step) for step in steps if isinstance(step, (int, float)) and step > 0)


def _get(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def _number(*candidates: Any) -> float | None:
    """The first candidate that is a finite number."""
    for value in candidates:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def _exp(value: float | None) -> float | None:
    return math.exp(value) if value is not None and value < 50 else None


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return " + ".join(_text(item) for item in value)
    return "" if value is None else str(value)


def _listing(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _amount(value: float) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"
