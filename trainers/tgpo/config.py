"""Options of TGPO."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from hfplug import ConfigError
from hfplug.errors import nearest
from hfplug.seams.trainer import MethodConfig, stock_config

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
_CONSTANT = re.compile(r"const:(.+)")


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class TGPOConfig(MethodConfig, stock_config("grpo")):  # type: ignore[misc]
    """``GRPOConfig`` with the options of TGPO. Every one is our reading: of the paper only the abstract is public.

    Raises:
        ConfigError: an option of TGPO of the wrong type or out of range.
        UnsupportedError: a field of ``GRPOConfig`` that TGPO replaces or has no meaning with.
    """

    epsilon_high: float | None = _option(0.28, "upper clip range of the ratio; TGPO's default")
    num_iterations: int = _option(2, "updates per generated batch; TGPO's default: with 1 every ratio may be 1")
    tgpo_tau: float = _option(0.2, "width of the trust gate, > 0, in nats of a token's log-ratio off its sequence's mean")
    tgpo_gate: str = _option("gaussian", 'trust gate: "gaussian", "const:<v>" with v in [0, 1], or "off" (v = 1)')
    tgpo_anchor: Literal["sequence", "token"] = _option("sequence", "what ratios are pulled to; token: nothing, GRPO's ratios")
    tgpo_kappa: float | None = _option(0.1, "width of a sequence's trust, > 0, in nats of its mean log-ratio; null: all weigh 1")
    tgpo_w_min: float = _option(0.2, "least weight of a drifted sequence, in [0, 1]; none is dropped")
    tgpo_info_quantile: float | None = _option(
        None, "tokens below this entropy quantile of the micro-batch, in (0, 1], pass less of their own signal; null: off"
    )
    tgpo_surrogate: Literal["retain", "clip"] = _option("retain", "retain: clipped ratio, full gradient; clip: PPO's minimum")

    def check(self) -> None:
        """Ranges, and the fields of GRPO that TGPO takes the place of."""
        self.bound("tgpo_tau", above=0)
        self.bound("tgpo_kappa", above=0)
        self.bound("tgpo_w_min", least=0, most=1)
        self.bound("tgpo_info_quantile", above=0, most=1)
        _ = self.gate_constant
        self.require("tgpo", "which takes the place of the ratio it gates", loss_type=LOSS_TYPES)
        self.require("tgpo", "because TGPO sets the level itself (tgpo_anchor)", importance_sampling_level=("token",))
        if self.tgpo_surrogate == "retain":
            self.require("tgpo", "because tgpo_surrogate='retain' has no minimum to bound", delta=(None,))

    @property
    def gate_constant(self) -> float | None:
        """The gate where it is a constant; ``None`` for the gaussian.

        Raises:
            ConfigError: ``tgpo_gate`` is none of its forms.
        """
        if self.tgpo_gate == "gaussian":
            return None
        if self.tgpo_gate == "off":
            return 1.0
        found = _CONSTANT.fullmatch(self.tgpo_gate)
        try:
            value = float(found[1]) if found else float("nan")
        except ValueError:
            value = float("nan")
        if not 0 <= value <= 1:
            near = nearest(self.tgpo_gate, ("gaussian", "off", "const:1"))
            raise ConfigError(f"tgpo_gate={self.tgpo_gate!r} is not 'gaussian', 'off' or 'const:<v>' with v in [0, 1]{near}")
        return value
