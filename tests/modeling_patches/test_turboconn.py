"""TurboConn keeps the contract of model patches."""

from __future__ import annotations

import pytest

from hfplug.testing.patch import PatchContract
from hfplug.testing.patch_models import FAMILIES, over


class TestTurboConn(PatchContract):
    """Feedback one token back, group after group."""

    method = "turboconn"
    compiles = False

    @pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
    @over(FAMILIES)
    def test_b56_checkpointing_changes_no_gradient(self, family: str, reentrant: bool) -> None:
        """In fp64: without checkpointing groups are computed, with it full passes, and their sums differ in order."""
        model = self.exact(family)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "patched", lambda family: model)
            super().test_b56_checkpointing_changes_no_gradient(family, reentrant)
