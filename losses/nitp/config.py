"""Options of NITP."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, Literal

from hfplug.errors import ConfigError
from hfplug.options import coerce


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class NITPConfig:
    """Options of next implicit token prediction (arXiv 2605.24956).

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    weight: float = _option(1.0, "lambda, the weight of the term in the loss, >= 0; 0 switches it off (paper: 1, .8 or .6)")
    layer: int | None = _option(
        None, "k: the target is the state after the first k layers; null: max(1, round(0.2 * layers)) (paper: about 20 %)"
    )
    pairs: Literal["labels", "all"] = _option(
        "labels", "which t count: those whose successor has a label, or all whose successor is a real token of the document"
    )
    hidden_multiple: int = _option(4, "inner width of the SwiGLU projector, in multiples of the hidden size (paper: 4)")
    start_step: int = _option(0, "optimiser step before which the weight is 0 (paper: 0; its late starts were worse)")
    eps: float = _option(1e-6, "lower bound of both norms in the cosine (our reading)")

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, coerce(getattr(self, field.name), hints[field.name], field.name))
        for name, least, exclusive in (
            ("weight", 0, False), ("layer", 1, False), ("hidden_multiple", 1, False), ("start_step", 0, False), ("eps", 0, True),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and (value > least or (value == least and not exclusive))):
                raise ConfigError(f"{name}={value!r} must be finite and {'>' if exclusive else '>='} {least}")
