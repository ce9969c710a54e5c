"""Asking a model something without leaving a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training


def probe_ids(model: nn.Module, rows: int, length: int) -> Tensor | None:
    """Token ids ``(rows, length)`` spread over the vocabulary, the same every time; ``None`` where there are no embeddings."""
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    table = getattr(embeddings, "weight", None)
    if table is None:
        return None
    return (torch.arange(rows * length, device=table.device) * 7919 % table.shape[0]).view(rows, length)
