"""Which inputs a layer's weights meet: the mean square of each, by which the choice of dynamic factors can be weighted.

Our addition: the paper chooses by the error of the weights alone. The error of a layer's output, for inputs without correlation,
is ``sum_k E[x_k^2] (W - Ŵ)_k^2``; its weights are measured on text here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hfplug.errors import ConfigError, nearest


def calibrate(model: nn.Module, batches: Iterable[Mapping[str, Any]], file: str | Path) -> int:
    """Measure the mean square of every input of every linear layer, and write it.

    Args:
        model: in full precision; it is run in evaluation mode without gradients, and left as it was.
        batches: keyword arguments of its forward. Tokens with a 0 in ``attention_mask`` do not count.
        file: the safetensors file to write: the layer's name -> float32 ``(in_features,)``.

    Returns:
        How many tokens were counted.

    Raises:
        ConfigError: no batch, a layer whose input is not ``(batch, tokens, …)``, or no layer.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    mask: Tensor | None = None

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].detach().double()
            if mask is not None and x.shape[: mask.dim()] == mask.shape:
                x = x[mask]
            x = x.reshape(-1, x.shape[-1])
            sums[name] = sums.get(name, torch.zeros(x.shape[-1], dtype=x.dtype, device=x.device)) + x.square().sum(0)
            counts[name] = counts.get(name, 0) + len(x)

        return hook

    training = model.training
    with contextlib.ExitStack() as undone, torch.no_grad():
        undone.callback(model.train, training)
        model.eval()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                undone.callback(module.register_forward_pre_hook(watch(name)).remove)
        for batch in batches:
            given = batch.get("attention_mask")
            mask = given.bool() if isinstance(given, Tensor) and given.dim() == 2 else None
            model(**batch)
    if not counts:
        raise ConfigError("calibrate: no linear layer has seen an input; batches is empty, or the model has none")
    means = {name: (total / max(counts[name], 1)).float().cpu().contiguous() for name, total in sums.items()}
    save_file(means, str(file))
    return max(counts.values())


class Importance:
    """Mean squares of the inputs by layer, read from a file."""

    def __init__(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        self.file, self.tensors = file, dict(tensors)

    def of(self, name: str, width: int) -> Tensor:
        """The mean squares ``(width,)`` of one layer's inputs.

        Raises:
            ConfigError: the file does not have them.
        """
        found = self.tensors.get(name)
        if found is None or tuple(found.shape) != (width,):
            has = "nothing" if found is None else f"a tensor {tuple(found.shape)}"
            close = nearest(name, self.tensors) if found is None else ""
            raise ConfigError(
                f"importance={self.file!r} has {has} for the layer {name!r} with {width} inputs{close}; write it with "
                "calibrate() on this model"
            )
        return found


def read_importance(file: str) -> Importance:
    """What :func:`calibrate` wrote.

    Raises:
        ConfigError: no such file, or not a safetensors file.
    """
    if not Path(file).is_file():
        raise ConfigError(f"importance={file!r} is no file; calibrate() writes one")
    try:
        return Importance(file, load_file(file))
    except SafetensorError as error:
        raise ConfigError(f"importance={file!r} is no safetensors file: {error}") from error


__all__ = ["Importance", "calibrate", "read_importance"]
