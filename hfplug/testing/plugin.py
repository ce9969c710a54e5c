"""The pytest plugin: makes failures inside the contract kit readable. Imports no torch."""

from __future__ import annotations

from typing import Any

import pytest

_KIT = (
    "tuner", "tuner_files", "loss", "callback", "attention", "attention_runs", "patch", "patch_files", "patch_runs", "cache",
    "cache_runs", "quantizer", "quantizer_adapters", "trainer",
)  # fmt: skip
pytest.register_assert_rewrite(*(f"hfplug.testing.{name}" for name in _KIT))


def pytest_configure(config: Any) -> None:
    """Declare the marker the kit uses, so that ``--strict-markers`` accepts it in a stranger's project."""
    if not any(line.partition(":")[0].strip() == "slow" for line in config.getini("markers")):
        config.addinivalue_line("markers", "slow: takes more than about 20 s")
