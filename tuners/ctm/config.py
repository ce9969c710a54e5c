"""The options of compress-then-merge."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hfplug.errors import ConfigError, nearest
from hfplug.tuners.ctm.rules import RULES


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class CtMConfig:
    """Configuration of compress-then-merge ("Compress then Merge: From Multiple LoRAs into One Low-Rank Adapter", ICML 2026).

    With ``X_t`` the updates rescaled to norms ``beta·‖dW_t‖ + (1 - beta)·mean``, orthonormal ``U``, ``V`` of the final rank
    maximise ``sum_t ‖Uᵀ·X_t·V‖²``; the result is ``scale · U·rule({w_t·Uᵀ·dW_t·V})·Vᵀ``.
    """

    beta: float = _option(
        0.25, "share of its own norm in an update's say on the subspaces, in [0, 1]; 0: all equal, 1: raw norms"
    )
    rule: str | Callable[[Tensor], Tensor] = field(
        default="linear",
        metadata={
            "help": "'linear' (the sum), 'mean', 'ties', 'dare_linear', 'dare_ties', or a function from the coordinates "
            "(T, k, k), float64 with the weights multiplied in, to (k, k)"
        },
    )
    density: float = _option(0.25, "share of the entries that TIES keeps of each adapter, in (0, 1]")
    drop: float = _option(0.1, "probability with which DARE drops an entry, in [0, 1); the default is our choice")
    scale: float = _option(1.0, "lambda: factor on the merged update")
    iterations: int = _option(1000, "the most iterations of the subspaces (HOOI)")
    tolerance: float = _option(1e-6, "stop when the relative reconstruction error changes by less")

    def __post_init__(self) -> None:
        if not callable(self.rule) and self.rule not in RULES:
            raise ConfigError(f"rule={self.rule!r} is none of {sorted(RULES)}, nor a function{nearest(self.rule, RULES)}")
        checks = (
            ("beta", 0 <= self.beta <= 1, "in [0, 1]"),
            ("density", 0 < self.density <= 1, "in (0, 1]"),
            ("drop", 0 <= self.drop < 1, "in [0, 1)"),
            ("scale", math.isfinite(self.scale), "finite"),
            ("iterations", self.iterations > 0, "> 0"),
            ("tolerance", self.tolerance >= 0, ">= 0"),
        )
        for name, good, allowed in checks:
            if not good:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be {allowed}")
