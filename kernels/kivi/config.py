"""Options of the KIVI cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hfplug.errors import ConfigError


@dataclass(frozen=True)
class KiviConfig:
    """How :class:`~hfplug.kernels.kivi.cache.KiviCache` stores keys and values."""

    bits: Literal[2, 4, 8] = field(default=2, metadata={"help": "bits of a code (paper: 2)"})
    group_size: int = field(
        default=32,
        metadata={
            "help": "numbers that share a step and a minimum: tokens of one channel for keys, channels of one token for values"
        },
    )
    value_group: int | None = field(
        default=None, metadata={"help": "channels that share them in the values; null: group_size (the paper has one size)"}
    )
    residual: int = field(
        default=128, metadata={"help": "the newest tokens stay exact until there are so many, then they are stored as a block"}
    )
    sink_tokens: int = field(default=0, metadata={"help": "the first tokens of every row stay exact (not in the paper)"})
    pre_rope: bool | None = field(
        default=False,
        metadata={"help": "store keys without their rotary embedding (not in the paper); null: where the model has one"},
    )
    scale_dtype: Literal["float16", "bfloat16", "float32"] = field(
        default="float16", metadata={"help": "type of steps and minima; bfloat16 where keys are beyond 65504"}
    )

    @property
    def groups(self) -> tuple[int, int]:
        """Tokens of a group of the keys, channels of a group of the values."""
        return self.group_size, self.group_size if self.value_group is None else self.value_group

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.residual < 1 or self.residual % self.group_size:
            raise ConfigError(f"group_size={self.group_size} must divide residual={self.residual}, both at least 1")
        if self.groups[1] < 1:
            raise ConfigError(f"value_group={self.value_group} must be at least 1")
        if not 0 <= self.sink_tokens <= self.residual:
            raise ConfigError(f"sink_tokens={self.sink_tokens} must be between 0 and residual={self.residual}")
