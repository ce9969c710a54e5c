"""The contract of quantizers holds for a toy with eight bits, and each fault turns the test that is named for it red."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from quantizer_toys import TUNERS, ToyLinear, installed

from hfplug.errors import HfplugError
from hfplug.testing.quantizer import QuantizerContract


class TestToy(QuantizerContract):
    method = "toy_int8"
    options: ClassVar[dict[str, Any]] = {"levels": 100}
    other: ClassVar[dict[str, Any]] = {"levels": 50}
    tuners, merging = TUNERS, "ulora"
    bits, error, drift = 9.0, 0.02, 1e-6

    @pytest.fixture(autouse=True)
    def _installed(self) -> Iterator[None]:
        with installed():
            yield


# -- faults ------------------------------------------------------------------------------------------------------------


class _Mixes(ToyLinear):
    @classmethod
    def pack(cls, weight: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
        scale = weight.float().abs().amax().expand(len(weight)).clone() / config.levels  # one for all rows
        codes = (weight.float() / scale[:, None]).round() + 128
        return {"weight": torch.nn.functional.pad(codes.to(torch.uint8), (0, 1)), "weight_scale": scale}


class _Detached(ToyLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.detach())


class _RoundsInputs(ToyLinear):
    def product(self, x: torch.Tensor) -> torch.Tensor:
        return super().product(x.to(torch.bfloat16).to(x.dtype))


class _Coarse(ToyLinear):
    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return super().unpack(torch.float32).mul(8).round().div(8).to(dtype)


class _Random(ToyLinear):
    @classmethod
    def pack(cls, weight: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
        return super().pack(weight + 0.01 * torch.randn_like(weight, dtype=torch.float32), config)


class _Forgets(ToyLinear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}weight_scale"]


class _Mute(ToyLinear):
    @classmethod
    def execution(cls, config: Any) -> str:
        return "fast"


class _Floats(ToyLinear):
    @classmethod
    def layout(cls, out_features: int, in_features: int, config: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        scale = super().layout(out_features, in_features, config)["weight_scale"]
        return {"weight": ((out_features, max(2, in_features)), torch.uint8), "weight_scale": scale}


@pytest.mark.parametrize(
    ("fault", "test", "arguments"),
    [
        (_Mixes, "test_any_input_size_is_packed_and_rows_do_not_mix", ()),
        (_Coarse, "test_the_error_and_the_bits_are_bounded", ()),
        (_Random, "test_packing_what_was_unpacked_changes_nothing", ()),
        (_Random, "test_quantised_on_load_is_each_weight_packed", ("llama", "float32")),
        (_RoundsInputs, "test_the_logits_are_those_of_the_dequantised_model_and_not_of_the_original", ("llama",)),
        (_Detached, "test_b44_gradients_are_those_of_the_dequantised_reference", ()),
        (_Forgets, "test_b50_a_packed_folder_is_the_model", ("llama", "float32")),
        (_Mute, "test_b44_one_line_says_how_it_runs", ()),
        (_Floats, "test_no_size_can_be_taken_for_full_precision", ()),
    ],
)
def test_a_fault_is_seen(
    fault: type[ToyLinear], test: str, arguments: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = {"tmp_path": tmp_path, "caplog": caplog}
    method = getattr(TestToy(), test)
    extra = {name: value for name, value in known.items() if name in inspect.signature(method).parameters}
    with installed(fault), pytest.raises((AssertionError, HfplugError)):
        method(*arguments, **extra)
