"""What MuSe's Triton kernels take on four chips: registers, spilled bytes and shared memory, by compiling and without a GPU.

It says nothing about time. ``launches_of_a_step`` has the sizes: a head of 4096 positions in blocks of 1024, 64 clusters.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from _bench import ResultRow, write

from hfplug.testing.kernels import CHIPS, compile_only

METHODS = ("muse",)

WIDTHS = (64, 128, 256)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def figures(chip: str) -> list[dict[str, Any]]:
    """One row per kernel launch, width of a key, and dtype."""
    from hfplug.kernels.muse.triton import launches_of_a_step

    torch.version.hip = "6.4" if CHIPS[chip].backend == "hip" else None  # some tiles are AMD's own
    rows = []
    for name, dtype in DTYPES.items():
        for width in WIDTHS:
            for launch, made in launches_of_a_step(width, width, dtype).items():
                found = compile_only(made.kernel, made.arguments, chip, **made.options)
                tiles = {k: v for k, v in made.arguments.items() if k in {"BC", "BP", "BR", "BM", "BG"}}
                fits = found.spills == 0 and found.shared <= CHIPS[chip].shared_limit
                rows.append({
                    "chip": chip, "launch": launch, "dtype": name, "width": width, "tiles": tiles, **made.options,
                    "registers": found.registers, "spilled_bytes": found.spills, "shared_bytes": found.shared, "fits": fits,
                })  # fmt: skip
    return rows


def results_row(result: dict[str, Any]) -> ResultRow:
    """What stands on the results page."""
    summary = result["summary"]
    fit = all(row["fit"] == row["launches"] and row["most_spilled_bytes"] == 0 for row in summary.values())
    return ResultRow(
        "no kernel spills registers or exceeds shared memory, on four chips, compiled without them",
        "none; a limit of our own",
        "; ".join(
            f"{chip}: {row['fit']} of {row['launches']} fit, spilled {row['most_spilled_bytes']} B"
            for chip, row in summary.items()
        ),
        "target met" if fit else "target missed",
    )


def main() -> None:
    """Compile everything, print the tightest launches, write the file."""
    rows = [row for chip in CHIPS for row in figures(chip)]
    limits = {chip: CHIPS[chip].shared_limit for chip in CHIPS}
    summary = {}
    for chip in CHIPS:
        mine = [row for row in rows if row["chip"] == chip]
        summary[chip] = {
            "launches": len(mine),
            "fit": sum(row["fits"] for row in mine),
            "most_registers": max(row["registers"] for row in mine),
            "most_spilled_bytes": max(row["spilled_bytes"] for row in mine),
            "most_shared_bytes": max(row["shared_bytes"] for row in mine),
            "shared_limit": limits[chip],
        }
        print(chip, summary[chip])
    claim = str(__doc__).splitlines()[0]
    triton = importlib.metadata.version("triton")
    print(write("muse_kernels", {"claim": claim, "triton": triton, "summary": summary, "launches": rows}, results_row))


if __name__ == "__main__":
    main()
