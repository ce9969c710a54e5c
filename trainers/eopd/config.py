"""Options of EOPD."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.seams.trainer import MethodConfig, stock_config
from hfplug.trainers.distill_base import check_no_liger

DistillationConfig: Any = stock_config("distill")


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class EOPDConfig(MethodConfig, DistillationConfig):
    """TRL's ``DistillationConfig`` and the options of entropy-aware on-policy distillation (arXiv 2603.07079).

    ``beta`` stays 1: the method adds to reverse KL. ``temperature`` is TRL's: of sampling and of both divergences, not of
    the gate.

    Raises:
        ConfigError: a value of the wrong type or out of range.
        UnsupportedError: ``use_liger_kernel``, or a gated mean over several micro-batches.
    """

    eopd_threshold: float = _option(
        0.8, "tau, nats: a token is gated where the teacher's entropy over the whole vocabulary, at temperature 1, is above it"
    )
    eopd_weight: float = _option(1.0, "alpha, weight of the forward KL on gated tokens, >= 0; 0 is plain reverse KL")
    eopd_top_k: int = _option(
        16, "k, words of the teacher in the forward KL, >= 1; more than the vocabulary has mean all (paper: 16)"
    )
    eopd_renormalize: bool = _option(
        True, "make the teacher's k probabilities sum to 1 (paper); false: as they are, a partial sum that may be negative"
    )
    eopd_full_vocabulary: bool = _option(
        True, "the student's probabilities are over all words (authors' default); false: over the k alone"
    )
    eopd_normalizer: Literal["all", "gated"] = _option(
        "all", "what the forward KL is divided by: all trained tokens, like the reverse KL, or the gated ones of the batch"
    )
    eopd_reverse_kl: Literal["exact", "sampled"] = _option(
        "exact", "reverse KL over the whole vocabulary, or estimated from the sampled token (authors' code)"
    )
    eopd_chunk_size: int = _option(
        1024, "tokens whose logits exist at a time, >= 1; smaller: less memory, more passes over the head"
    )

    def check(self) -> None:
        """Ranges, and what of ``DistillationConfig`` does not go with the method."""
        if math.isnan(self.eopd_threshold):
            raise ConfigError("eopd_threshold=nan compares with nothing; a number of nats, or an infinity")
        self.bound("eopd_weight", least=0)
        self.bound("eopd_top_k", least=1)
        self.bound("eopd_chunk_size", least=1)
        self.require("eopd", "it adds to reverse KL; for other divergences there is TRL's DistillationTrainer", beta=(1, 1.0))
        check_no_liger(self, "eopd")
        if self.eopd_normalizer == "gated" and self.gradient_accumulation_steps > 1:
            raise UnsupportedError(
                f"eopd_normalizer='gated' with gradient_accumulation_steps={self.gradient_accumulation_steps}: how many tokens "
                "of the window are gated is known only after its last micro-batch; use eopd_normalizer='all'"
            )
