"""Options of DRIFT: TRL's ``SFTConfig`` and what is added to it."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, ClassVar, Literal

from trl import SFTConfig

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.options import coerce


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class DRIFTConfig(SFTConfig):
    """TRL's ``SFTConfig``, with the options of DRIFT (arXiv 2605.31455; defaults of the authors' script).

    Those of the weights (``drift_beta``, ``drift_gamma``, …) are used where the data are rollouts; rows that have their
    ``weight`` already keep it.

    Raises:
        ConfigError: a value of the wrong type or out of range.
        UnsupportedError: a field of ``SFTConfig`` under which weights would be lost; see :meth:`check`.
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

    hidden_options: ClassVar[tuple[str, ...]] = tuple(f.name for f in dataclasses.fields(SFTConfig))

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(DRIFTConfig)
        for name in (f.name for f in dataclasses.fields(DRIFTConfig) if f.name.startswith("drift_")):
            setattr(self, name, coerce(getattr(self, name), hints[name], name))
        for name, allowed, fits in (
            ("drift_beta", "> 0", lambda v: v > 0),
            ("drift_gamma", "in [0, 1]", lambda v: 0 <= v <= 1),
            ("drift_repeat_penalty", "finite and >= 0", lambda v: 0 <= v < math.inf),
            ("drift_max_weight", "finite and > 0, or null", lambda v: v is None or 0 < v < math.inf),
        ):
            if not fits(value := getattr(self, name)):
                raise ConfigError(f"{name}={value!r} must be {allowed}")
        super().__post_init__()
        self.check()

    def check(self) -> None:
        """Refuse what loses weights; called again when the trainer is built, as fields can be set in between.

        Raises:
            UnsupportedError: names the field, and what to set.
        """
        for name, refused, why in (
            ("packing", True, "a packed row holds several samples and has no weight of its own; TRL drops the column"),
            ("padding_free", True, "a batch without rows has no place for a weight per row"),
            ("assistant_only_loss", True, "it trains every assistant turn; DRIFT trains the last one (the completion)"),
            ("completion_only_loss", False, "it trains the prompt as well; DRIFT trains the last answer (the completion)"),
            ("loss_type", "dft", 'it weighs tokens by itself; set loss_type="nll"'),
            ("use_liger_kernel", True, "its kernels were not proven with weights per row"),
        ):
            if (value := getattr(self, name)) == refused and value is not None:
                raise UnsupportedError(f"DRIFTConfig.{name}={value!r} is not supported: {why}")
        if self.label_smoothing_factor:
            raise UnsupportedError(
                f"DRIFTConfig.label_smoothing_factor={self.label_smoothing_factor} is not supported: TRL then takes the loss of "
                "the batch from a smoother that knows no weights; set it to 0"
            )
