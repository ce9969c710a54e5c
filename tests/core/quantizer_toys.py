"""A small quantizer as a plugin would bring it: eight bits, one scale a row; and the catalogue with it."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import molora_kit
import peft
import torch

import hfplug.tuners
from hfplug import activation
from hfplug.method import Kind, Method, Paper
from hfplug.packed import PackedLinear
from hfplug.plugins import Entry, Source, catalogue
from hfplug.seams.quantizer import PluginQuantizer, QuantizerConfig
from hfplug.testing.quantizer_adapters import TARGETS, lora

PAPER = Paper(title="A toy", venue="nowhere", url="https://example.invalid", fidelity="our reading")


def on_top(**options: Any) -> Callable[[Any], Any]:
    """What puts a tuner of a plugin on a model, its weights drawn at random."""
    return lambda model: peft.get_peft_model(model, hfplug.tuners.config(**options, init_lora_weights=False, **TARGETS))


TUNERS: dict[str, Callable[[Any], Any]] = {
    "lora": lora,
    "ulora": on_top(type="ulora", r=4, merge_mode="mean"),
    "bayes_lora": on_top(type="bayes_lora", r=4, kl_weight=0.0),
    "molora": molora_kit.wrap,
}
"""The tuners that are put on packed layers in tests."""


@dataclass(repr=False)
class ToyConfig(QuantizerConfig):
    method: ClassVar[str] = "toy_int8"
    levels: int = field(default=127, metadata={"help": "largest code"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(("levels", 1 <= self.levels <= 127, "in [1, 127]"))


class ToyLinear(PackedLinear):
    """``weight`` uint8 ``(out, in + 1)``: codes, offset by 128, and a column of zeros; ``weight_scale`` float32 ``(out,)``."""

    method = "toy_int8"

    @classmethod
    def layout(cls, out_features: int, in_features: int, config: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"weight": ((out_features, in_features + 1), torch.uint8), "weight_scale": ((out_features,), torch.float32)}

    @classmethod
    def pack(cls, weight: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
        scale = weight.float().abs().amax(1).clamp(min=1e-12) / config.levels
        codes = (weight.float() / scale[:, None]).round() + 128
        return {"weight": torch.nn.functional.pad(codes.to(torch.uint8), (0, 1)), "weight_scale": scale}

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return ((self.weight[:, :-1].float() - 128) * self.weight_scale[:, None]).to(dtype)


class ToyQuantizer(PluginQuantizer):
    method = "toy_int8"
    linear_cls: ClassVar[type[PackedLinear]] = ToyLinear


def entry(target: str = "quantizer_toys:ToyQuantizer", config: str = "quantizer_toys:ToyConfig", name: str = "toy_int8") -> Entry:
    method = Method(name=name, kind=Kind.QUANTIZER, target=target, config=config, summary="a toy", paper=PAPER)
    return Entry(method, Source(name, "x", "hfplug-toy", "1.0"))


@contextlib.contextmanager
def installed(linear: type[PackedLinear] = ToyLinear) -> Iterator[None]:
    """The toy in the catalogue and registered, with another layer class if asked for."""
    module = types.ModuleType("quantizer_toy_module")
    module.Toy, module.ToyConfig = type("Toy", (ToyQuantizer,), {"linear_cls": linear}), ToyConfig  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    catalogue().entries["toy_int8"] = entry("quantizer_toy_module:Toy", "quantizer_toy_module:ToyConfig")
    try:
        again()
        yield
    finally:
        del sys.modules[module.__name__], catalogue().entries["toy_int8"]
        again()


def again() -> None:
    """The seam as it would be activated now."""
    if "hfplug.seams.quantizer" in activation.active():
        activation._ledgers.pop("hfplug.seams.quantizer").undo()
    activation.activate("hfplug.seams.quantizer")
