"""Options of the PatternKV cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hfplug.errors import ConfigError


@dataclass(frozen=True)
class PatternKVConfig:
    """How :class:`~hfplug.kernels.patternkv.cache.PatternKVCache` stores keys and values; :meth:`authors` is their form."""

    bits: Literal[2, 4, 8] = field(default=2, metadata={"help": "bits of a code (paper: 2)"})
    key_group: int = field(
        default=64, metadata={"help": "tokens of one channel of the keys that share a step and a minimum (paper: 128)"}
    )
    value_group: int | None = field(
        default=None, metadata={"help": "channels of one token of the values that do; null: the whole head, 128 at most"}
    )
    residual: int = field(
        default=128, metadata={"help": "the newest tokens stay exact until there are so many, then they are stored as a block"}
    )
    key_patterns: int = field(
        default=8,
        metadata={"help": "pattern vectors per key-value head for the keys; 0: none; 15 and no pattern are 4 bits (paper: 32)"},
    )
    value_patterns: int = field(default=15, metadata={"help": "the same for the values (paper: 32)"})
    pattern_bits: Literal[4, 8, 16] = field(
        default=4, metadata={"help": "bits of an element of a pattern; tokens are stored relative to the pattern as rounded"}
    )
    new_patterns: bool = field(
        default=False, metadata={"help": "add the middle of every later block to the patterns (paper: true), up to 255"}
    )
    later_assignment: Literal["nearest", "range"] = field(
        default="nearest",
        metadata={"help": "pattern of later tokens: least distance, or least range over the channels (paper: range)"},
    )
    gate: bool = field(
        default=True, metadata={"help": "values take a pattern only where it narrows their range beyond chance (paper: true)"}
    )
    share_batch: bool = field(
        default=False, metadata={"help": "patterns of the mean over the batch (authors' code); rows then depend on each other"}
    )
    sink_tokens: int = field(default=4, metadata={"help": "the first tokens of every row stay exact (not in the paper)"})
    pre_rope: bool | None = field(
        default=None,
        metadata={"help": "store keys without their rotary embedding (not in the paper); null: where the model has one"},
    )
    scale_dtype: Literal["float16", "bfloat16", "float32"] = field(
        default="float16", metadata={"help": "type of steps and minima; bfloat16 where keys are beyond 65504"}
    )

    def __post_init__(self) -> None:
        if self.key_group < 1 or self.residual < 1 or self.residual % self.key_group:
            raise ConfigError(f"key_group={self.key_group} must divide residual={self.residual}, both at least 1")
        if not 0 <= self.sink_tokens <= self.residual:
            raise ConfigError(f"sink_tokens={self.sink_tokens} must be between 0 and residual={self.residual}")
        for name in ("key_patterns", "value_patterns"):
            if not 0 <= getattr(self, name) <= 255:
                raise ConfigError(f"{name}={getattr(self, name)} must be between 0 and 255: an index is one byte")

    @classmethod
    def authors(cls, **changes: Any) -> PatternKVConfig:
        """The paper's and the authors' form: 32 full patterns, added to, shared by the batch; rotated keys, no exact tokens."""
        form: dict[str, Any] = {
            "key_group": 128,
            "key_patterns": 32,
            "value_patterns": 32,
            "pattern_bits": 16,
            "new_patterns": True,
            "later_assignment": "range",
            "share_batch": True,
            "sink_tokens": 0,
            "pre_rope": False,
        }
        return cls(**{**form, **changes})
