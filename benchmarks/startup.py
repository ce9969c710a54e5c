"""Claim: `import hfplug` takes < 0.2 s and `hfplug list` < 0.5 s, whatever is installed beside.

Expected before measuring: import about 0.1 s over a bare interpreter (pluggy, wrapt, packaging), list about 0.3 s
(typer and rich on top). Each measurement is a new process; a bare `python -c pass` is taken in turn with them.

    python benchmarks/startup.py
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from _bench import ResultRow, interleave, summary, write

METHODS = ()

BOUNDS = {"import hfplug": 0.2, "hfplug list": 0.5}
COMMANDS = {
    "bare": ["-c", "pass"],
    "import hfplug": ["-c", "import hfplug"],
    "hfplug list": ["-m", "hfplug", "list"],
}


def results_row(result: dict[str, Any]) -> ResultRow:
    """What stands on the results page."""
    return ResultRow(
        str(result["claim"]),
        "none; limits of our own",
        "; ".join(f"{name} {result['seconds'][name]['median']:.2f} s" for name in result["within"]),
        "target met" if all(result["within"].values()) else "target missed",
    )


def main() -> None:
    """Measure, print, write."""

    def run(words: list[str]) -> None:
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)

    times = interleave({name: lambda words=words: run(words) for name, words in COMMANDS.items()}, repeats=9, warmup=2)
    walls = {name: summary(t.wall) for name, t in times.items()}
    bare = walls["bare"]["median"]
    claim = "import hfplug < 0.2 s, hfplug list < 0.5 s (whole process)"
    result = {"claim": claim, "bounds": BOUNDS, "seconds": walls, "within": {}}
    for name, bound in BOUNDS.items():
        median = walls[name]["median"]
        result["within"][name] = median < bound
        print(f"{name}: {median:.3f} s (bare interpreter {bare:.3f} s), bound {bound} s: {'yes' if median < bound else 'NO'}")
    print(write("startup", result, results_row))


if __name__ == "__main__":
    main()
