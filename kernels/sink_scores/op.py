"""The op: Triton on a GPU, the chunked torch form elsewhere; and recording with it."""

from __future__ import annotations

import functools
import importlib.util
import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hfplug import recording, sinks
from hfplug.recording import Recorder
from hfplug.sinks import SinkScores

logger = logging.getLogger(__name__)


def sink_scores(
    query: Tensor, key: Tensor, mask: Tensor | None = None, scaling: float | None = None, **options: Any
) -> SinkScores:
    """Attention received by every key; arguments, result and errors of :func:`hfplug.sinks.sink_scores`.

    Triton kernels on a GPU (two passes, nothing of the size of the map in memory), the chunked torch form elsewhere and for
    what the kernels do not take: additive 4-D masks, ``argmax``, float64. The log says once which.
    """
    reason = _why_torch(query, mask, bool(options.get("argmax")))
    _say("Triton kernels" if reason is None else f"the torch form ({reason})")
    if reason is not None:
        return sinks.sink_scores(query, key, mask, scaling, **options)
    from hfplug.kernels.sink_scores import triton as kernels

    return kernels.sink_scores(query, key, mask, scaling, **options)


def record(model: nn.Module, **options: Any) -> AbstractContextManager[Recorder]:
    """:func:`hfplug.recording.record` with the kernels: scores of everything a model computes inside a ``with`` block.

    Args:
        model: a causal model whose attention goes through transformers' ``AttentionInterface``.
        options: those of :func:`hfplug.recording.record`: ``layers``, ``counted``, ``log_diagonal``, ``value_norms``,
            ``prefix``, ``chunk``.
    """
    return recording.record(model, **{"score": sink_scores, **options})


def _why_torch(query: Tensor, mask: Tensor | None, argmax: bool) -> str | None:
    """Why the Triton kernels cannot take this call; None if they can."""
    if not query.is_cuda:
        return f"tensors are on {query.device.type!r}, and the kernels need a GPU"
    if query.dtype == torch.float64:
        return "float64"
    if argmax:
        return "argmax"
    if mask is not None and mask.dim() == 4 and mask.dtype != torch.bool:
        return "an additive mask"
    if importlib.util.find_spec("triton") is None:
        return "the package 'triton' is not installed: pip install 'hfplug[triton]'"
    return None


@functools.cache  # once per choice and process
def _say(choice: str) -> None:
    logger.info("sink scores use %s", choice)
