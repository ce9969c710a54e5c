"""Options of SA-DPO: TRL's ``DPOConfig`` and the surrogate, the margin and where the distances stand."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, ClassVar

from trl import DPOConfig

from hfplug import ConfigError, UnsupportedError
from hfplug.trainers.sa_dpo.margins import check_margin_options
from hfplug.trainers.sa_dpo.surrogates import Surrogate, surrogate

LOSS = "sa_dpo"
# What would change the log ratios behind the margin's back, or the forward they come from; the value at which it does not.
_REFUSED = {
    "padding_free": (False, "TRL has switched it off for DPO and would pad all the same"),
    "use_liger_kernel": (False, "it is deprecated for DPO and not proven with this loss"),
    "use_weighting": (False, "WPO's weights apply to TRL's own losses alone"),
    "f_divergence_type": ("reverse_kl", "the margin is defined for differences of log ratios"),
    "ld_alpha": (None, "the margin is defined for sums over whole responses"),
}


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class SADPOConfig(DPOConfig):
    """``DPOConfig`` for :class:`SADPOTrainer` (arXiv 2604.27733; every default below is our reading of the abstract).

    ``loss_type`` holds ``"sa_dpo"`` and may hold further losses of TRL's, weighted by ``loss_weights``.
    ``surrogate="logistic", gamma_max=0, margin="constant"`` is TRL's ``DPOTrainer`` exactly. The preset nearest to the abstract
    is ``surrogate="poly"`` with the structure margin.

    Raises:
        ConfigError: a value that cannot be.
        UnsupportedError: an option of ``DPOConfig`` that this loss cannot be combined with.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*DPOConfig._VALID_DICT_FIELDS, "surrogate_options"]
    hidden_options: ClassVar[tuple[str, ...]] = tuple(f.name for f in dataclasses.fields(DPOConfig) if f.name != "loss_type")

    loss_type: list[str] = dataclasses.field(
        default_factory=lambda: [LOSS],
        metadata={"help": "'sa_dpo', and further losses of TRL's DPOTrainer to add to it, e.g. 'sft'"},
    )
    surrogate: str = _option("logistic", "Phi: 'logistic', 'hinge', 'poly', 'exp', or one that another plugin offers")
    surrogate_options: dict[str, Any] | str | None = dataclasses.field(
        default=None, metadata={"help": "options of the surrogate, e.g. {'power': 3} for 'poly'"}
    )
    margin: str = _option(
        "structure", "'structure': gamma_max * min(d / tau, 1); 'constant': gamma_max; 'column': as margin_column says"
    )
    gamma_max: float = _option(0.5, "the full margin in reward units (beta * log ratio), >= 0")
    tau: float = _option(0.25, "distance from which on the structure margin is full, in (0, 1]")
    distance_column: str = _option("semantic_distance", "column with d in [0, 1], for margin='structure'")
    margin_column: str = _option("margin", "column with the margins themselves, reward units, for margin='column'")
    reference_free: bool = _option(False, "no reference: the log ratio is the policy's own log probability (as in SimPO)")
    length_normalized: bool = _option(False, "log ratios per token of the response (as TRL's 'sigmoid_norm' and SimPO)")

    def __post_init__(self) -> None:
        check_margin_options(self.margin, self.gamma_max, self.tau)
        if isinstance(self.surrogate_options, str):  # from the command line
            self.surrogate_options = json.loads(self.surrogate_options)
        self.build_surrogate()
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        if self.loss_type.count(LOSS) != 1:
            raise ConfigError(
                f"loss_type={self.loss_type!r} must hold {LOSS!r} once, besides any further losses of TRL's; "
                "with those alone DPOTrainer is the trainer"
            )
        for name, (allowed, why) in _REFUSED.items():
            if (value := getattr(self, name)) != allowed:
                raise UnsupportedError(f"{name}={value!r} is not supported with SA-DPO: {why}; leave it at {allowed!r}")
        if not (math.isfinite(self.beta) and self.beta > 0):
            raise ConfigError(f"beta={self.beta!r} must be finite and > 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing={self.label_smoothing!r} must be in [0, 0.5): the share of flipped labels")
        if self.reference_free:
            for name in ("precompute_ref_log_probs", "sync_ref_model"):
                if getattr(self, name):
                    raise ConfigError(f"{name}=True with reference_free=True: there is no reference; set one of them to False")
        super().__post_init__()

    def build_surrogate(self) -> Surrogate:
        """The surrogate with its options.

        Raises:
            ConfigError: an unknown surrogate or option.
        """
        options = self.surrogate_options or {}
        if not isinstance(options, dict):
            raise ConfigError(f"surrogate_options={options!r} must be a mapping of options of {self.surrogate!r}")
        return surrogate(self.surrogate, **options)

    @property
    def value_column(self) -> str | None:
        """The column of the dataset that the margin is read from; ``None``: it needs none."""
        return {"structure": self.distance_column, "column": self.margin_column, "constant": None}[self.margin]
