"""Options of MXFP4 with overflow-aware and macro block scaling."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hfplug.errors import ConfigError
from hfplug.kernels.mxfp4_plus.formats import Format
from hfplug.options import coerce
from hfplug.seams.quantizer import QuantizerConfig


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(repr=False)
class Mxfp4PlusConfig(QuantizerConfig):
    """How weights (and activations) are stored in 4 bits (arXiv 2603.08713; names of the paper in brackets).

    The default is the paper's best, MBS-H: blocks of 16, overflow-aware scales, a factor per 128 numbers that is searched for
    weights and computed for activations. ``block=32, scale="floor", mbs="none"`` is plain OCP MXFP4.
    """

    method: ClassVar[str] = "mxfp4_plus"
    loading_options: ClassVar[tuple[str, ...]] = ("dequantize", "activations")

    block: Literal[16, 32] = _option(16, "numbers that share a scale, along the inputs; 32 is the OCP format")
    scale: Literal["floor", "rceil", "ceil", "even", "oas"] = _option(
        "oas", "rule for a block's power-of-two scale: floor (OCP), rceil, ceil, even (Quark, torchao), oas (overflow-aware)"
    )
    mbs: Literal["none", "static", "dynamic", "hybrid"] = _option(
        "hybrid", "factor in [1, 2) per macro block: none, static (MBS-S), dynamic (MBS-D), hybrid (MBS-H: dynamic for weights)"
    )
    macro: int = _option(128, "numbers that share a factor; a multiple of block")
    activations: Literal[4, 16] = _option(
        16, "bits of the input of each layer: 4 rounds it in the same format at every call, 16 leaves it alone"
    )
    importance: str | None = _option(
        None, "safetensors file that calibrate() wrote: weights of the squared error by which dynamic factors are chosen"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.macro = coerce(self.macro, int, "macro")
        self.format  # noqa: B018  refuses
        self.require(("activations", self.activations in (4, 16) and not isinstance(self.activations, bool), "4 or 16"))
        if self.importance is not None and self.format.weights.mbs != "dynamic":
            raise ConfigError(f"importance is given, but mbs={self.mbs!r} chooses nothing; it must be 'dynamic' or 'hybrid'")

    @property
    def format(self) -> Format:
        """The block format.

        Raises:
            ConfigError: block, scale, mbs or macro is not allowed.
        """
        return Format(self.block, self.scale, self.mbs, self.macro)

    @property
    def act_format(self) -> Format | None:
        """The format of the layers' inputs; ``None``: they are left alone."""
        return self.format.activations if self.activations == 4 else None

    def to_dict(self) -> dict[str, Any]:
        """As the base class's; the file of the importance is a path of this machine, used when weights are packed."""
        return {k: copy.deepcopy(v) for k, v in super().to_dict().items() if k != "importance"}
