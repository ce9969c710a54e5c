"""Options of the attention implementation ``sink_scores``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SinkScoresConfig:
    """How ``attn_implementation="sink_scores"`` computes; what is recorded, and how, is said to ``record()``."""

    fused: bool = field(
        default=True,
        metadata={
            "help": "compute output and scores in one pass where no gradient is needed (on the CPU; the output then differs from "
            "sdpa's in the last bits). False: sdpa, then the scores"
        },
    )
