"""Options of Bridge-Garden distillation."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from hfplug.errors import ConfigError
from hfplug.seams.trainer import MethodConfig, stock_config
from hfplug.trainers.distill_base import check_no_liger

SFTConfig: Any = stock_config("sft")


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class BridgeGardenConfig(MethodConfig, SFTConfig):
    """TRL's ``SFTConfig`` and the options of Bridge-Garden hybrid distillation (arXiv 2605.26246).

    Raises:
        ConfigError: a value of the wrong type or out of range.
        UnsupportedError: an option of ``SFTConfig`` that changes the loss in a way this one does not follow.
    """

    _VALID_DICT_FIELDS: ClassVar = [*SFTConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs"]

    garden_variant: Literal["static", "confidence", "label_confidence", "entropy", "power_entropy", "curriculum", "risk"] = (
        dataclasses.field(
            default="entropy",
            metadata={
                "help": "where lambda, the soft label's weight, comes from: the teacher, per token; for static and risk from "
                "garden_soft_weight, for curriculum from the step as well"
            },
        )
    )
    garden_soft_weight: float = _option(
        0.5, "lambda in [0, 1] of static and risk, and the last value of curriculum; 0: hard labels alone, 1: soft alone"
    )
    garden_power: float = _option(
        0.5, "g of power_entropy, > 0: (sum p^g - 1) / (V^(1-g) - 1); 1 is entropy (authors' default .5, their scripts .1)"
    )
    garden_warmup: float = _option(
        0.2, "part of the training steps over which curriculum's lambda rises from 0, in [0, 1] (authors' code: .2)"
    )
    garden_risk_weight: float = _option(0.1, "alpha of risk, >= 0: the hard label's loss gets + alpha / 4 * delta^2 (paper: .1)")
    garden_chunk_size: int = _option(
        1024, "tokens whose logits exist at a time, >= 1; smaller: less memory, more passes over the head"
    )
    teacher_model_name_or_path: str | None = _option(None, "hub id or folder of the teacher, where the trainer is given none")
    teacher_model_init_kwargs: dict[str, Any] | str | None = dataclasses.field(
        default=None, metadata={"help": "keyword arguments of from_pretrained for the teacher, e.g. {dtype: bfloat16}"}
    )

    def check(self) -> None:
        """Ranges, and what of ``SFTConfig`` the loss does not follow."""
        self.bound("garden_soft_weight", least=0, most=1)
        self.bound("garden_warmup", least=0, most=1)
        self.bound("garden_power", above=0)
        self.bound("garden_risk_weight", least=0)
        self.bound("garden_chunk_size", least=1)
        check_no_liger(self, "bridge_garden")
        self.require("bridge_garden", "the hard label's loss is cross-entropy", loss_type=("nll",))
        self.require("bridge_garden", "the teacher's soft labels take its place", label_smoothing_factor=(0, 0.0))
        if isinstance(self.teacher_model_init_kwargs, str) and not self.teacher_model_init_kwargs.startswith("{"):
            raise ConfigError(f"teacher_model_init_kwargs={self.teacher_model_init_kwargs!r} must be a mapping, or one as JSON")
