"""What the measurements share: runs taken in turn in one process, median and spread, and where the figures come from."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("hfplug", "torch", "transformers", "peft", "trl", "accelerate")


@dataclass
class Times:
    """Seconds of the repeats of one run: on the wall, and of this process's CPU time (which other processes disturb less)."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def interleave(runs: Mapping[str, Callable[[], Any]], repeats: int = 5, warmup: int = 1) -> dict[str, Times]:
    """Time each run ``repeats`` times, one after the other in turn, so that a busy machine slows all alike.

    The order is reversed every other round: whoever runs second finds warmer caches.
    """
    times = {name: Times() for name in runs}
    for turn in range(warmup + repeats):
        for name in list(runs) if turn % 2 == 0 else list(reversed(runs)):
            wall, cpu = time.perf_counter(), time.process_time()
            runs[name]()
            if turn >= warmup:
                times[name].wall.append(time.perf_counter() - wall)
                times[name].cpu.append(time.process_time() - cpu)
    return times


def summary(values: list[float]) -> dict[str, Any]:
    """Median, extremes, and the values themselves."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": values}


def ratios(method: list[float], baseline: list[float]) -> dict[str, Any]:
    """``method / baseline`` of each turn, summed up: neighbours in time saw the same machine."""
    return summary([m / b for m, b in zip(method, baseline, strict=True)])


@dataclass(frozen=True)
class ResultRow:
    """One line of docs/results.md; each program has a ``row(result)`` that reads it off what the program wrote.

    Attributes:
        claim: what is claimed, in one sentence.
        paper: the paper's figure, or why it has none.
        ours: our figure, with its interval or its values by seed.
        verdict: ``target met`` / ``target missed`` are for limits of our own (cost, memory, speed).
    """

    claim: str
    paper: str
    ours: str
    verdict: Literal["reproduced", "partly reproduced", "not reproduced", "target met", "target missed", "measured"]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """``0.123 (0.120 to 0.130)``: mean and extremes over seeds."""
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def provenance() -> dict[str, Any]:
    """Commit, whether tracked files differ from it, versions, CPU, threads, load."""
    import torch

    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": list(os.getloadavg()),
        # What `hfplug bench` ran before: the tests of what is measured. None: the program was started by hand.
        "gate": json.loads(os.environ.get("HFPLUG_BENCH_GATE", "null")),
    }


def write(name: str, result: Mapping[str, Any], row: Callable[[dict[str, Any]], ResultRow | None]) -> Path:
    """Write ``results/<name>.json`` with its line of the results page and its provenance; return the path.

    Args:
        row: what reads the line off the result; None from it where a stage is still missing.
    """
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    # As it will be read from the file: keys of a dictionary are text there.
    found = row(json.loads(json.dumps({k: v for k, v in result.items() if k != "row"})))
    stored = {**result, "row": found and asdict(found), "provenance": provenance()}
    path.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    return path
