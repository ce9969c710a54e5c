"""The options of MoLoRA."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hfplug.errors import ConfigError, nearest
from hfplug.seams.tuner import PluginConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class MoLoraConfig(PluginConfig):
    """Configuration of MoLoRA (per-token adapter routing, arXiv 2603.15965; our reading).

    With frozen LoRA experts ``k`` and a null expert (the base model) the output for token ``t`` of a target ``Linear`` is
    ``y_t = W0·x_t + w_t·s_k·B_k·A_k·x_t`` with ``k = argmax`` of the router's logits and ``w_t = 1``.

    ``experts`` maps a name to a folder (or hub id) of a plain PEFT LoRA adapter. When the adapter is made the folders are
    read and replaced by records without any path; the tensors are then part of this adapter and saved with it. Experts
    are always kept in the order of their names, so the order they are given in means nothing.

    ``target_modules`` may stay ``None``: the union of the experts' modules.
    """

    method: ClassVar[str] = "molora"

    experts: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "name -> folder or hub id of a LoRA adapter; its record once it was read"}
    )
    router: Literal["learned", "vocabulary", "none"] = _option(
        "learned", "what decides: a small MLP, the token's id, or adapter_ids given with each call (routing(...))"
    )
    router_scope: Literal["layer", "model", "module"] = _option(
        "layer", "one decision per decoder layer from its input, one from the input of router_layer, or one per linear module"
    )
    router_layer: int = _option(1, "scope 'model': the decoder layer whose input is read; layers before it run the base model")
    router_hidden: int = _option(128, "width of the router's hidden layer; our reading")
    routing: Literal["hard", "soft"] = _option(
        "hard", "one expert at scale 1 (straight-through gradient), or the softmax-weighted sum of all"
    )
    router_gradient: Literal["all", "chosen"] = _option(
        "all", "hard, one expert, in training: what every expert would have given (all their rows), or only the chosen one"
    )
    top_k: int = _option(1, "experts per token when hard; with more than one their softmax weights are renormalised")
    temperature: float = _option(1.0, "softmax temperature of the logits, > 0")
    null_expert: bool = _option(True, "whether the router may choose the base model alone")
    vocabulary: list[Any] | None = field(
        default=None,
        metadata={
            "help": "router 'vocabulary': [lo, hi, expert] for ids lo <= id < hi, or [[ids], expert]; null: the base model"
        },
    )
    vocabulary_default: str | None = _option(None, "expert of every id that no entry of vocabulary names; null: the base model")
    allow_other_base: bool = _option(False, "take experts whose adapter_config.json names another base model")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.experts, dict) or not self.experts:
            raise ConfigError(f"experts={self.experts!r} must map at least one name to the folder of a LoRA adapter")
        for name in self.experts:
            if not isinstance(name, str) or not _NAME.fullmatch(name) or "molora" in name:
                raise ConfigError(
                    f"experts: the name {name!r} must consist of letters, digits, '_' and '-' and not contain 'molora'"
                )
        self.experts = {name: self.experts[name] for name in sorted(self.experts)}
        self.require(
            ("router", self.router in ("learned", "vocabulary", "none"), "'learned', 'vocabulary' or 'none'"),
            ("router_scope", self.router_scope in ("layer", "model", "module"), "'layer', 'model' or 'module'"),
            ("routing", self.routing in ("hard", "soft"), "'hard' or 'soft'"),
            ("router_gradient", self.router_gradient in ("all", "chosen"), "'all' or 'chosen'"),
            ("router_layer", isinstance(self.router_layer, int) and self.router_layer >= 0, "an integer >= 0"),
            ("router_hidden", isinstance(self.router_hidden, int) and self.router_hidden > 0, "an integer > 0"),
            ("temperature", self.temperature > 0, "> 0"),
            ("top_k", isinstance(self.top_k, int) and 1 <= self.top_k <= len(self.slots),
             f"an integer from 1 to {len(self.slots)}, the number of experts to choose from"),
        )  # fmt: skip
        self._check_vocabulary()

    def _check_vocabulary(self) -> None:
        if (self.vocabulary is not None) != (self.router == "vocabulary"):
            raise ConfigError(f"vocabulary={self.vocabulary!r} goes with router='vocabulary', which is {self.router!r} here")
        for entry in self.vocabulary or []:
            ranged = len(entry) == 3 and all(isinstance(i, int) for i in entry[:2]) and 0 <= entry[0] < entry[1]
            ids = entry[0] if len(entry) == 2 and isinstance(entry[0], (list, tuple)) else [-1]
            if not (ranged or all(isinstance(i, int) and i >= 0 for i in ids)):
                raise ConfigError(f"vocabulary: {entry!r} is neither [lo, hi, expert] with 0 <= lo < hi nor [[ids], expert]")
        for expert in [*(entry[-1] for entry in self.vocabulary or []), self.vocabulary_default]:
            self.check_expert(expert, "vocabulary")

    def check_expert(self, name: Any, where: str) -> None:
        """Refuse a name that is no expert of this adapter; ``None`` is the base model."""
        if name is not None and name not in self.experts:
            raise ConfigError(f"{where}: no expert {name!r}{nearest(name, self.experts)}; experts: {sorted(self.experts)}")

    @property
    def names(self) -> tuple[str, ...]:
        """The experts, in the order of their names."""
        return tuple(sorted(self.experts))

    @property
    def spread(self) -> bool:
        """Whether a fresh router spreads the tokens over the slots, because from a tie it would not learn."""
        return self.router_gradient == "chosen" or self.top_k > 1 or self.routing == "soft"

    @property
    def slots(self) -> tuple[str | None, ...]:
        """What a row of the router's output stands for; ``None`` is the null expert."""
        return (None, *self.names) if self.null_expert else self.names
