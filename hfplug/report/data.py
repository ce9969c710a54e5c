"""What a run left on disk, read into plain values: logs, facts and adapter statistics. No figure is made here.

A run folder is any output folder of a Trainer. Read from it:

``trainer_state.json``
    The log history; also looked for in the last ``checkpoint-*``. Required.
``hfplug_run.json``
    Facts the Trainer does not record, all optional::

        {"model": "SmolLM2-135M-Instruct", "data": "...", "date": "2026-01-31",
         "plugins": [{"kind": "tuner", "name": "ulora", "distribution": "hfplug", "version": "0.1.0",
                      "options": {"r": 8}}],
         "versions": {"torch": "2.13.0"},
         "parameters": {"trainable": 461760, "total": 134976960},
         "seconds": {"training": 180.2, "everything": 251.0},
         "evaluation": {"before": {"loss": 3.1, "perplexity": 22.2}, "after": {...}, "reloaded": {...}},
         "samples": [{"question": "...", "before": "...", "after": "...", "reloaded": "..."}],
         "weights": "mxfp4_plus: 210 linear modules of 4.5 bits per weight, emulated: ...", "notes": ["..."]}

``adapter_model.safetensors``, ``adapter_config.json``
    The utilisation statistics of a U-LoRA adapter, also looked for in the last checkpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfplug.errors import HfplugError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Curve", "LayerSeries", "ReportError", "Run", "Utilisation", "read_run", "update_facts"]

FACTS_FILE = "hfplug_run.json"
STATE_FILE = "trainer_state.json"
ADAPTER_FILE = "adapter_model.safetensors"


class ReportError(HfplugError):
    """A report cannot be made of this folder; the message names what is missing."""


@dataclass(frozen=True)
class Curve:
    """One logged number over training: ``steps`` (optimiser steps) and finite ``values`` of equal length."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True)
class LayerSeries:
    """One number per layer over training.

    Attributes:
        layers: Layer indices, ascending, shape (L,).
        steps: Optimiser steps, ascending, shape (S,).
        values: Shape (L, S); NaN where a layer was not logged at a step.

    """

    layers: tuple[int, ...]
    steps: tuple[int, ...]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Utilisation:
    """Mean utilisation of each low-rank direction, as a U-LoRA adapter stores it.

    Attributes:
        layers: Layer indices, ascending, shape (L,).
        modules: Names of the adapted modules, shape (M,).
        values: Shape (L, M, R) with R the largest rank, in (0, 2), 1 = the weight of plain LoRA; NaN where a layer has
            no such module or a smaller rank.
        steps: Optimiser steps behind the means (the largest over the modules).

    """

    layers: tuple[int, ...]
    modules: tuple[str, ...]
    values: NDArray[np.float64]
    steps: int


@dataclass(frozen=True)
class Run:
    """Everything a report shows.

    Attributes:
        name: Name of the run folder.
        history: The Trainer's log history.
        facts: Content of ``hfplug_run.json``, {} without one.
        utilisation: Adapter statistics, or the sentence that says why there are none.

    """

    name: str
    history: tuple[Mapping[str, Any], ...]
    facts: Mapping[str, Any]
    utilisation: Utilisation | str

    def curve(self, key: str) -> Curve:
        """All finite values logged under ``key``; of several at one step the last counts."""
        points = {
            int(entry["step"]): float(entry[key])
            for entry in self.history
            if _is_number(entry.get("step")) and _is_number(entry.get(key))
        }
        steps = sorted(points)
        return Curve(tuple(steps), tuple(points[step] for step in steps))

    def left_out(self, *keys: str) -> int:
        """How many logged values under ``keys`` :meth:`curve` leaves out because they are not finite."""
        values = (entry[key] for entry in self.history for key in keys if key in entry)
        return sum(isinstance(value, float) and not math.isfinite(value) for value in values)

    def by_layer(self, prefix: str) -> LayerSeries | None:
        """The curves logged as ``<prefix>NN`` (NN the layer index), or None where there are none."""
        import numpy as np

        pattern = re.compile(re.escape(prefix) + r"(\d+)$")
        keys = {int(found[1]): key for entry in self.history for key in entry if (found := pattern.match(key))}
        curves = {layer: curve for layer in sorted(keys) if (curve := self.curve(keys[layer]))}
        steps = sorted({step for curve in curves.values() for step in curve.steps})
        if not steps:
            return None
        column = {step: i for i, step in enumerate(steps)}
        values = np.full((len(curves), len(steps)), np.nan)
        for row, curve in enumerate(curves.values()):
            values[row, [column[step] for step in curve.steps]] = curve.values
        return LayerSeries(tuple(curves), tuple(steps), values)


def read_run(run_dir: Path) -> Run:
    """Read a run folder.

    Raises:
        ReportError: The folder, or ``trainer_state.json`` in it, is missing or not valid; the message names it.

    """
    if not run_dir.is_dir():
        raise ReportError(f"run_dir={str(run_dir)!r} is not a folder")
    checkpoints = _checkpoints(run_dir)
    places = [run_dir, *checkpoints[-1:]]
    state_path = next((place / STATE_FILE for place in places if (place / STATE_FILE).is_file()), None)
    if state_path is None:
        also = f" nor {checkpoints[-1].name}/{STATE_FILE}" if checkpoints else ", and there is no checkpoint-* folder"
        raise ReportError(
            f"no {STATE_FILE} in {run_dir}{also}: a report needs the output folder of a Trainer. "
            "trainer.save_state() writes the file, and so does every checkpoint"
        )
    history = _read_json(state_path).get("log_history")
    if not isinstance(history, list):
        raise ReportError(f"{state_path} holds no list log_history: not the state of a Trainer")
    facts_path = run_dir / FACTS_FILE
    return Run(
        name=run_dir.resolve().name,
        history=tuple(entry for entry in history if isinstance(entry, dict)),
        facts=_read_json(facts_path) if facts_path.is_file() else {},
        utilisation=_read_utilisation(places),
    )


def update_facts(run_dir: Path, facts: Mapping[str, Any]) -> Path:
    """Merge ``facts`` into ``hfplug_run.json`` of a run (mappings key by key, other values replaced).

    Returns:
        The path of the file. It is replaced in one step, so a killed run leaves the old or the new one.

    """
    path = run_dir / FACTS_FILE
    merged = _merge(_read_json(path) if path.is_file() else {}, facts)
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps(merged, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)
    return path


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(before, value) if both else value  # type: ignore[arg-type]
    return merged


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _checkpoints(run_dir: Path) -> list[Path]:
    """The ``checkpoint-N`` folders by N (as text, 1000 would come before 200)."""
    found = [(int(m[1]), path) for path in run_dir.iterdir() if (m := re.fullmatch(r"checkpoint-(\d+)", path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ReportError(f"{path} holds a {type(content).__name__}, not a mapping")
    return content


_EMA_KEY = re.compile(r"^(?P<path>.+)\.ulora_ema(?:\.[\w-]+)?$")
# The order in which a decoder layer uses its projections; others come after them, by name.
_FLOW = {name: i for i, name in enumerate(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))}
_STEPS_KEY = re.compile(r"\.ulora_steps(?:\.[\w-]+)?$")


def _read_utilisation(places: list[Path]) -> Utilisation | str:
    path = next((place / ADAPTER_FILE for place in places if (place / ADAPTER_FILE).is_file()), None)
    if path is None:
        return f"The run saved no adapter ({ADAPTER_FILE})."
    import numpy as np
    from safetensors import SafetensorError, safe_open

    rows: dict[tuple[int, str], NDArray[np.float64]] = {}
    steps = [0]
    try:
        with safe_open(path, framework="np") as file:
            for key in file.keys():  # noqa: SIM118  not a mapping: it has no __iter__
                if (found := _EMA_KEY.match(key)) and (index := re.search(r"\.(\d+)\.", found["path"])):
                    module = found["path"].rpartition(".")[2]
                    rows[int(index[1]), module] = np.asarray(file.get_tensor(key), dtype=np.float64).reshape(-1)
                elif _STEPS_KEY.search(key):
                    steps.append(int(np.max(file.get_tensor(key))))
    except (SafetensorError, TypeError) as error:  # TypeError: a dtype numpy has no name for
        return f"{ADAPTER_FILE} could not be read: {error}."
    if not rows:
        return "The adapter holds no utilisation statistics: the run did not use the ulora tuner."
    if not any(steps):
        return "The utilisation statistics are still at their start value: no optimiser step was counted."
    if not any(np.isfinite(row).any() for row in rows.values()):
        return "The utilisation statistics are not finite: training diverged."
    layers = sorted({layer for layer, _ in rows})
    modules = sorted({module for _, module in rows}, key=lambda name: (_FLOW.get(name, len(_FLOW)), name))
    values = np.full((len(layers), len(modules), max(row.size for row in rows.values())), np.nan)
    for (layer, module), row in rows.items():
        values[layers.index(layer), modules.index(module), : row.size] = row
    return Utilisation(tuple(layers), tuple(modules), values, max(steps))
