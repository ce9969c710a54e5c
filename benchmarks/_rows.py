"""Read the lines of the results page off the stored results again, without measuring.

python benchmarks/_rows.py [NAME ...]
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict

from _bench import ROOT


def main(names: list[str]) -> None:
    """Those named, or all; what is stored besides the line stays as it is."""
    folder = ROOT / "benchmarks"
    for name in names or sorted(p.stem for p in folder.glob("[a-z]*.py")):
        file = folder / "results" / f"{name}.json"
        if not file.is_file():
            print(f"{name}: never measured")
            continue
        stored = json.loads(file.read_text(encoding="utf-8"))
        provenance = stored.pop("provenance")
        stored.pop("row", None)
        row = importlib.import_module(name).results_row(dict(stored))
        file.write_text(
            json.dumps({**stored, "row": row and asdict(row), "provenance": provenance}, indent=2) + "\n", encoding="utf-8"
        )
        print(f"{name}: {row and row.verdict}")


if __name__ == "__main__":
    main(sys.argv[1:])
