"""Models, batches and runs that the contract of attention methods is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from hfplug.testing.attention_models import FAMILIES
from hfplug.testing.runs import NEW, Runs, off

if TYPE_CHECKING:
    from torch import Tensor

    from hfplug.attention import AttentionCall

LAYOUTS = ("plain", "left-padded", "right-padded", "packed", "chunked")


class AttentionRuns(Runs):
    """What :class:`~hfplug.testing.attention.AttentionContract` runs; its attributes are described there."""

    method: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    exact_when_short: ClassVar[int | None] = None
    long: ClassVar[int] = 100
    causal: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-5
    rms: ClassVar[float] = 1e-6
    rms_gradient: ClassVar[float] = 1e-5

    def reference(self, call: AttentionCall) -> Tensor | None:
        """The method's own result for a call in fp64, ``(batch, queries, heads, dim_v)``; ``None``: there is none."""
        return None

    @property
    def target(self) -> Any:
        """The class of the method."""
        from hfplug.method import Kind
        from hfplug.plugins import load

        return load(self.method, Kind.ATTENTION)

    @property
    def handles(self) -> frozenset[str]:
        """What the method says it handles."""
        return frozenset(self.target().handles)

    def lacks(self, family: str) -> list[str]:
        """What a family needs and the method does not handle."""
        return [name for name in FAMILIES[family][2] if name not in self.handles]

    def model(self, family: str = "llama", **options: Any) -> Any:
        """A model that uses the method, with its options, in evaluation mode."""
        from hfplug.seams.attention import configure

        made = FAMILIES[family][0](attn=self.method, **options).eval()
        self.kept = configure(made, self.method, **self.options)  # as long as the test, as a user's would
        return made

    def supported(self, family: str) -> Any:
        """The model of a family; the test is left where the method does not handle what it needs (B14 has the refusal)."""
        if self.lacks(family):
            pytest.skip(f"{self.method} does not handle {self.lacks(family)}, which {family} needs")
        return self.model(family)

    @contextmanager
    def recorded(self) -> Iterator[list[tuple[AttentionCall, Tensor]]]:
        """Every call that reaches the method in the block, with its result."""
        stock = self.target.attend
        calls: list[tuple[AttentionCall, Tensor]] = []

        def attend(method: Any, call: AttentionCall) -> Any:
            found = stock(method, call)
            calls.append((call, found[0].detach()))
            return found

        patch = pytest.MonkeyPatch()
        patch.setattr(self.target, "attend", attend)
        try:
            yield calls
        finally:
            patch.undo()

    def run(self, model: Any, layout: str, length: int = 14) -> None:
        """One forward pass (two where chunked) of a layout."""
        import torch
        from transformers import DynamicCache

        if layout == "plain":
            self.logits(model, {"input_ids": self.ids(2, length)})
        elif layout == "packed":
            self.logits(model, self.packed((length // 3, 3, length - length // 3 - 3)))
        elif layout == "chunked":
            batch, cache, cut = self.padded("left", 3, length), DynamicCache(config=model.config), length // 2
            ids, mask, positions = (batch[k] for k in ("input_ids", "attention_mask", "position_ids"))
            with torch.no_grad():
                model(input_ids=ids[:, :cut], attention_mask=mask[:, :cut], position_ids=positions[:, :cut], cache=cache)
                model(input_ids=ids[:, cut:], attention_mask=mask, position_ids=positions[:, cut:], cache=cache)
        else:
            self.logits(model, self.padded(layout.removesuffix("-padded"), 3, length))


__all__ = ["LAYOUTS", "NEW", "AttentionRuns", "off"]
