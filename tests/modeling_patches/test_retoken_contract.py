"""The contract of model patches, over ReToken and MoRT with full and with shared tables."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from hfplug.testing.patch import PatchContract


class _Some(PatchContract):
    """A few families that differ in what matters here; the others are covered by ReToken's full tables."""

    families: ClassVar[tuple[str, ...]] = ("Llama", "Gemma3", "OPT", "Qwen2.5-VL")

    def stock(self, family: str = "Llama") -> Any:
        if family not in self.families:
            pytest.skip("covered by TestReToken")
        return super().stock(family)


class TestReToken(PatchContract):
    method = "retoken"
    compiles = False


class TestReTokenShared(_Some):
    method = "retoken"
    options: ClassVar = {"rank": 4, "norm": "rms", "ids": tuple(range(1, 64))}
    compiles = False


class TestMoRT(_Some):
    method = "mort"
    options: ClassVar = {"experts": 3, "norm": "rms"}
    compiles = False


class TestMoRTShared(_Some):
    method = "mort"
    options: ClassVar = {"rank": 4, "norm": "rms", "offload": True}
    families = ("Llama", "GPT-NeoX")
    compiles = False
