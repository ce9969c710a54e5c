"""Models, batches and runs that the contract of attention methods is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from hfplug.testing import models
from hfplug.testing.attention_models import FAMILIES

if TYPE_CHECKING:
    from torch import Tensor

    from hfplug.attention import AttentionCall

LAYOUTS = ("plain", "left-padded", "right-padded", "packed", "chunked")
NEW = 16


def off(found: Tensor, expected: Tensor) -> float:
    """The largest difference."""
    return float((found - expected).abs().max())


class AttentionRuns:
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

    def ids(self, rows: int = 2, length: int = 14, seed: int = 0) -> Tensor:
        """Tokens ``(rows, length)``, without padding or image tokens."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, models.VOCAB - 1, (rows, length), generator=generator)

    def padded(self, side: str = "left", rows: int = 3, length: int = 14) -> dict[str, Tensor]:
        """Rows with 0, 2, 4, … tokens of padding on one side, with the positions a generation would give them."""
        import torch

        ids = self.ids(rows, length)
        mask = torch.ones_like(ids)
        for i in range(rows):
            cut = slice(0, 2 * i) if side == "left" else slice(length - 2 * i, length)
            mask[i, cut] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return {"input_ids": ids.masked_fill(mask == 0, models.PAD), "attention_mask": mask, "position_ids": positions}

    def packed(self, lengths: tuple[int, ...] = (5, 3, 6)) -> dict[str, Any]:
        """Documents in one row, told apart by positions that restart; without a cache, as in training."""
        import torch

        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        return {"input_ids": self.ids(1, sum(lengths)), "position_ids": positions, "use_cache": False}

    def logits(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        """Logits without gradients."""
        import torch

        with torch.no_grad():
            return model(**batch).logits

    def generate(self, model: Any, batch: Mapping[str, Any], **settings: Any) -> Any:
        """Greedy generation of 16 tokens, with the logits of each step."""
        shared: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": models.PAD}
        shared |= {"return_dict_in_generate": True, "output_logits": True}
        return model.generate(**{k: v for k, v in batch.items() if k != "position_ids"}, **{**shared, **settings})

    def gradients(self, model: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Gradients of the language-modelling loss, padding left out."""
        model.zero_grad()
        labels = batch["input_ids"]
        if "attention_mask" in batch:
            labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

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
