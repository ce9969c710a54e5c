"""A trainable module that rides in a model while it trains and is no part of it: hidden, kept beside checkpoints.

In the model's module tree the optimizer, clipping, DDP and device moves see it; in the model's state dict nobody does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from hfplug.errors import ConfigError
from hfplug.positions import first_tensor


def hide(auxiliary: nn.Module, name: str) -> None:
    """Keep a module out of the state dict of whatever holds it as ``name``, and out of the missing keys when one is loaded.

    Its own ``state_dict()`` and ``load_state_dict()`` work as ever.
    """

    def strip(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in [k for k in state if prefix and k.startswith(prefix)]:
            del state[key]

    def excuse(module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [k for k in keys.missing_keys if name not in k.split(".")]

    auxiliary.register_state_dict_post_hook(strip)
    auxiliary.register_load_state_dict_post_hook(excuse)


def save(auxiliary: nn.Module, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the module's weights as safetensors; ``path`` is replaced in one step, when the new file is on the disk."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in auxiliary.state_dict().items()}
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        safetensors.torch.save_file(state, part, {"format": "pt", **metadata})
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def restore(auxiliary: nn.Module, path: Path, what: str) -> None:
    """Load what :func:`save` wrote into ``auxiliary``.

    Args:
        auxiliary: the module.
        path: the file.
        what: whose module it is, for the message.

    Raises:
        ConfigError: there is no such file, or its names and shapes are not the module's.
    """
    if not path.is_file():
        raise ConfigError(
            f"resume_from_checkpoint={str(path.parent)!r} holds no {path.name}: it was written without {what}, or with "
            "save_only_model=True; resume without it, or start anew"
        )
    stored = safetensors.torch.load_file(path)
    has, needs = ({k: tuple(v.shape) for k, v in s.items()} for s in (stored, auxiliary.state_dict()))
    if has != needs:
        raise ConfigError(
            f"{path.name} in {str(path.parent)!r} does not fit {what} as configured now: it holds {has}, needed is {needs}"
        )
    auxiliary.load_state_dict(stored)


class _Depend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, total: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def depend(output: Any, total: Tensor) -> Any:
    """Return ``output`` of a token stack with hidden states that depend on ``total`` in the graph, without any gradient.

    DDP looks for unused parameters by walking the graph from what the model returns. What is added to the loss later is not
    found there, so its parameters would be taken for unused, and reduced before they have a gradient.
    """
    hidden = _Depend.apply(first_tensor(output), total)  # type: ignore[no-untyped-call]
    if isinstance(output, Tensor):
        return hidden
    if hasattr(output, "last_hidden_state"):
        output.last_hidden_state = hidden
        return output
    return (hidden, *output[1:])
