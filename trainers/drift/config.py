"""Options of DRIFT: TRL's ``SFTConfig`` and what is added to it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from hfplug.seams.trainer import MethodConfig, stock_config


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class DRIFTConfig(MethodConfig, stock_config("sft")):  # type: ignore[misc]
    """TRL's ``SFTConfig``, with the options of DRIFT (arXiv 2605.31455; defaults of the authors' script).

    Those of the weights (``drift_beta``, ``drift_gamma``, …) are used where the data are rollouts; rows that have their
    ``weight`` already keep it.

    Raises:
        ConfigError: a value of the wrong type or out of range.
        UnsupportedError: a field of ``SFTConfig`` under which weights would be lost.
    """

    drift_beta: float = _option(0.1, "beta of the weights exp(return / beta), > 0 (authors' script .1, their default .2)")
    drift_gamma: float = _option(0.9, "discount per turn, in [0, 1] (authors' script .9, their default .7)")
    drift_repeat_penalty: float = _option(0.5, "lost by a rollout whose answers all repeat, >= 0 (authors' code: .5)")
    drift_max_weight: float | None = _option(None, "upper bound of a weight, > 0, put on after normalisation; null: none (ours)")
    drift_normalization: Literal["sequence", "token", "weight"] = _option(
        "sequence",
        'of an optimizer step: "sequence": mean of w * mean token loss over its rows (paper); "token": sum of w * token loss '
        'over the number of tokens (SFT\'s own with w = 1); "weight": sum of w * mean token loss over the sum of w',
    )
    drift_drop_zero_success: bool = _option(
        False, "leave out prompts none of whose rollouts was solved (ours; authors keep them)"
    )

    def check(self) -> None:
        """Ranges, and what loses weights; the trainer asks again, as fields can be set in between."""
        self.bound("drift_beta", above=0)
        self.bound("drift_gamma", least=0, most=1)
        self.bound("drift_repeat_penalty", least=0)
        self.bound("drift_max_weight", above=0)
        for why, allowed in (
            ("a packed row holds several samples and TRL drops their weights", {"packing": [False]}),
            ("a batch without rows has no place for a weight per row", {"padding_free": [False]}),
            ("every assistant turn would be trained, not the last one alone", {"assistant_only_loss": [False]}),
            ("the prompt would be trained as well as the last answer", {"completion_only_loss": [None, True]}),
            ("it weighs tokens by itself", {"loss_type": ["nll"]}),
            ("TRL then takes the loss from a smoother that knows no weights", {"label_smoothing_factor": [0.0]}),
            ("its kernels were not proven with weights per row", {"use_liger_kernel": [False]}),
        ):
            self.require("drift", why, **allowed)
