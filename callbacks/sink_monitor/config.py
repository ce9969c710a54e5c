"""Options of the sink monitor."""

from __future__ import annotations

from dataclasses import dataclass, field

from hfplug import ConfigError


@dataclass
class SinkMonitorConfig:
    """What is measured, how often, and at what cost.

    Definitions follow the sink score of SinkProbe (arXiv 2604.10697, Eq. 1; self-edge convention: our reading of the
    authors' earlier code, which includes the diagonal) and the value-norm ratio of the attention-sink literature.
    """

    every: int | None = field(
        default=None,
        metadata={
            "help": "optimiser steps between measurements (step s is measured when s % every == 0); None: the steps "
            "the trainer logs, or every 100th where it does not log by steps"
        },
    )
    layers: list[int] | None = field(
        default=None, metadata={"help": "indices of the layers measured, negative ones from the end; None: all"}
    )
    chunk: int = field(
        default=256,
        metadata={"help": "query rows scored at a time; working memory is about chunk x heads x tokens x 8 bytes"},
    )
    max_rows: int | None = field(
        default=None,
        metadata={
            "help": "rows measured of each micro-batch, the first ones; None: all. With a number the figures depend on "
            "how a batch is cut into micro-batches"
        },
    )
    include_self: bool = field(
        default=True,
        metadata={"help": "count the first token's attention to itself (always 1) in the mean, as the score's definition does"},
    )
    value_norm: bool = field(default=True, metadata={"help": "log ||v_0|| / median_j ||v_j||, the mean over key-value heads"})
    argmax_share: bool = field(
        default=False,
        metadata={"help": "log the fraction of (query, head) pairs whose largest weight is on the first token"},
    )
    log_per_head: bool = field(default=False, metadata={"help": "log the mass of every query head too"})
    evaluate: bool = field(default=False, metadata={"help": "measure every batch of evaluations too (eval_sink/...)"})

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("chunk", self.chunk), ("max_rows", self.max_rows)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if self.layers is not None and (not self.layers or len(set(self.layers)) < len(self.layers)):
            raise ConfigError(f"layers={self.layers} must name at least one layer, each once; None measures all")
