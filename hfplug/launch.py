"""How a Triton kernel is started: one form for every method, which tests and benchmarks compile without starting it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A kernel with everything it is started with; ``arguments`` are the kernel's own, by name; ``options`` are Triton's."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    options: dict[str, int]

    def run(self) -> None:
        """Start it on the current stream; nothing to do where the output is empty."""
        if self.programs:
            self.kernel[(self.programs,)](**self.arguments, **self.options, enable_fp_fusion=True)


def launch_options(warps: int, stages: int) -> dict[str, int]:
    """Options of a launch whose tiles fill the registers of a chip."""
    import torch

    if torch.version.hip:
        return {"num_warps": warps, "num_stages": 1}  # a pipeline takes the registers of what it loads ahead there
    # Left alone, ptxas spills a few registers where that lets one more block on a multiprocessor; 8 warps of 255 still fit one.
    return {"num_warps": warps, "num_stages": stages, "maxnreg": 255}
