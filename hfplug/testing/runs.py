"""Batches and runs that the contracts of several kinds share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hfplug.testing import models

if TYPE_CHECKING:
    from torch import Tensor

NEW = 16


def off(found: Tensor, expected: Tensor) -> float:
    """The largest difference."""
    return float((found - expected).abs().max())


class Runs:
    """Tokens, batches, and what is done with a model."""

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
