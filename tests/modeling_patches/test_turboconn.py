"""TurboConn keeps the contract of model patches."""

from __future__ import annotations

import pytest

from hfplug.testing.patch import PatchContract
from hfplug.testing.patch_models import FAMILIES, behaviours, over


class _Contract(PatchContract):
    """Feedback one token back, group after group."""

    method = "turboconn"
    compiles = False

    @pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
    @over(behaviours())
    def test_b56_checkpointing_changes_no_gradient(self, family: str, reentrant: bool) -> None:
        """In fp64: without checkpointing groups are computed, with it full passes, and their sums differ in order."""
        model = self.exact(family)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "patched", lambda family: model)
            super().test_b56_checkpointing_changes_no_gradient(family, reentrant)


class TestTurboConn(_Contract):
    families = ("Llama", "Gemma3", "GPT-NeoX", "GPT-2", "Qwen3-VL")


@pytest.mark.slow
class TestTurboConnEverywhere(_Contract):
    """The other families; what is tested on one family alone was tested above."""

    families = tuple(name for name in FAMILIES if name not in TestTurboConn.families)
    test_a_folder_without_hfplug_is_refused = test_b01_a_fresh_process_loads_the_model = test_compiled = test_peft_on_top = None
    test_b58_two_ranks_train_as_one_process = None
