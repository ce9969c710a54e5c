"""Settings every test runs under: offline, one thread, no warnings about forked tokenizers.

The environment is set when this file is imported, hence before any test module imports torch, and it is
inherited by the processes that tests start.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",  # sums are then added in one order: bounds of 0 ulp can hold
    MKL_NUM_THREADS="1",
)
# A user's own choice of plugins must not decide which tests pass.
# A distribution of its own, tested where it is installed (tests/core/test_stranger.py).
collect_ignore = ["stranger_plugin"]
for _name in ("HFPLUG_PLUGINS", "HFPLUG_DISABLE", "HFPLUG_STRICT"):
    os.environ.pop(_name, None)


class _Shared:
    """Finds ``*_kit.py`` and ``*_toys.py`` beside the tests that share them, without their folders on the path.

    Only when they are asked for: they import torch, which many tests do not need.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        if not name.endswith(("_kit", "_toys")) or "." in name:
            return None
        file = next(Path(__file__).parent.glob(f"*/{name}.py"), None)
        return None if file is None else importlib.util.spec_from_file_location(name, file)


sys.meta_path.append(_Shared)


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """One torch thread also where a pytest plugin imported torch first; imports no torch itself."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)
