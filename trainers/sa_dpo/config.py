"""Options of SA-DPO: TRL's ``DPOConfig`` and the surrogate, the margin and where the distances stand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar, Literal

from hfplug import ConfigError
from hfplug.errors import nearest
from hfplug.seams.trainer import MethodConfig, stock_config
from hfplug.trainers.sa_dpo.surrogates import Surrogate, surrogate

LOSS = "sa_dpo"
# The losses of DPOTrainer, which looks at their names at the first step only. A drift test tells when TRL's list has changed.
STOCK_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
    "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
# What would change the log ratios behind the margin's back, or the forward they come from; the value at which it does not.
_ONLY = {
    "padding_free": (False, "TRL has switched it off for DPO and would pad all the same"),
    "use_liger_kernel": (False, "it is deprecated for DPO and not proven with this loss"),
    "use_weighting": (False, "WPO's weights apply to TRL's own losses alone"),
    "f_divergence_type": ("reverse_kl", "the margin is defined for differences of log ratios"),
    "ld_alpha": (None, "the margin is defined for sums over whole responses"),
}


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class SADPOConfig(MethodConfig, stock_config("dpo")):  # type: ignore[misc]
    """``DPOConfig`` for :class:`SADPOTrainer` (arXiv 2604.27733; every default below is our reading of the abstract).

    ``loss_type`` holds ``"sa_dpo"`` and may hold further losses of TRL's, weighted by ``loss_weights``. The logistic surrogate
    with ``sa_dpo_margin="constant", sa_dpo_gamma_max=0`` is TRL's ``DPOTrainer`` exactly; ``"poly"`` with the structure margin
    is nearest to the abstract. ``label_smoothing`` mixes in the pair the other way round, with the same margin.

    Raises:
        ConfigError: a value that cannot be.
        UnsupportedError: an option of ``DPOConfig`` that this loss cannot be combined with.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*stock_config("dpo")._VALID_DICT_FIELDS, "sa_dpo_surrogate_options"]

    loss_type: list[str] = dataclasses.field(
        default_factory=lambda: [LOSS],
        metadata={"help": "'sa_dpo', and further losses of TRL's DPOTrainer to add to it, e.g. 'sft'"},
    )
    sa_dpo_surrogate: str = _option("logistic", "Phi: 'logistic', 'hinge', 'poly', 'exp', or one that another plugin offers")
    sa_dpo_surrogate_options: dict[str, Any] | str | None = dataclasses.field(
        default=None, metadata={"help": "options of the surrogate, e.g. {'power': 3} for 'poly'"}
    )
    sa_dpo_margin: Literal["structure", "constant", "column"] = _option(
        "structure", "'structure': gamma_max * min(d / tau, 1); 'constant': gamma_max; 'column': as the margin column says"
    )
    sa_dpo_gamma_max: float = _option(0.5, "the full margin in reward units (beta * log ratio), >= 0")
    sa_dpo_tau: float = _option(0.25, "distance from which on the structure margin is full, in (0, 1]")
    sa_dpo_distance_column: str = _option("semantic_distance", "column with d in [0, 1], for the structure margin")
    sa_dpo_margin_column: str = _option("margin", "column with the margins themselves, reward units, for margin 'column'")
    sa_dpo_reference_free: bool = _option(False, "no reference: the log ratio is the policy's own log probability (as in SimPO)")
    sa_dpo_length_normalized: bool = _option(False, "log ratios per token of the response (as TRL's 'sigmoid_norm' and SimPO)")

    def check(self) -> None:
        """Ranges, the surrogate, and what of ``DPOConfig`` does not go together with the loss."""
        self.bound("sa_dpo_gamma_max", least=0)
        self.bound("sa_dpo_tau", above=0, most=1)
        self.bound("beta", above=0)
        if isinstance(self.sa_dpo_surrogate_options, str):  # from the command line
            self.sa_dpo_surrogate_options = _mapping(self.sa_dpo_surrogate_options)
        self.build_surrogate()
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        if self.loss_type.count(LOSS) != 1:
            near = next((n for t in self.loss_type if (n := nearest(t, [LOSS]))), "")
            raise ConfigError(
                f"loss_type={self.loss_type!r} must hold {LOSS!r} once{near}, besides any further losses of TRL's; "
                "with those alone DPOTrainer is the trainer"
            )
        for other in self.loss_type:
            if other not in (LOSS, *STOCK_LOSSES):
                raise ConfigError(
                    f"loss_type={self.loss_type!r}: {other!r} is no loss of DPOTrainer{nearest(other, STOCK_LOSSES)}; "
                    f"it has {list(STOCK_LOSSES)}"
                )
        for name, (allowed, why) in _ONLY.items():
            self.require(LOSS, why, **{name: (allowed,)})
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing={self.label_smoothing!r} must be in [0, 0.5): the share of flipped labels")
        for name in ("precompute_ref_log_probs", "sync_ref_model"):
            if self.sa_dpo_reference_free and getattr(self, name):
                raise ConfigError(f"{name}=True with sa_dpo_reference_free=True: there is no reference; set one to False")

    def build_surrogate(self) -> Surrogate:
        """The surrogate with its options.

        Raises:
            ConfigError: an unknown surrogate or option.
        """
        options: Any = self.sa_dpo_surrogate_options or {}
        return surrogate(self.sa_dpo_surrogate, **options)

    @property
    def value_column(self) -> tuple[str, str] | None:
        """The option that names the column which the margin is read from, and the column; ``None``: it needs none."""
        option = {"structure": "sa_dpo_distance_column", "column": "sa_dpo_margin_column"}.get(self.sa_dpo_margin)
        return None if option is None else (option, getattr(self, option))


def _mapping(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"sa_dpo_surrogate_options={text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f'sa_dpo_surrogate_options={text!r} must be a mapping, e.g. {{"power": 3}}')
    return found
