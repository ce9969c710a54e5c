"""What keeps tests quick that train many tiny models."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_the_tests_make() -> Iterator[None]:
    """``Trainer.train`` begins with a garbage collection, which would walk every imported module's objects each time."""
    import peft  # noqa: F401
    import trl.trainer.dpo_trainer
    import trl.trainer.sft_trainer  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
