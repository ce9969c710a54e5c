"""The options of the optimal truncation."""

from __future__ import annotations

from dataclasses import dataclass, field

from hfplug.errors import ConfigError


@dataclass
class SvdMergeConfig:
    """Configuration of ``svd_merge``: ``dW = sum w_t·dW_t``, truncated to the rank (Eckart and Young, 1936)."""

    tolerance: float = field(
        default=1e-12,
        metadata={
            "help": "singular values below this share of sum |w_t|·‖dW_t‖ are rounding, and are left out where no rank is given"
        },
    )

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ConfigError(f"tolerance={self.tolerance!r} must be in (0, 1)")
