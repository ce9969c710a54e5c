"""The contract of model patches, over ReToken and MoRT with full and with shared tables.

The quick tests take the families whose layers differ in what matters here; all of them are in the slow ones.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from hfplug.testing.patch import PatchContract


class _Some(PatchContract):
    compiles, embeds = False, False


class TestReToken(_Some):
    method = "retoken"
    families = ("Llama", "OPT", "LLaVA")


class TestReTokenShared(_Some):
    method = "retoken"
    options: ClassVar = {"rank": 4, "norm": "rms", "ids": tuple(range(1, 64))}
    families = ("Llama", "Qwen2.5-VL")
    test_compiled = test_a_folder_without_hfplug_is_refused = None  # slow, and no different from TestReToken


class TestMoRT(_Some):
    method = "mort"
    options: ClassVar = {"experts": 3, "norm": "rms"}
    families = ("Llama", "Gemma3")
    test_compiled = test_a_folder_without_hfplug_is_refused = None


class TestMoRTShared(_Some):
    method = "mort"
    options: ClassVar = {"rank": 4, "norm": "rms", "offload": True}
    families = ("GPT-NeoX", "Llama")
    test_compiled = test_a_folder_without_hfplug_is_refused = None


@pytest.mark.slow
class TestReTokenEverywhere(PatchContract):
    method = "retoken"
    compiles, embeds = False, False


@pytest.mark.slow
class TestMoRTEverywhere(PatchContract):
    method = "mort"
    options: ClassVar = {"rank": 4, "norm": "rms", "experts": 3}
    compiles, embeds = False, False
